package redislease_test

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

const (
	acquired      = redislease.EventAcquired
	notAcquired   = redislease.EventNotAcquired
	acquireFailed = redislease.EventAcquireFailed
	renewed       = redislease.EventRenewed
	renewFailed   = redislease.EventRenewFailed
	lost          = redislease.EventLost
	released      = redislease.EventReleased
)

func TestEachAcquisitionAndEachLeaseEndsInOneEvent(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := newLocker(t, b.client, redislease.WithObserver(r.observe))
		type key struct{}
		l, err := k.TryAcquire(context.WithValue(context.Background(), key{}, 1), "orders")
		require.NoError(t, err)
		_, err = k.TryAcquire(context.Background(), "orders")
		require.Error(t, err)
		time.Sleep(11 * time.Second)
		b.fault(func(string, func() error) error { return errReadonly })
		_, err = k.TryAcquire(context.Background(), "orders")
		require.Error(t, err)
		time.Sleep(10 * time.Second)
		b.fault(nil)
		time.Sleep(2 * time.Second)
		require.NoError(t, l.Release())
		require.NoError(t, l.Release())
		require.Equal(t, []redislease.EventKind{acquired, notAcquired, renewed, acquireFailed, renewed, released}, r.kinds(renewFailed))
		var failed bool
		for _, e := range r.all() {
			require.Equal(t, "orders", e.Key)
			switch e.Kind {
			case released:
				require.Equal(t, 23*time.Second, e.Held)
				require.NoError(t, e.Err)
			case renewed:
				require.Positive(t, e.Left)
				require.Less(t, e.Left, 22*time.Second+time.Millisecond, "the first half an interval early at most")
			case renewFailed:
				failed = true
				require.ErrorIs(t, e.Err, errReadonly)
			case acquireFailed:
				require.ErrorIs(t, e.Err, errReadonly)
			case notAcquired:
				require.ErrorIs(t, e.Err, redislease.ErrNotAcquired)
			}
		}
		require.True(t, failed)
	})
}

func TestAnObserverGetsTheCallersValuesInAContextThatNeverEnds(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		type key struct{}
		var seen atomic.Int32
		k := newLocker(t, b.client, redislease.WithObserver(func(ctx context.Context, e redislease.Event) {
			if ctx.Value(key{}) == "v" && ctx.Err() == nil && ctx.Done() == nil {
				seen.Add(1)
			}
		}))
		ctx, cancel := context.WithCancel(context.WithValue(context.Background(), key{}, "v"))
		l, err := k.TryAcquire(ctx, "orders")
		require.NoError(t, err)
		_, err = k.TryAcquire(ctx, "orders")
		require.Error(t, err)
		time.Sleep(11 * time.Second)
		cancel()
		require.NoError(t, l.Release())
		require.EqualValues(t, 4, seen.Load())
	})
}

func TestAnObserverThatBlocksHoldsUpNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		gate := make(chan struct{})
		var r record
		k := newLocker(t, b.client, redislease.WithMaxHold(redislease.NoMaxHold), redislease.WithObserver(func(ctx context.Context, e redislease.Event) {
			if e.Kind == renewed {
				<-gate
			}
			r.observe(ctx, e)
		}))
		begun := b.now()
		l := b.acquire(k)
		time.Sleep(time.Hour)
		require.NoError(t, l.Err(), "it is renewed all the same")
		require.NoError(t, b.operator.Del(context.Background(), "orders").Err())
		<-l.Context().Done()
		require.LessOrEqual(t, b.now()-begun, time.Hour+10*time.Second)
		require.ErrorIs(t, l.Release(), redislease.ErrGone, "and so does a call not wait for it")
		require.Equal(t, []redislease.EventKind{acquired}, r.kinds())
		close(gate)
		synctest.Wait()
		kinds := r.kinds()
		require.Len(t, kinds, 1+1+16+1, "sixteen wait behind the one that is being delivered, and the final one")
		require.Equal(t, lost, kinds[len(kinds)-1])
	})
}

