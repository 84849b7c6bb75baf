package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/redislease/redislease"
)

// figures are what an operator watches. Feed them to the metrics library of your choice.
type figures struct {
	mu           sync.Mutex
	acquired     int
	notAcquired  int             // somebody else had the key
	failed       int             // Redis refused or did not answer, or the caller gave up
	heldUpTo     map[string]int  // how many leases were held for how long
	comparisons  int             // how often the key turned out not to be ours any more
	smallestLeft time.Duration   // how close a renewal came to the end of trust
	bounds       []time.Duration // of heldUpTo
}

// observe is the observer of a Locker. It may be called by many goroutines at once.
func (f *figures) observe(_ context.Context, e redislease.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch e.Kind {
	case redislease.EventAcquired:
		f.acquired++
	case redislease.EventNotAcquired:
		f.notAcquired++
	case redislease.EventAcquireFailed:
		f.failed++
	case redislease.EventRenewed:
		f.smallestLeft = min(f.smallestLeft, e.Left)
	case redislease.EventLost, redislease.EventReleased:
		f.heldUpTo[f.bucket(e.Held)]++
		if errors.Is(e.Err, redislease.ErrTaken) || errors.Is(e.Err, redislease.ErrGone) {
			f.comparisons++
		}
	}
}

func (f *figures) bucket(held time.Duration) string {
	for _, b := range f.bounds {
		if held <= b {
			return b.String()
		}
	}
	return "more"
}

// Three figures to watch (the share of failed acquisitions, the distribution of holding times and the count of failed
// comparisons) and one that warns early: the least trust that was left when a renewal was confirmed.
func ExampleWithObserver() {
	server, client, stop := startRedis()
	defer stop()
	f := &figures{
		heldUpTo:     map[string]int{},
		smallestLeft: time.Hour,
		bounds:       []time.Duration{10 * time.Second, time.Minute},
	}
	locker, err := redislease.New(client, redislease.WithObserver(f.observe))
	if err != nil {
		log.Fatal(err)
	}

	ctx := context.Background()
	work := func(key string, during func(*redislease.Lease) error) {
		err := locker.TryDo(ctx, key, func(_ context.Context, lease *redislease.Lease) error { return during(lease) })
		if err != nil {
			fmt.Println(err)
		}
	}
	work("a", func(lease *redislease.Lease) error { return lease.Renew(ctx) })
	work("b", func(lease *redislease.Lease) error {
		work("b", func(*redislease.Lease) error { return nil }) // another replica
		return nil
	})
	work("c", func(*redislease.Lease) error { server.Del("c"); return nil })
	server.SetError("READONLY You can't write against a read only replica.")
	work("d", func(*redislease.Lease) error { return nil })

	f.mu.Lock()
	defer f.mu.Unlock()
	fmt.Printf("acquisitions: %d, held by another: %d, failed: %d\n", f.acquired+f.notAcquired+f.failed, f.notAcquired, f.failed)
	fmt.Println("held for up to:", f.heldUpTo)
	fmt.Println("failed comparisons:", f.comparisons)
	fmt.Println("renewed in good time:", f.smallestLeft > 10*time.Second)
	// Output:
	// redislease: acquire "b": held by another
	// redislease: lease "c" lost: the key is gone
	// redislease: acquire "d": READONLY You can't write against a read only replica.
	// acquisitions: 5, held by another: 1, failed: 1
	// held for up to: map[10s:3]
	// failed comparisons: 1
	// renewed in good time: true
}
