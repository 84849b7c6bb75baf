package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"time"

	"github.com/redislease/redislease"
)

// lead runs term whenever this replica is the leader, until ctx ends. Do waits while another replica leads, and returns
// when the lease is lost or Redis has failed three times in a row. Then lead pauses, so as not to add to the trouble.
func lead(ctx context.Context, locker *redislease.Locker, pause time.Duration, term func(context.Context, *redislease.Lease) error) {
	for ctx.Err() == nil {
		err := locker.Do(ctx, "leader", term)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, redislease.ErrLost):
			fmt.Println("no longer the leader; another replica may be")
		case err != nil:
			fmt.Println("no leader:", err)
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2)): // not all replicas at once
		case <-ctx.Done():
		}
	}
}

// A leader that is elected, loses its lease and is elected again, and pauses while Redis is down.
func Example_leaderLoop() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client,
		redislease.WithMaxHold(redislease.NoMaxHold), // a leader leads for as long as it can
		redislease.WithRenewInterval(50*time.Millisecond),
		redislease.WithObserver(func(_ context.Context, e redislease.Event) {
			if e.Kind == redislease.EventAcquireFailed {
				server.SetError("") // Redis comes back
			}
		}))
	if err != nil {
		log.Fatal(err)
	}

	server.SetError("LOADING Redis is loading the dataset in memory")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	terms := 0
	lead(ctx, locker, 100*time.Millisecond, func(ctx context.Context, lease *redislease.Lease) error {
		if terms++; terms == 1 {
			fmt.Println("leader")
			server.Del("leader") // an operator's mistake
		} else {
			fmt.Println("leader again")
			cancel() // the shutdown
		}
		<-ctx.Done()
		return lease.Err()
	})
	fmt.Println("key left:", server.Exists("leader"))
	// Output:
	// no leader: redislease: acquire "leader": LOADING Redis is loading the dataset in memory
	// leader
	// no longer the leader; another replica may be
	// leader again
	// key left: false
}