func TestAnObserverThatBlocksOnTheCallersGoroutineBlocksOnlyThatCall(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		gate := make(chan struct{})
		k := newLocker(t, b.client, redislease.WithObserver(func(_ context.Context, e redislease.Event) {
			if e.Kind == acquired {
				<-gate
			}
		}))
		got := make(chan *redislease.Lease)
		go func() { got <- b.acquire(k) }()
		time.Sleep(5 * time.Minute)
		require.NotEmpty(t, b.get("orders"), "the lease is renewed while its acquisition is reported")
		close(gate)
		l := <-got
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}

// TestAnObserverMayDoAnythingFromAnyEvent has it call the lease, panic, or end its goroutine.
func TestAnObserverMayDoAnythingFromAnyEvent(t *testing.T) {
	for name, do := range map[string]func(l *redislease.Lease){
		"release": func(l *redislease.Lease) { _ = l.Release() },
		"renew":   func(l *redislease.Lease) { _ = l.Renew(context.Background()) },
		"err":     func(l *redislease.Lease) { _ = l.Err() },
		"panic":   func(*redislease.Lease) { panic("an observer") },
		"block":   func(*redislease.Lease) { time.Sleep(40 * time.Second) },
	} {
		for _, from := range []redislease.EventKind{renewed, renewFailed, lost, released} {
			t.Run(name+" from "+from.String(), func(t *testing.T) {
				bubble(t, func(t *testing.T, b *bubbled) {
					var r record
					var l atomic.Pointer[redislease.Lease]
					var once sync.Once
					k := newLocker(t, b.client, redislease.WithObserver(func(ctx context.Context, e redislease.Event) {
						r.observe(ctx, e)
						if e.Kind == from {
							once.Do(func() { do(l.Load()) })
						}
					}))
					l.Store(b.acquire(k))
					time.Sleep(11 * time.Second)
					b.fault(func(string, func() error) error { return errReadonly })
					time.Sleep(10 * time.Second)
					b.fault(nil)
					time.Sleep(10 * time.Second)
					wasReleased := name == "release" && (from == renewed || from == renewFailed)
					if from == lost {
						require.NoError(t, b.operator.Del(context.Background(), "orders").Err())
						<-l.Load().Context().Done()
					} else if !wasReleased {
						require.NoError(t, l.Load().Err())
					}
					_ = l.Load().Release()
					time.Sleep(time.Minute)
					require.Empty(t, b.get("orders"))
					final := 0
					for _, kind := range r.kinds() {
						if kind == lost || kind == released {
							final++
						}
					}
					require.Equal(t, 1, final)
				})
			})
		}
	}
}

func TestAnObserverThatEndsItsGoroutineIsFollowedByAnother(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := newLocker(t, b.client, redislease.WithObserver(func(ctx context.Context, e redislease.Event) {
			r.observe(ctx, e)
			if e.Kind == renewed {
				runtime.Goexit()
			}
		}))
		l := b.acquire(k)
		time.Sleep(time.Minute)
		require.NoError(t, l.Release())
		kinds := r.kinds()
		require.Greater(t, len(kinds), 7)
		require.Equal(t, released, kinds[len(kinds)-1])
	})
}

func TestALossFoundByACallIsDeliveredBeforeItReturns(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		var s redislease.Skew
		k := newLocker(t, b.client, redislease.WithObserver(r.observe))
		redislease.SetSkew(k, &s)
		for name, call := range map[string]func(l *redislease.Lease) error{
			"err":     (*redislease.Lease).Err,
			"renew":   func(l *redislease.Lease) error { return l.Renew(context.Background()) },
			"release": (*redislease.Lease).Release,
		} {
			l := b.acquire(k)
			s.Suspend(time.Minute)
			require.ErrorIs(t, call(l), redislease.ErrUnconfirmed, name)
			events := r.all()
			require.Equal(t, lost, events[len(events)-1].Kind, name)
			require.Error(t, l.Context().Err())
			require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
			require.Len(t, r.all(), len(events), "and only once")
		}
	})
}

func TestTheNamesOfEvents(t *testing.T) {
	require.Equal(t, "acquired", acquired.String())
	require.Equal(t, "released", released.String())
	require.Equal(t, "unknown", redislease.EventKind(0).String())
	require.Equal(t, "unknown", redislease.EventKind(200).String())
}
