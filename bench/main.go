// Command bench compares redislease with other lease libraries for Redis and with code written by hand for the purpose,
// all on one Redis server that it starts itself. README.md says how to read its tables.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// harness is a run of the program.
type harness struct {
	server *server
	globs  string // of the names of the adapters
	log    func(format string, args ...any)
}

func (h *harness) logf(format string, args ...any) { h.log(format, args...) }

func main() {
	if len(os.Args) > 1 && os.Args[1] == workerFlag {
		if err := work(); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// flags is what the command line says.
type flags struct {
	full, list                 bool
	scenarios, adapters        string
	binary                     string
	rounds, drains             int
	waiters, processes, leases string
	ttl                        time.Duration
}

func parseFlags() (f flags) {
	flag.BoolVar(&f.full, "full", false, "the whole comparison, which takes most of an hour, instead of a few minutes")
	flag.StringVar(&f.scenarios, "scenarios", everything, "a: uncontended, b: contended, c: live leases, d: Redis hangs")
	flag.StringVar(&f.adapters, "adapters", "", "globs of names, separated by commas; the reference always takes part (default all)")
	flag.StringVar(&f.binary, "server", "redis-server", "the server to start")
	flag.IntVar(&f.rounds, "rounds", 0, "how many interleaved rounds (default as the scenario needs)")
	flag.IntVar(&f.drains, "drains", 0, "b: only so many drains of each kind, to find waiters left asleep")
	flag.StringVar(&f.waiters, "waiters", "", "b: how many waiters, separated by commas")
	flag.StringVar(&f.processes, "processes", "", "b: in how many processes, separated by commas")
	flag.StringVar(&f.leases, "leases", "", "c: how many leases, separated by commas")
	flag.DurationVar(&f.ttl, "ttl", 0, "c: the TTL of the leases")
	flag.BoolVar(&f.list, "list", false, "list the adapters and end")
	flag.Parse()
	return f
}

func run() error {
	f := parseFlags()
	if f.list {
		for _, a := range adapters() {
			fmt.Printf("%-18s %-4s %s\n", a.name, a.in, a.note)
		}
		return nil
	}
	p, err := f.plan()
	if err != nil {
		return err
	}
	s, err := startServer(f.binary)
	if err != nil {
		return err
	}
	defer s.close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	begun := time.Now()
	h := &harness{server: s, globs: f.adapters, log: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "%6.1fs "+format+"\n", append([]any{time.Since(begun).Seconds()}, args...)...)
	}}
	fmt.Printf("Redis %s on loopback, %s, %d CPUs, GOMAXPROCS %d, go-redis %s\n",
		s.version(), runtime.Version(), runtime.NumCPU(), runtime.GOMAXPROCS(0), goRedisVersion())
	done := make(chan error, 1)
	go func() { done <- h.scenarios(f.scenarios, p) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done(): // the server and the workers end with this process
		return context.Cause(ctx)
	}
}

// scenarios runs the scenarios and prints their tables, also of one that failed halfway.
func (h *harness) scenarios(names string, p plan) error {
	all := map[string]func() (*table, error){
		uncontended: func() (*table, error) { return h.uncontended(p.uncontended) },
		contended:   func() (*table, error) { return h.contended(p.contended) },
		live:        func() (*table, error) { return h.live(p.live), nil },
		hang:        func() (*table, error) { return h.hang(p.hang), nil },
	}
	for _, name := range strings.Split(names, "") {
		scenario, ok := all[name]
		if !ok {
			return fmt.Errorf("no scenario %q", name)
		}
		t, err := scenario()
		if err := t.print(os.Stdout); err != nil {
			return err
		}
		if err != nil {
			return err
		}
		if err := h.server.flush(); err != nil {
			return err
		}
	}
	return nil
}
