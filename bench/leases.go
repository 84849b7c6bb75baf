package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// leases is what a worker does in the scenario live.
type leases struct {
	renewEvery time.Duration
	handles    []handle
	keys       []string    // kept, like taken, since they are part of the baseline
	taken      []time.Time // when each was acquired
	baseline   census
	failed     []atomic.Pointer[time.Time] // when the first renewal here of each lease failed

	// For those that do not renew themselves.
	stop     chan struct{} // closed before the leases are released
	renewing sync.WaitGroup
}

const (
	takers     = 64   // goroutines that take and release the leases
	mostFailed = 1000 // tries that are made up for
)

// liveKey is the key of the i-th lease; liveIndex finds it in a line of MONITOR.
const (
	livePrefix = "bench:live:"
	liveDigits = 7
)

func liveKey(i int) string { return fmt.Sprintf("%s%0*d", livePrefix, liveDigits, i) }

// take takes r.N leases and keeps them.
func (l *leases) take(ctx context.Context, c client, r request) (answer reply, err error) {
	l.handles, l.keys, l.taken, l.stop = make([]handle, r.N), make([]string, r.N), make([]time.Time, r.N), make(chan struct{})
	l.failed = make([]atomic.Pointer[time.Time], r.N)
	for i := range l.keys {
		l.keys[i] = liveKey(i)
	}
	l.baseline = l.census()
	var failures atomic.Int64
	answer.At = time.Now()
	err = inParallel(r.N, func(i int) error {
		h, err := c.tryAcquire(ctx, l.keys[i])
		for ; err != nil; h, err = c.tryAcquire(ctx, l.keys[i]) { // an overload, which the next try may escape
			if failures.Add(1) > mostFailed {
				return err
			}
		}
		l.handles[i], l.taken[i] = h, time.Now()
		if renewed, ok := h.(renewer); ok {
			l.renewing.Go(func() { l.renew(ctx, renewed, &l.failed[i]) })
		}
		return nil
	})
	answer.Took, answer.Taken = time.Since(answer.At), l.taken
	answer.Failures = int(failures.Load())
	return answer, err
}

// renew does what users of a library without a watchdog write.
func (l *leases) renew(ctx context.Context, h renewer, failed *atomic.Pointer[time.Time]) {
	ticker := time.NewTicker(l.renewEvery)
	defer ticker.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-ticker.C:
			if h.renew(ctx) != nil {
				now := time.Now()
				failed.CompareAndSwap(nil, &now)
			}
		}
	}
}

// watch watches for so long which holders are told that their lease has ended: by the library, or, where users renew
// themselves, by the first renewal that fails.
func (l *leases) watch(d time.Duration) reply {
	told := make([]time.Time, len(l.handles))
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Millisecond) {
		for i := range l.handles {
			if told[i].IsZero() {
				told[i] = l.ended(i)
			}
		}
	}
	return reply{Told: told, At: time.Now()}
}

// ended returns since when the holder of the i-th lease knows that it has ended; zero: it does not.
func (l *leases) ended(i int) (at time.Time) {
	if _, renewedHere := l.handles[i].(renewer); renewedHere { // perhaps right now, and not every library can be asked then
		if failed := l.failed[i].Load(); failed != nil {
			at = *failed
		}
	} else if v, ok := l.handles[i].(validator); ok && !v.valid() {
		at = time.Now()
	}
	return at
}

func (l *leases) releaseAll(ctx context.Context) (answer reply) {
	close(l.stop)
	l.renewing.Wait()
	answer.At = time.Now()
	var failures atomic.Int64
	_ = inParallel(len(l.handles), func(i int) error {
		if l.handles[i].release(ctx) != nil {
			failures.Add(1)
		}
		return nil
	})
	answer.Took, answer.Failures = time.Since(answer.At), int(failures.Load())
	l.handles = nil
	return answer
}

// census counts what this process has, less what it had before it took the leases.
func (l *leases) census() census {
	c := census{Goroutines: runtime.NumGoroutine() - l.baseline.Goroutines}
	for i := range l.handles {
		if !l.ended(i).IsZero() {
			c.Lost++
		}
	}
	runtime.GC()
	runtime.GC() // what a sync.Pool has kept from the first
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	c.Heap, c.Stack = float64(m.HeapAlloc)-l.baseline.Heap, float64(m.StackInuse)-l.baseline.Stack
	return c
}

// inParallel calls f for each number below n and joins what it returns.
func inParallel(n int, f func(i int) error) error {
	var next atomic.Int64
	errs := make([]error, takers)
	var wg sync.WaitGroup
	for g := range takers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && errs[g] == nil; i = int(next.Add(1)) - 1 {
				errs[g] = f(i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
