package redislease_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/redislease/redislease"
)

// SIGTERM with forty leases: the signal ends the root context and with it the context of every lease. Each worker
// finishes what it has begun and releases its own lease; the process exits when all have. Nothing waits for a TTL.
func Example_shutdown() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client, redislease.WithPrefix("shard:"))
	if err != nil {
		log.Fatal(err)
	}

	process, terminate := context.WithCancel(context.Background())
	defer terminate()
	ctx, ignore := signal.NotifyContext(process, os.Interrupt, syscall.SIGTERM)
	defer ignore()

	consume := func(ctx context.Context, lease *redislease.Lease) error {
		for {
			select {
			case <-time.After(5 * time.Millisecond): // the next message
				if err := lease.Err(); err != nil {
					return err
				}
			case <-ctx.Done():
				return lease.Err() // nil if this is the shutdown: the lease is held until the release
			}
		}
	}

	var workers, started sync.WaitGroup
	started.Add(40)
	for shard := range 40 {
		workers.Go(func() {
			err := locker.Do(ctx, fmt.Sprint(shard), func(ctx context.Context, lease *redislease.Lease) error {
				started.Done()
				return consume(ctx, lease)
			})
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	started.Wait()
	fmt.Println("keys:", len(server.Keys()))

	terminate() // as SIGTERM does
	workers.Wait()
	fmt.Println("keys after the shutdown:", len(server.Keys()))
	// Output:
	// keys: 40
	// keys after the shutdown: 0
}
