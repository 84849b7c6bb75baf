// Command quickstart shows two workers that want the same key, and what a lease does for them.
//
//	go run ./examples/quickstart                              on an embedded Redis
//	REDIS_URL=redis://host:6379 go run ./examples/quickstart  on a server
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client, err := connect()
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	var workers sync.WaitGroup
	workers.Go(func() { work(ctx, client, "worker 1", 2500*time.Millisecond) })
	time.Sleep(100 * time.Millisecond) // worker 1 comes first
	workers.Go(func() { work(ctx, client, "worker 2", time.Minute) })

	select {
	case <-time.After(4 * time.Second): // worker 2 has the lease now
		say("somebody", "deletes the key")
		if err := client.Del(ctx, "quickstart:report").Err(); err != nil {
			log.Print(err)
		}
	case <-ctx.Done():
	}
	workers.Wait()
}

// work waits for the lease and works under it. Each worker stands for one replica of a service.
func work(ctx context.Context, client *redis.Client, name string, needs time.Duration) {
	locker, err := redislease.New(client,
		redislease.WithPrefix("quickstart:"),
		redislease.WithTTL(time.Second), // the default is 30 s
		redislease.WithObserver(func(_ context.Context, e redislease.Event) { show(name, e) }),
	)
	if err != nil {
		log.Fatal(err)
	}

	say(name, "wants the key")
	err = locker.Do(ctx, "report", func(ctx context.Context, _ *redislease.Lease) error {
		select {
		case <-time.After(needs): // the work
			say(name, "is done")
			return nil
		case <-ctx.Done(): // the lease is lost, or the caller gave up
			say(name, "stops: %v", context.Cause(ctx))
			return context.Cause(ctx)
		}
	})
	switch {
	case err == nil:
		say(name, "held the lease the whole time")
	case errors.Is(err, redislease.ErrLost):
		say(name, "lost the lease before it was done")
	default:
		say(name, "failed: %v", err)
	}
}

// show prints the events of a lease.
func show(name string, e redislease.Event) {
	switch e.Kind {
	case redislease.EventAcquired:
		say(name, "has the lease, for 1 s unless renewed (waited %.2f s)", e.Waited.Seconds())
	case redislease.EventRenewed:
		say(name, "  renewed with %.2f s left", e.Left.Seconds())
	case redislease.EventReleased:
		say(name, "released the lease after %.2f s", e.Held.Seconds())
	}
}

var start = time.Now()

func say(who, format string, args ...any) {
	fmt.Printf("%5.2fs  %s  %s\n", time.Since(start).Seconds(), who, fmt.Sprintf(format, args...))
}

// connect returns a client of $REDIS_URL or of an embedded Redis.
func connect() (*redis.Client, error) {
	if url := os.Getenv("REDIS_URL"); url != "" {
		options, err := redis.ParseURL(url)
		if err != nil {
			return nil, err
		}
		return redis.NewClient(options), nil
	}
	server, err := miniredis.Run()
	if err != nil {
		return nil, err
	}
	server.ClockTTL(true) // keys expire by themselves, as in Redis
	return redis.NewClient(&redis.Options{Addr: server.Addr()}), nil
}
