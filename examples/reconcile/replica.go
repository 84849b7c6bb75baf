package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/sqlfence"
)

// replica is one of several processes that work on the same books. They talk to each other through nothing but the
// leases, which say who works on a day now, and the database, which says what is done.
type replica struct {
	id     int
	days   []string // all days, in this replica's own order
	books  *books
	store  *store
	locker *redislease.Locker
	ttl    time.Duration
	pace   time.Duration // for a hundred orders

	halt     bool            // once, in the middle of a day, between the last look at the lease and the write
	goOn     <-chan struct{} // has a value for each line from the parent, which ends a halt
	stopping <-chan struct{} // closed when this process is told to stop
}

// keyOf is the key of a day's lease: what is protected, and which part of it.
func keyOf(day string) string { return "reconcile:" + day }

// writeTimeout bounds a write that somebody else's transaction or a slow server holds up.
const writeTimeout = time.Minute

// replicaMain is the main function of a replica process.
func replicaMain(ctx context.Context, args []string) error {
	r := &replica{}
	from := source{dsn: os.Getenv("RECONCILE_DSN")}
	flags := flag.NewFlagSet("replica", flag.ExitOnError)
	flags.IntVar(&r.id, "id", 1, "the number of this replica")
	of := flags.Int("of", 1, "the number of replicas")
	flags.StringVar(&from.file, "db", "", "the SQLite file, unless $RECONCILE_DSN names a database")
	prefix := flags.String("prefix", "", "the prefix of all keys")
	fenced := flags.Bool("fence", true, "take leases with a fence, and have the database check it")
	flags.BoolVar(&r.halt, "halt", false, "wait for a line on standard input before the second write of a day, once")
	flags.DurationVar(&r.ttl, "ttl", 0, "the TTL of a lease")
	flags.DurationVar(&r.pace, "pace", 0, "how long a hundred orders take")
	if err := flags.Parse(args); err != nil {
		return err
	}

	books, err := loadBooks(dataFiles)
	if err != nil {
		return err
	}
	first := (r.id - 1) * len(books.days) / *of
	r.books, r.days = books, slices.Concat(books.days[first:], books.days[:first])

	if r.store, err = openStore(from, *fenced); err != nil {
		return err
	}
	defer r.store.close()
	client, err := connect(os.Getenv("REDIS_URL"), r.ttl)
	if err != nil {
		return err
	}
	defer client.Close()
	options := []redislease.LockerOption{
		redislease.WithPrefix(*prefix), redislease.WithTTL(r.ttl), redislease.WithObserver(r.observe),
	}
	if *fenced {
		options = append(options, redislease.WithFencing())
	}
	if r.locker, err = redislease.New(client, options...); err != nil {
		return err
	}

	// The parent holds our standard input open. When it is gone, however it went, we stop too.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lines := make(chan struct{}, 1)
	r.goOn, r.stopping = lines, ctx.Done()
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			lines <- struct{}{}
		}
		cancel()
	}()
	return r.run(ctx)
}

// run goes over the days again and again until all of them are done, or until ctx ends. Only a database that cannot be
// read or written makes it give up: busy days, lost leases, writes that were refused and a Redis in trouble are a matter
// of time.
func (r *replica) run(ctx context.Context) error {
	for {
		open, progressed := 0, false
		for _, day := range r.days {
			// A cheap look first. The one that counts is under the lease.
			e, err := r.store.look(ctx, day)
			if err == nil && r.finished(e) {
				continue
			}
			open++
			if err == nil {
				err = r.tryDay(ctx, day)
			}
			var stale *sqlfence.StaleError
			switch {
			case errors.As(err, &stale):
				// Somebody else has had the day since, and what he found is the truth. Look again.
				r.tell(day, refused, stale.Error())
			case ctx.Err() != nil: // told to stop; TryDo has released the lease
				r.tell(day, stopped, "")
				return nil
			case err == nil:
				progressed = true
			case errors.Is(err, redislease.ErrNotAcquired):
				r.tell(day, busy, "")
			case errors.Is(err, redislease.ErrLost):
				// Somebody else may work on this day by now. What reached the database before that stays true.
				r.tell(day, retry, err.Error())
				r.pause(ctx)
			case errors.Is(err, errDatabase):
				return err
			default:
				// An error of Redis, or no answer: ErrOutcomeUnknown. It says nothing about the day, so ask again later.
				r.tell(day, retry, err.Error())
				r.pause(ctx)
			}
		}
		if open == 0 {
			return nil
		}
		if !progressed {
			r.pause(ctx) // the rest is busy: somebody finishes it, or dies and its leases run out
		}
	}
}

