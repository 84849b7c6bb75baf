package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
)

// sendAll is the code under test: it sends letters under a lease, and stops when the lease is lost.
func sendAll(ctx context.Context, locker *redislease.Locker, letters <-chan string, send func(string) error) error {
	return locker.TryDo(ctx, "letters", func(ctx context.Context, lease *redislease.Lease) error {
		for {
			select {
			case letter, ok := <-letters:
				if !ok {
					return nil
				}
				if err := lease.Err(); err != nil {
					return err
				}
				if err := send(letter); err != nil {
					return err
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
}

// How to test one's own code on miniredis, without a server and without sleeping, loss included. In a test,
// miniredis.RunT(t) takes the place of Run and Close.
func Example_testing() {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	server.ClockTTL(true) // keys expire by themselves, as in Redis
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	locker, err := redislease.New(client,
		redislease.WithTTL(time.Minute),                   // the lease is not lost because a test machine is slow,
		redislease.WithRenewInterval(20*time.Millisecond)) // but a loss is found soon
	if err != nil {
		log.Fatal(err)
	}

	letters := make(chan string)
	result := make(chan error, 1)
	sent := 0
	go func() {
		result <- sendAll(context.Background(), locker, letters, func(string) error { sent++; return nil })
	}()

	letters <- "first"
	letters <- "second" // so the first was sent, and the lease is held
	fmt.Println("held:", server.Exists("letters"))
	fmt.Println("meanwhile another replica gets:", sendAll(context.Background(), locker, nil, nil))

	server.Del("letters") // the lease is lost
	err = <-result
	fmt.Println("sent:", sent)
	fmt.Println("lost:", errors.Is(err, redislease.ErrLost), "because the key was gone:", errors.Is(err, redislease.ErrGone))
	// Output:
	// held: true
	// meanwhile another replica gets: redislease: acquire "letters": held by another
	// sent: 2
	// lost: true because the key was gone: true
}
