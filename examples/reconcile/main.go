// Command reconcile compares thirty days of orders with their payments. Several replica processes share the work: each
// day is done under a lease of its own, and a journal says which days are done.
//
//	go run .                              three replicas on an embedded Redis
//	go run . -kill                        one of them is killed in the middle of a day, another takes the day over
//	REDIS_URL=redis://host:6379 go run .  on a server
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if len(os.Args) > 1 && os.Args[1] == "replica" {
		err = replicaMain(ctx, os.Args[2:]) // started by fleetMain
	} else {
		err = fleetMain(ctx, os.Args[1:], os.Stdout)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "reconcile:", err)
		os.Exit(1)
	}
}

// fleetMain starts the replicas, shows what they do and checks the result.
func fleetMain(ctx context.Context, args []string, out io.Writer) error {
	f, journalPath, err := parseFleet(args)
	if err != nil {
		return err
	}
	books, err := loadBooks(dataFiles)
	if err != nil {
		return err
	}
	if journalPath == "" {
		dir, err := os.MkdirTemp("", "reconcile")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		journalPath = filepath.Join(dir, "journal")
	}
	journal, err := openJournal(journalPath)
	if err != nil {
		return err
	}
	url, stop, err := redisURL()
	if err != nil {
		return err
	}
	defer stop()

	before, err := journal.read()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d days, %d of them done before; %d replicas, TTL %v\n\n",
		len(books.days), len(before), f.replicas, f.ttl)

	f.journal, f.redisURL, f.timeline = journal, url, newTimeline(out)
	f.killAfter = (len(books.days) - len(before)) * 4 / 5
	if err := f.run(ctx); err != nil {
		return err
	}
	entries, err := journal.read()
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: %d of %d days are done", len(entries), len(books.days))
	}
	printReport(out, entries)
	if err := everyDayOnce(books.days, entries); err != nil {
		return err
	}
	fmt.Fprintln(out, "\nevery day was done once")
	return nil
}

// parseFleet reads the command line.
func parseFleet(args []string) (f *fleet, journalPath string, err error) {
	f = &fleet{}
	flags := flag.NewFlagSet("reconcile", flag.ExitOnError)
	flags.IntVar(&f.replicas, "replicas", 3, "how many replica processes to start")
	flags.DurationVar(&f.ttl, "ttl", 3*time.Second, "the TTL of a lease")
	flags.DurationVar(&f.pace, "pace", 600*time.Millisecond, "how long a hundred orders take, to have something to see")
	flags.BoolVar(&f.kill, "kill", false, "give replica 1 very long days, and kill it in the middle of one")
	flags.StringVar(&journalPath, "journal", "",
		"keep the journal in this file; days in it are not done again (default: a temporary file)")
	if err := flags.Parse(args); err != nil {
		return nil, "", err
	}
	switch {
	case flags.NArg() > 0:
		return nil, "", fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case f.replicas < 1:
		return nil, "", errors.New("-replicas must be at least 1")
	case f.kill && f.replicas < 2:
		return nil, "", errors.New("-kill needs at least 2 replicas")
	}
	return f, journalPath, nil
}