// finished reports whether a day has no part left.
func (r *replica) finished(e entry) bool { return e.Parts >= len(r.books.parts(e.Day)) }

// tryDay does what is left of one day, unless another replica is at it.
func (r *replica) tryDay(ctx context.Context, day string) error {
	return r.locker.TryDo(ctx, keyOf(day), func(ctx context.Context, lease *redislease.Lease) error {
		// A lease is mutual exclusion, not run-once: its last holder may have finished the day, or a part of it.
		e, err := r.store.enter(ctx, lease.Key(), lease.Fence(), day)
		if err != nil || r.finished(e) {
			return err
		}
		parts := r.books.parts(day)
		r.tell(day, acquired, fmt.Sprintf("fence %d, from part %d of %d", lease.Fence(), e.Parts+1, len(parts)))
		for i, p := range parts[e.Parts:] {
			if e, err = r.reconcile(ctx, e, p); err != nil {
				return err
			}
			if err := lease.Err(); err != nil { // may a write still land?
				return err
			}
			which := fmt.Sprintf("part %d of %d", e.Parts, len(parts))
			late := r.halt && i > 0
			if late {
				if err := r.await(day, "the lease is held, "+which+" may be written"); err != nil {
					return err
				}
			}
			if err := r.write(ctx, lease, e, p); err != nil {
				return err
			}
			if late {
				r.tell(day, accepted, fmt.Sprintf("the late write of %s, %v after the end of the lease", which, overdue(lease)))
			}
		}
		r.tell(day, done, fmt.Sprintf("%d orders, %d matched, %d mismatches", e.Orders, e.Matched, len(e.Mismatches)))
		return nil
	})
}

// reconcile does the work of one part, and gives up as soon as ctx ends. It takes as long as -pace says: a real job would
// fetch the payments from a bank here.
func (r *replica) reconcile(ctx context.Context, e entry, p part) (entry, error) {
	select {
	case <-ctx.Done():
		return entry{}, context.Cause(ctx)
	case <-time.After(r.pace * time.Duration(len(p.orders)) / 100):
		return e.with(r.id, p), nil
	}
}

// write writes one part. It is on its way now, like a request that has left this process: no context stops it any more,
// and only the database can refuse it.
func (r *replica) write(ctx context.Context, lease *redislease.Lease, e entry, p part) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	return r.store.write(ctx, lease.Key(), lease.Fence(), e, p)
}

// await tells the parent that this is the moment, and waits for a line from it. Meanwhile the parent has the process stand
// still, past the end of the lease. The end of the lease's context is not waited for: code that goes on after a stop may
// well run before the timers that would tell it.
func (r *replica) await(day, note string) error {
	r.halt = false
	r.tell(day, checked, note)
	select {
	case <-r.goOn:
		return nil
	case <-r.stopping:
		return context.Canceled
	}
}

// overdue is for how long a lease has been over.
func overdue(lease *redislease.Lease) time.Duration {
	return time.Since(lease.Until()).Round(10 * time.Millisecond)
}

// pause waits for a fraction of the TTL. The jitter keeps replicas from asking in step.
func (r *replica) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(r.ttl/20 + rand.N(r.ttl/10)):
	}
}

// observe tells of what no call returns: a renewal that failed (the lease is still held and the library tries again) and
// a release that failed (the key runs out by itself).
func (r *replica) observe(_ context.Context, e redislease.Event) {
	if e.Err != nil && (e.Kind == redislease.EventRenewFailed || e.Kind == redislease.EventReleased) {
		r.tell(strings.TrimPrefix(e.Key, keyOf("")), trouble, e.Err.Error())
	}
}

func (r *replica) tell(day string, s step, note string) {
	tell(progress{Replica: r.id, Day: day, Step: s, Note: note})
}
