package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
)

// startRedis starts the embedded Redis that the Examples run on, and returns it with a client of it.
func startRedis() (server *miniredis.Miniredis, client *redis.Client, stop func()) {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	server.ClockTTL(true) // keys expire by themselves, as in Redis
	client = redis.NewClient(&redis.Options{Addr: server.Addr()})
	return server, client, func() {
		if err := client.Close(); err != nil {
			log.Print(err)
		}
		server.Close()
	}
}

// Ten lines: skip the work if another replica is at it, and stop it if the lease is lost.
func Example() {
	server, _, stop := startRedis()
	defer stop()
	ctx := context.Background()
	addr := server.Addr()
	orders := []string{"A-1", "A-2"}
	book := func(_ context.Context, order string) error {
		fmt.Println("booked", order)
		return nil
	}

	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	locker, err := redislease.New(client, redislease.WithPrefix("billing:"))
	if err != nil {
		log.Fatal(err)
	}
	err = locker.TryDo(ctx, "reconcile:2026-03-14", func(ctx context.Context, lease *redislease.Lease) error {
		for _, order := range orders {
			if err := lease.Err(); err != nil { // may a write still land?
				return err
			}
			if err := book(ctx, order); err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case errors.Is(err, redislease.ErrNotAcquired):
		fmt.Println("another replica is at it")
	case err != nil:
		log.Print(err)
	default:
		fmt.Println("done, and the lease was held all the time")
	}
	// Output:
	// booked A-1
	// booked A-2
	// done, and the lease was held all the time
}

// A tick of a scheduler on three replicas. Whoever finds the key taken skips the tick. Whoever comes later, when the key
// is free again, finds under the lease that the hour is done: a lease keeps runs apart, and the watermark makes it one.
func ExampleLocker_TryDo() {
	_, client, stop := startRedis()
	defer stop()

	var database struct { // stands for the place where the work leaves its results
		sync.Mutex
		billedUpTo time.Time
		runs       int
	}
	tick := func(ctx context.Context, locker *redislease.Locker, hour time.Time) error {
		err := locker.TryDo(ctx, "invoices", func(ctx context.Context, lease *redislease.Lease) error {
			database.Lock() // stands for one transaction: the results and the watermark land together or not at all
			defer database.Unlock()
			if !database.billedUpTo.Before(hour) {
				return nil // an earlier tick has done it
			}
			if err := lease.Err(); err != nil {
				return err
			}
			database.runs++
			database.billedUpTo = hour
			return nil
		})
		if errors.Is(err, redislease.ErrNotAcquired) {
			return nil // another replica is at it
		}
		return err
	}

	hour := time.Date(2026, 3, 14, 9, 0, 0, 0, time.UTC)
	var replicas sync.WaitGroup
	for range 3 {
		locker, err := redislease.New(client, redislease.WithPrefix("billing:"))
		if err != nil {
			log.Fatal(err)
		}
		replicas.Go(func() {
			if err := tick(context.Background(), locker, hour); err != nil {
				log.Print(err) // the next tick tries again
			}
		})
	}
	replicas.Wait()
	fmt.Println("runs:", database.runs)
	fmt.Println("billed up to:", database.billedUpTo.Format(time.TimeOnly))
	// Output:
	// runs: 1
	// billed up to: 09:00:00
}

// Wait for the key for five seconds at most, then work for ten minutes at most. A deadline on the context would bound
// both; these two options do not touch each other.
func ExampleLocker_Acquire() {
	_, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client, redislease.WithPrefix("billing:"))
	if err != nil {
		log.Fatal(err)
	}

	settle := func(ctx context.Context, patience time.Duration) error {
		lease, err := locker.Acquire(ctx, "settle:eu",
			redislease.WithAcquireTimeout(patience),
			redislease.WithMaxHold(10*time.Minute))
		switch {
		case errors.Is(err, redislease.ErrNotAcquired):
			return fmt.Errorf("busy, try again later: %w", err)
		case err != nil:
			return err // Redis failed, or ctx ended; nothing has been done
		}
		defer lease.Release()

		if deadline, ok := lease.Context().Deadline(); ok {
			fmt.Println("settling, for", time.Until(deadline).Round(time.Minute), "at most")
		}
		return lease.Err()
	}

	ctx := context.Background()
	other, err := locker.Acquire(ctx, "settle:eu")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(settle(ctx, 50*time.Millisecond))

	time.AfterFunc(50*time.Millisecond, func() {
		if err := other.Release(); err != nil {
			log.Print(err)
		}
	})
	fmt.Println(settle(ctx, 5*time.Second))
	// Output:
	// busy, try again later: redislease: acquire "settle:eu": held by another
	// settling, for 10m0s at most
	// <nil>
}

// Why has the work been told to stop?
func ExampleLease_Context() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client)
	if err != nil {
		log.Fatal(err)
	}

	why := func(ctx context.Context) string {
		<-ctx.Done()
		switch cause := context.Cause(ctx); {
		case errors.Is(cause, redislease.ErrTaken):
			return "lost: somebody else has the key; whatever is still to be written must not be"
		case errors.Is(cause, redislease.ErrGone):
			return "lost: the key is gone, and may be somebody else's any moment"
		case errors.Is(cause, redislease.ErrUnconfirmed):
			return "lost: Redis did not confirm the lease in time"
		case errors.Is(cause, redislease.ErrMaxHold):
			return "lost: held for as long as allowed"
		case errors.Is(cause, redislease.ErrReleased):
			return "released by the holder itself"
		default:
			return fmt.Sprintf("the caller's own: %v; the lease is held until it is released or trust ends", cause)
		}
	}

	parent, cancel := context.WithCancelCause(context.Background())
	for _, story := range []struct {
		key    string
		option redislease.Option
		end    func(*redislease.Lease) error
	}{
		{"taken", redislease.WithTTL(time.Minute), func(l *redislease.Lease) error {
			if err := server.Set("taken", "another token"); err != nil {
				return err
			}
			return l.Renew(parent) // or the watchdog, when the next renewal is due
		}},
		{"gone", redislease.WithTTL(time.Minute), func(l *redislease.Lease) error {
			server.Del("gone")
			return l.Renew(parent)
		}},
		{"unconfirmed", redislease.WithTTL(400 * time.Millisecond), func(*redislease.Lease) error {
			server.SetError("LOADING Redis is loading the dataset in memory")
			return nil
		}},
		{"max hold", redislease.WithMaxHold(50 * time.Millisecond), func(*redislease.Lease) error { return nil }},
		{"released", redislease.WithTTL(time.Minute), (*redislease.Lease).Release},
		{"caller", redislease.WithTTL(time.Minute), func(*redislease.Lease) error {
			cancel(errors.New("the user pressed stop"))
			return nil
		}},
	} {
		lease, err := locker.Acquire(parent, story.key, story.option)
		if err != nil {
			log.Fatal(err)
		}
		if err := story.end(lease); err != nil && !errors.Is(err, redislease.ErrLost) {
			log.Fatal(err)
		}
		fmt.Println(why(lease.Context()))
		server.SetError("")
		_ = lease.Release() // why has already said what it would say
	}
	// Output:
	// lost: somebody else has the key; whatever is still to be written must not be
	// lost: the key is gone, and may be somebody else's any moment
	// lost: Redis did not confirm the lease in time
	// lost: held for as long as allowed
	// released by the holder itself
	// the caller's own: the user pressed stop; the lease is held until it is released or trust ends
}

// Before a step that cannot be undone, ask Redis and not only the clock. Without a nil from Renew the step is not taken.
func ExampleLease_Renew() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client)
	if err != nil {
		log.Fatal(err)
	}

	payOut := func(ctx context.Context, lease *redislease.Lease) error {
		if err := lease.Renew(ctx); err != nil {
			return fmt.Errorf("not paid out: %w", err)
		}
		fmt.Println("paid out")
		return nil
	}

	ctx := context.Background()
	fmt.Println(locker.Do(ctx, "payout", payOut))

	err = locker.Do(ctx, "payout", func(ctx context.Context, lease *redislease.Lease) error {
		server.FlushAll() // an operator's mistake, or a failover to an empty replica
		return payOut(ctx, lease)
	})
	fmt.Println("lost:", errors.Is(err, redislease.ErrLost), "because it was gone:", errors.Is(err, redislease.ErrGone))
	// Output:
	// paid out
	// <nil>
	// lost: true because it was gone: true
}
