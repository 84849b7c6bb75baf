package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"
)

// warmCalls on so many goroutines at once open the connections of a client, which go-redis does when it needs them.
const warmCalls = 8

// enoughFailures end a waiter of a loop.
const enoughFailures = 100

// worker is a process with one client.
type worker struct {
	client client
	held   handle // of doHold
	drain  *drain // of doQueue
	leases leases
}

// work serves requests until its input ends.
func work() error {
	// A blocking read would be a system call that the Go runtime looks after every 10 ms only, and late are then the
	// timers and connections of the process, too. So it is read as sockets are.
	if err := syscall.SetNonblock(syscall.Stdin, true); err != nil {
		return err
	}
	in, out := json.NewDecoder(os.NewFile(uintptr(syscall.Stdin), "stdin")), json.NewEncoder(os.Stdout)
	var w worker
	for {
		var r request
		if err := in.Decode(&r); err != nil {
			return nil // the harness is gone
		}
		answer, err := w.do(r)
		if err != nil {
			answer.Error = fmt.Sprintf("%s: %v", r.Do, err)
		}
		if err := out.Encode(answer); err != nil {
			return err
		}
	}
}

func (w *worker) do(r request) (reply, error) {
	ctx := context.Background()
	switch r.Do {
	case doOpen:
		return reply{}, w.open(ctx, r)
	case doHold:
		var err error
		w.held, err = w.client.acquire(ctx, r.Key)
		return reply{}, err
	case doLetGo:
		at := time.Now()
		return reply{At: at}, w.held.release(ctx)
	case doUsage:
		return reply{CPU: cpu()}, nil
	case doCensus:
		return reply{Census: w.leases.census()}, nil
	case doQueue:
		w.drain = startDrain(w.client, r)
		return reply{}, nil
	case doCollect:
		return w.drain.collect(r.For), nil
	case doLoop:
		return loop(w.client, r), nil
	case doTake:
		return w.leases.take(ctx, w.client, r)
	case doTold:
		return w.leases.watch(r.For), nil
	case doReleaseAll:
		return w.leases.releaseAll(ctx), nil
	}
	return reply{}, fmt.Errorf("unknown request")
}

func (w *worker) open(ctx context.Context, r request) error {
	a, err := adapterNamed(r.Adapter)
	if err != nil {
		return err
	}
	w.leases.renewEvery = r.RenewEvery
	if w.client, err = a.open(settings{r.Addr, r.TTL, r.RenewEvery}); err != nil {
		return err
	}
	errs := make(chan error, warmCalls)
	for i := range warmCalls {
		go func() {
			h, err := w.client.tryAcquire(ctx, fmt.Sprintf("bench:warm:%d:%d", os.Getpid(), i))
			if err == nil {
				err = h.release(ctx)
			}
			errs <- err
		}()
	}
	for range warmCalls {
		if err := <-errs; err != nil {
			return err
		}
	}
	return nil
}

// takeTurn holds the key for as long as the critical section takes, and releases it.
func takeTurn(h handle, t turn, hold time.Duration, r *reply) {
	if hold > 0 {
		time.Sleep(hold)
	}
	t.Released = time.Now()
	if v, ok := h.(validator); ok && !v.valid() {
		r.Invalid++
	}
	if err := h.release(context.Background()); err != nil {
		r.Failures++
	}
	r.Turns = append(r.Turns, t)
}

// merge adds what another goroutine has recorded.
func (r *reply) merge(other reply) {
	r.Turns = append(r.Turns, other.Turns...)
	r.Waiting = append(r.Waiting, other.Waiting...)
	r.Failures += other.Failures
	r.Invalid += other.Invalid
}

// drain is waiters each of whom wants the key once.
type drain struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	result reply
}

func startDrain(c client, r request) *drain {
	ctx, cancel := context.WithCancel(context.Background())
	d := &drain{cancel: cancel, done: make(chan struct{})}
	var wg sync.WaitGroup
	for i := range r.N {
		wg.Go(func() {
			// Waiters that begin in step would poll in step for ever.
			time.Sleep(time.Duration(rand.Int64N(int64(r.For) + 1)))
			var own reply
			waitOnce(ctx, c, r, r.First+i, &own)
			d.mu.Lock()
			defer d.mu.Unlock()
			d.result.merge(own)
		})
	}
	go func() {
		wg.Wait()
		close(d.done)
	}()
	return d
}

func waitOnce(ctx context.Context, c client, r request, waiter int, own *reply) {
	t := turn{Waiter: waiter, Called: time.Now()}
	h, err := c.acquire(ctx, r.Key)
	t.Acquired = time.Now()
	if err == nil {
		takeTurn(h, t, r.Hold, own)
		return
	}
	if ctx.Err() == nil {
		own.Failures++
	}
	own.Waiting = append(own.Waiting, t.Acquired.Sub(t.Called))
}

// collect returns what became of the waiters. Those who have not had the key when the patience ends never get it.
func (d *drain) collect(patience time.Duration) reply {
	timer := time.AfterFunc(patience, d.cancel)
	<-d.done
	timer.Stop()
	d.cancel()
	d.result.CPU = cpu()
	return d.result
}

// loop has waiters acquire and release without a pause.
func loop(c client, r request) (result reply) {
	begun := cpu()
	ctx, cancel := context.WithTimeout(context.Background(), r.For)
	defer cancel()
	// The contenders must not know of a deadline.
	inner, stop := context.WithCancel(context.Background())
	defer stop()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range r.N {
		wg.Go(func() {
			var own reply
			for ctx.Err() == nil && own.Failures < enoughFailures {
				again(ctx, inner, c, r, r.First+i, &own)
			}
			mu.Lock()
			defer mu.Unlock()
			result.merge(own)
		})
	}
	<-ctx.Done()
	stop()
	used := cpu() - begun
	wg.Wait()
	result.CPU = used
	return result
}

// again is one round of a loop that ctx ends and calls with the context inner. What is acquired after the end does not
// count.
func again(ctx, inner context.Context, c client, r request, waiter int, own *reply) {
	t := turn{Waiter: waiter, Called: time.Now()}
	h, err := c.acquire(inner, r.Key)
	t.Acquired = time.Now()
	switch {
	case err == nil && ctx.Err() == nil:
		takeTurn(h, t, r.Hold, own)
	case ctx.Err() == nil:
		own.Failures++
	default:
		own.Waiting = append(own.Waiting, t.Acquired.Sub(t.Called))
		if err == nil {
			_ = h.release(context.Background())
		}
	}
}
