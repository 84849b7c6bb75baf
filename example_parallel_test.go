package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/redislease/redislease"
)

// Several goroutines under one lease: the first error, or the loss of the lease, stops them all, and the lease is
// released only after the last has stopped. errgroup.WithContext(lease.Context()) of golang.org/x/sync does the same.
func Example_parallelWork() {
	_, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client)
	if err != nil {
		log.Fatal(err)
	}

	importPart := func(ctx context.Context, lease *redislease.Lease, part int) error {
		if part == 2 {
			return errors.New("line 17: no amount")
		}
		<-ctx.Done() // a long import
		return context.Cause(ctx)
	}

	err = locker.Do(context.Background(), "import", func(ctx context.Context, lease *redislease.Lease) error {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		var parts sync.WaitGroup
		for part := range 4 {
			parts.Go(func() {
				if err := importPart(ctx, lease, part); err != nil {
					cancel(fmt.Errorf("part %d: %w", part, err)) // the first counts
				}
			})
		}
		parts.Wait()
		fmt.Println("all parts have stopped, lease held:", lease.Err() == nil)
		return context.Cause(ctx)
	})
	fmt.Println(err)
	// Output:
	// all parts have stopped, lease held: true
	// part 2: line 17: no amount
}
