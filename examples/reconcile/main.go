// Command reconcile compares thirty days of orders with their payments. Several replica processes share the work: each
// day is done under a lease of its own, part by part, and a database has the results: a row per day, and the accounts,
// to which each part is added. It ends by comparing the accounts with the orders and payments.
//
//	go run .                              three replicas on an embedded Redis and SQLite
//	go run . -kill                        one of them is killed in the middle of a day, another takes the day over
//	go run . -stop                        one of them is stopped in the middle of a day, between its last look at its
//	                                      lease and its write, until another has done the day. The database refuses
//	                                      the late write by its fence, and the books balance
//	go run . -stop -fence=false           the same without fences: they do not
//	go run . -dsn postgres://user@host/db on PostgreSQL, in tables that begin with reconcile_ and stay;
//	                                      -fresh empties them first
//	REDIS_URL=redis://host:6379 go run .  on a Redis server
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
func fleetMain(ctx context.Context, args []string, out io.Writer) (err error) {
	f, fresh, err := parseFleet(args)
	if err != nil {
		return err
	}
	books, err := loadBooks(dataFiles)
	if err != nil {
		return err
	}
	if f.source == (source{}) {
		dir, err := os.MkdirTemp("", "reconcile")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		f.source.file = filepath.Join(dir, "books.db")
	}
	store, err := openStore(f.source, f.fence)
	if err != nil {
		return err
	}
	defer store.close()
	if f.keyPrefix, err = store.create(ctx, fresh); err != nil {
		return err
	}
	url, stop, err := redisURL()
	if err != nil {
		return err
	}
	defer stop()

	before, err := store.entries(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d days, %d of them done before; %d replicas, TTL %v\n\n",
		len(books.days), books.finished(before), f.replicas, f.ttl)

	f.redisURL, f.timeline = url, newTimeline(out)
	f.killAfter = (len(books.days) - books.finished(before)) * 4 / 5
	if err := f.run(ctx); err != nil {
		return err
	}
	asked := context.WithoutCancel(ctx) // to say how far it is, also if interrupted
	entries, err := store.entries(asked)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: %d of %d days are done", books.finished(entries), len(books.days))
	}
	accounts, err := store.accounts(asked)
	if err != nil {
		return err
	}
	printReport(out, entries)
	printAccounts(out, accounts, books.accounts())
	if err := errors.Join(everyDayDone(books, entries), balance(accounts, books.accounts())); err != nil {
		return err
	}
	fmt.Fprintln(out, "\nevery day is done, and the books balance")
	return nil
}

// parseFleet reads the command line.
func parseFleet(args []string) (f *fleet, fresh bool, err error) {
	f = &fleet{}
	flags := flag.NewFlagSet("reconcile", flag.ExitOnError)
	flags.IntVar(&f.replicas, "replicas", 3, "how many replica processes to start")
	flags.DurationVar(&f.ttl, "ttl", 3*time.Second, "the TTL of a lease")
	flags.DurationVar(&f.pace, "pace", 600*time.Millisecond, "how long a hundred orders take, to have something to see")
	flags.BoolVar(&f.kill, "kill", false, "give replica 1 very long days, and kill it in the middle of one")
	flags.BoolVar(&f.stop, "stop", false, "stop replica 1 before a write, and let it go on when another has done its day")
	flags.BoolVar(&f.fence, "fence", true, "take leases with a fence, and have the database check it at each write")
	flags.StringVar(&f.source.file, "db", "",
		"keep the books in this SQLite file; days that are done in it are not done again (default: a temporary file)")
	flags.StringVar(&f.source.dsn, "dsn", "", "keep the books in this PostgreSQL database instead")
	flags.BoolVar(&fresh, "fresh", false, "drop the tables of this program in the database first")
	if err := flags.Parse(args); err != nil {
		return nil, false, err
	}
	switch {
	case flags.NArg() > 0:
		return nil, false, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case f.replicas < 1:
		return nil, false, errors.New("-replicas must be at least 1")
	case f.kill && f.stop:
		return nil, false, errors.New("-kill and -stop do not go together")
	case (f.kill || f.stop) && f.replicas < 2:
		return nil, false, errors.New("-kill and -stop need at least 2 replicas")
	case f.stop && !canStop:
		return nil, false, errors.New("-stop needs a system where processes can be stopped by a signal")
	case f.source.dsn != "" && f.source.file != "":
		return nil, false, errors.New("-db and -dsn do not go together")
	}
	if f.source.file != "" {
		f.source.file, err = filepath.Abs(f.source.file)
	}
	return f, fresh, err
}
