package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redislease/redislease"
)

// replica is one of several processes that work on the same books. They talk to each other through nothing but the
// leases, which say who works on a day now, and the journal, which says what is done.
type replica struct {
	id      int
	days    []string // all days, in this replica's own order
	books   *books
	journal journal
	locker  *redislease.Locker
	ttl     time.Duration
	pace    time.Duration // for a hundred orders
}

// keyOf is the key of a day's lease: what is protected, and which part of it.
func keyOf(day string) string { return "reconcile:" + day }

// replicaMain is the main function of a replica process.
func replicaMain(ctx context.Context, args []string) error {
	r := &replica{}
	flags := flag.NewFlagSet("replica", flag.ExitOnError)
	flags.IntVar(&r.id, "id", 1, "the number of this replica")
	of := flags.Int("of", 1, "the number of replicas")
	flags.StringVar(&r.journal.path, "journal", "", "the file with the finished days")
	prefix := flags.String("prefix", "", "the prefix of all keys")
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

	client, err := connect(os.Getenv("REDIS_URL"), r.ttl)
	if err != nil {
		return err
	}
	defer client.Close()
	r.locker, err = redislease.New(client,
		redislease.WithPrefix(*prefix), redislease.WithTTL(r.ttl), redislease.WithObserver(r.observe))
	if err != nil {
		return err
	}

	// The parent holds our standard input open. When it is gone, however it went, we stop too.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return r.run(ctx)
}

// run goes over the days again and again until all of them are done, or until ctx ends. Only a journal that cannot be
// read or written makes it give up: busy days, lost leases and a Redis in trouble are a matter of time.
func (r *replica) run(ctx context.Context) error {
	for {
		open, progressed := 0, false
		for _, day := range r.days {
			// A cheap look first. The one that counts is under the lease.
			if finished, err := r.journal.has(day); err != nil {
				return err
			} else if finished {
				continue
			}
			open++
			err := r.tryDay(ctx, day)
			switch {
			case errors.Is(err, errJournal):
				return err
			case ctx.Err() != nil: // told to stop; TryDo has released the lease
				r.tell(day, stopped, "")
				return nil
			case err == nil:
				progressed = true
			case errors.Is(err, redislease.ErrNotAcquired):
				r.tell(day, busy, "")
			case errors.Is(err, redislease.ErrLost):
				// Somebody else may work on this day by now. If our line reached the journal all the same, it is done.
				r.tell(day, retry, err.Error())
				r.pause(ctx)
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

// tryDay does one day unless another replica is at it.
func (r *replica) tryDay(ctx context.Context, day string) error {
	return r.locker.TryDo(ctx, keyOf(day), func(ctx context.Context, lease *redislease.Lease) error {
		// A lease is mutual exclusion, not run-once: its last holder may have finished the day.
		if finished, err := r.journal.has(day); err != nil || finished {
			return err
		}
		r.tell(day, acquired, "")
		e, err := r.reconcile(ctx, day)
		if err != nil {
			return err
		}
		// The next step cannot be undone, so ask Redis itself whether the day is still ours.
		if err := lease.Renew(ctx); err != nil {
			return err
		}
		if err := r.journal.append(e); err != nil {
			return err
		}
		r.tell(day, done, fmt.Sprintf("%d orders, %d mismatches", e.Orders, len(e.Mismatches)))
		return nil
	})
}

// reconcile does the work of one day, and gives up as soon as ctx ends. It takes as long as -pace says: a real job would
// fetch the payments from a bank here.
func (r *replica) reconcile(ctx context.Context, day string) (entry, error) {
	orders := len(r.books.orders[day])
	select {
	case <-ctx.Done():
		return entry{}, context.Cause(ctx)
	case <-time.After(r.pace * time.Duration(orders) / 100):
	}
	return entry{
		Day:        day,
		Replica:    r.id,
		Orders:     orders,
		Payments:   len(r.books.payments[day]),
		Mismatches: r.books.reconcile(day),
	}, nil
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
