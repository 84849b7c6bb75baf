package redislease_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

func TestAnAcquiredKeyHoldsTheTokenForTheTTL(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker(redislease.WithPrefix("billing:"))
		for _, ttl := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, 999 * time.Millisecond,
			1500*time.Millisecond + 700*time.Microsecond, 24 * time.Hour, 100 * 365 * 24 * time.Hour} {
			l := acquire(t, k, "orders", redislease.WithTTL(ttl))
			require.Equal(t, l.Token(), w.get("billing:orders"))
			require.Equal(t, "orders", l.Key())
			require.LessOrEqual(t, w.pttl("billing:orders"), ttl.Truncate(time.Millisecond))
			require.NoError(t, l.Renew(context.Background()))
			require.LessOrEqual(t, w.pttl("billing:orders"), ttl.Truncate(time.Millisecond))
			if ttl > time.Second {
				require.Greater(t, w.pttl("billing:orders"), ttl-time.Second)
			}
			require.NoError(t, l.Release())
			require.Empty(t, w.get("billing:orders"))
		}
	})
}

func TestAHeldKeyIsNotAcquiredAndSaysOnlyThat(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker()
		first := acquire(t, k, "orders")
		l, err := w.locker().TryAcquire(context.Background(), "orders")
		require.Nil(t, l)
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.EqualError(t, err, `redislease: acquire "orders": held by another`)
		for _, other := range []error{redislease.ErrOutcomeUnknown, redislease.ErrLost, redislease.ErrReleased, context.Canceled, context.DeadlineExceeded} {
			require.NotErrorIs(t, err, other)
		}
		_, err = k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired, "it does not nest")
		require.NoError(t, first.Err())
		require.Equal(t, first.Token(), w.get("orders"))
	})
}

func TestReleaseEndsTheLeaseAndFreesTheKeyAtOnce(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker()
		l := acquire(t, k, "orders")
		child, cancel := context.WithCancel(l.Context())
		defer cancel()
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
		require.ErrorIs(t, context.Cause(child), redislease.ErrReleased)
		require.NotErrorIs(t, context.Cause(child), redislease.ErrLost)
		require.ErrorIs(t, l.Err(), redislease.ErrReleased)
		require.EqualError(t, l.Err(), `redislease: lease "orders": released`)
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrReleased)

		second := acquire(t, k, "orders")
		require.NotEqual(t, l.Token(), second.Token())
		require.NoError(t, l.Release(), "a second call returns the first result and deletes nothing")
		require.Equal(t, second.Token(), w.get("orders"))
	})
}

func TestALeaseOutlivesItsTTLWhileItIsRenewed(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ttl := 600 * time.Millisecond
		l := acquire(t, w.locker(redislease.WithTTL(ttl)), "orders")
		first := l.Until()
		require.Eventually(t, func() bool { return time.Now().After(first.Add(2 * ttl)) }, patience, time.Millisecond)
		require.NoError(t, l.Err())
		require.Equal(t, l.Token(), w.get("orders"))
		require.Greater(t, l.Until(), first)
	})
}

func TestADeletedKeyEndsTheLeaseAsGone(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		l := acquire(t, w.locker(redislease.WithTTL(300*time.Millisecond)), "orders")
		require.NoError(t, w.operator.Del(context.Background(), "orders").Err())
		cause := ended(t, l)
		var lost *redislease.LostError
		require.ErrorAs(t, cause, &lost)
		require.Equal(t, "orders", lost.Key)
		require.ErrorIs(t, cause, redislease.ErrLost)
		require.ErrorIs(t, cause, redislease.ErrGone)
		require.NotErrorIs(t, cause, redislease.ErrTaken)
		require.Equal(t, cause, l.Err())
		require.Equal(t, cause, l.Release(), "what a release finds is what was found before")
		require.Empty(t, w.get("orders"), "no renewal creates a key")
	})
}

func TestC12AnOverwrittenKeyEndsTheLeaseAsTakenAndIsLeftAlone(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		l := acquire(t, w.locker(often...), "orders")
		require.NoError(t, w.operator.Set(context.Background(), "orders", "other", 0).Err())
		require.ErrorIs(t, ended(t, l), redislease.ErrTaken)
		require.ErrorIs(t, l.Release(), redislease.ErrTaken)
		require.Equal(t, "other", w.get("orders"))
		require.Equal(t, time.Duration(-1), w.pttl("orders"), "no renewal gives it a TTL")
	})
}

func TestAReleaseThatFindsTheKeyForeignSaysSoAndLeavesIt(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		var r record
		k := w.locker(redislease.WithObserver(r.observe))
		taken, gone := acquire(t, k, "taken"), acquire(t, k, "gone")
		require.NoError(t, w.operator.Set(context.Background(), "taken", "other", 0).Err())
		require.NoError(t, w.operator.Del(context.Background(), "gone").Err())
		require.ErrorIs(t, taken.Release(), redislease.ErrTaken)
		require.Equal(t, redislease.EventLost, r.all()[len(r.all())-1].Kind)
		require.ErrorIs(t, gone.Release(), redislease.ErrGone)
		require.Equal(t, redislease.EventLost, r.all()[len(r.all())-1].Kind)
		require.Equal(t, "other", w.get("taken"))
		require.ErrorIs(t, taken.Release(), redislease.ErrTaken, "the result stays")
		require.ErrorIs(t, taken.Err(), redislease.ErrReleased, "the holder ended it")
	})
}

func TestC11AKeyOfAnotherTypeIsSomebodyElses(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		k := w.locker(often...)
		require.NoError(t, w.operator.RPush(ctx, "list", "x").Err())
		_, err := k.TryAcquire(ctx, "list")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		_, err = k.Acquire(ctx, "list", redislease.WithAcquireTimeout(time.Second))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Equal(t, int64(1), w.operator.LLen(ctx, "list").Val())

		watched, released := acquire(t, k, "watched"), acquire(t, k, "released")
		for _, key := range []string{"watched", "released"} {
			_, err := w.operator.TxPipelined(ctx, func(p redis.Pipeliner) error {
				p.Del(ctx, key)
				p.HSet(ctx, key, "f", "v")
				return nil
			})
			require.NoError(t, err)
		}
		require.ErrorIs(t, released.Release(), redislease.ErrTaken)
		require.ErrorIs(t, ended(t, watched), redislease.ErrTaken)
		require.ErrorIs(t, watched.Release(), redislease.ErrTaken)
		for _, key := range []string{"watched", "released"} {
			require.Equal(t, map[string]string{"f": "v"}, w.operator.HGetAll(ctx, key).Val())
		}
	})
}

func TestRenewConfirmsExtendsAndFindsALoss(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		var r record
		k := w.locker(redislease.WithObserver(r.observe))
		l := acquire(t, k, "orders")
		require.NoError(t, w.operator.PExpire(ctx, "orders", 5*time.Second).Err())
		before := l.Until()
		require.NoError(t, l.Renew(ctx))
		require.Greater(t, l.Until(), before)
		require.Greater(t, w.pttl("orders"), 20*time.Second)

		dead, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, l.Renew(dead), context.Canceled)
		require.NoError(t, l.Err(), "as it was")

		r.wait(t, redislease.EventRenewed)

		l = acquire(t, k, "gone")
		require.NoError(t, w.operator.Del(ctx, "gone").Err())
		require.ErrorIs(t, l.Renew(ctx), redislease.ErrGone)
		require.ErrorIs(t, l.Err(), redislease.ErrGone)
		require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrGone)
		events := r.all()
		require.Equal(t, redislease.EventLost, events[len(events)-1].Kind, "delivered before the call returned")
		require.ErrorIs(t, l.Renew(ctx), redislease.ErrGone)
	})
}

func TestAcquireWaitsForTheReleaseAndForTheExpiry(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		var r record
		k := w.locker(redislease.WithObserver(r.observe))
		held := acquire(t, k, "orders")
		got := make(chan *redislease.Lease)
		go func() {
			l, err := w.locker().Acquire(ctx, "orders")
			if err != nil {
				t.Error(err)
			}
			got <- l
		}()
		select {
		case <-got:
			require.FailNow(t, "acquired a held key")
		case <-time.After(100 * time.Millisecond):
		}
		require.NoError(t, held.Release())
		require.NoError(t, (<-got).Release())

		require.NoError(t, w.operator.Set(ctx, "orders", "crashed", 300*time.Millisecond).Err())
		l, err := k.Acquire(ctx, "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
		e := r.all()[len(r.all())-2]
		require.Equal(t, redislease.EventAcquired, e.Kind)
		require.Positive(t, e.Waited)
		require.GreaterOrEqual(t, e.Took, e.Waited)
	})
}

func TestAnAcquisitionThatWaitedInVainSaysWhyItStopped(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker()
		acquire(t, k, "orders")
		deadline, cancel := context.WithTimeout(context.Background(), 150*time.Millisecond)
		defer cancel()
		_, err := k.Acquire(deadline, "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.ErrorIs(t, err, context.DeadlineExceeded)

		why := errors.New("shutting down")
		cancelled, stop := context.WithCancelCause(context.Background())
		time.AfterFunc(100*time.Millisecond, func() { stop(why) })
		_, err = k.Acquire(cancelled, "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.ErrorIs(t, err, why)
		require.NotErrorIs(t, err, context.DeadlineExceeded)

		_, err = k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(100*time.Millisecond))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, context.Canceled)
	})
}

func TestAContextThatIsDoneSendsNothing(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancelCause(context.Background())
		why := errors.New("too late")
		cancel(why)
		sent := 0
		client := clientFunc(func(context.Context, redis.Cmder) error { sent++; return nil })
		k := newLocker(t, client)
		_, err := k.Acquire(ctx, "orders")
		require.ErrorIs(t, err, why)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		_, err = k.TryAcquire(ctx, "orders")
		require.ErrorIs(t, err, why)
		require.Zero(t, sent)
	})
}

func TestReleaseWorksWhenTheCallersContextIsDead(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancelCause(context.Background())
		l := acquireIn(t, ctx, w.locker(), "orders")
		why := errors.New("the client went away")
		cancel(why)
		require.Equal(t, why, ended(t, l))
		require.NoError(t, l.Err(), "a write may still land")
		require.Equal(t, l.Token(), w.get("orders"), "the key is not deleted under the work")
		require.NoError(t, l.Renew(context.Background()), "it can still be confirmed")
		require.NoError(t, l.Release())
		require.Empty(t, w.get("orders"))
	})
}

func TestTheLongestHoldEndsTheLeaseAndTheKeyLapses(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker(redislease.WithTTL(300*time.Millisecond), redislease.WithMaxHold(500*time.Millisecond))
		l := acquire(t, k, "orders")
		deadline, ok := l.Context().Deadline()
		require.True(t, ok)
		require.ErrorIs(t, ended(t, l), redislease.ErrMaxHold)
		require.False(t, time.Now().Before(deadline))
		require.Eventually(t, func() bool { return w.get("orders") == "" }, patience, time.Millisecond)
		require.ErrorIs(t, l.Release(), redislease.ErrMaxHold)
	})
}

func TestALeaseWithoutRenewalsEndsWithItsTrust(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker(redislease.WithTTL(400 * time.Millisecond))
		l := acquire(t, k, "orders", redislease.WithMaxRenewals(0))
		require.ErrorIs(t, ended(t, l), redislease.ErrMaxHold)
		require.ErrorIs(t, l.Release(), redislease.ErrMaxHold, "and frees what is left of the key")
		require.Empty(t, w.get("orders"))
	})
}

func TestDoRunsUnderTheLeaseAndReleasesIt(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		k := w.locker(redislease.WithTTL(300 * time.Millisecond))
		boom := errors.New("boom")
		var used *redislease.Lease

		require.NoError(t, k.Do(ctx, "orders", func(ctx context.Context, l *redislease.Lease) error {
			require.Equal(t, l.Token(), w.get("orders"))
			require.ErrorIs(t, k.TryDo(ctx, "orders", func(context.Context, *redislease.Lease) error {
				t.Error("two at once")
				return nil
			}), redislease.ErrNotAcquired)
			return nil
		}))
		require.Empty(t, w.get("orders"))

		err := k.TryDo(ctx, "orders", func(context.Context, *redislease.Lease) error { return boom })
		require.Equal(t, boom, err, "its error and no other")
		require.Empty(t, w.get("orders"))

		err = k.TryDo(ctx, "orders", func(ctx context.Context, l *redislease.Lease) error {
			w.operator.Del(ctx, "orders")
			<-ctx.Done()
			return boom
		})
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, err, redislease.ErrGone)

		err = k.TryDo(ctx, "orders", func(ctx context.Context, l *redislease.Lease) error {
			w.operator.Del(ctx, "orders")
			return nil
		})
		require.ErrorIs(t, err, redislease.ErrLost, "found at the release")

		err = k.TryDo(ctx, "orders", func(_ context.Context, l *redislease.Lease) error { return l.Release() })
		require.ErrorIs(t, err, redislease.ErrReleased)
		require.NotErrorIs(t, err, redislease.ErrLost)

		require.PanicsWithValue(t, "boom", func() {
			_ = k.Do(ctx, "orders", func(_ context.Context, l *redislease.Lease) error {
				used = l
				panic("boom")
			})
		})
		require.ErrorIs(t, used.Err(), redislease.ErrReleased)
		require.Empty(t, w.get("orders"))

		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = k.Do(ctx, "orders", func(_ context.Context, l *redislease.Lease) error {
				used = l
				runtime.Goexit()
				return nil
			})
		}()
		<-gone
		require.ErrorIs(t, used.Err(), redislease.ErrReleased)
		require.Empty(t, w.get("orders"))
	})
}

func TestDoSaysByHowMuchTheFunctionOverranTrust(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker(redislease.WithTTL(200*time.Millisecond), redislease.WithMaxHold(50*time.Millisecond))
		err := k.Do(context.Background(), "orders", func(ctx context.Context, l *redislease.Lease) error {
			<-ctx.Done()
			return nil
		})
		require.ErrorIs(t, err, redislease.ErrMaxHold)
		require.ErrorContains(t, err, "after the end of trust")
	})
}

func TestANilAndAZeroLeaseHoldNothing(t *testing.T) {
	var none *redislease.Lease
	require.NoError(t, none.Release())
	for _, l := range []*redislease.Lease{none, {}} {
		require.ErrorIs(t, l.Err(), redislease.ErrReleased)
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrReleased)
		require.Empty(t, l.Key())
		require.Empty(t, l.Token())
		require.True(t, l.Until().IsZero())
		require.Error(t, l.Context().Err())
		require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrReleased)
	}
	require.ErrorIs(t, new(redislease.Lease).Release(), redislease.ErrReleased)
}

func TestTheLeasesContextIsTheCallersWithAnEnd(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		type key struct{}
		ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), key{}, "v"), time.Hour/2)
		defer cancel()
		k := w.locker()
		short := acquireIn(t, ctx, k, "short", redislease.WithMaxHold(time.Minute))
		require.Equal(t, "v", short.Context().Value(key{}))
		deadline, ok := short.Context().Deadline()
		require.True(t, ok)
		require.WithinDuration(t, time.Now(), deadline, time.Minute)
		want, _ := ctx.Deadline()
		for name, opt := range map[string]redislease.Option{"long": redislease.WithMaxHold(2 * time.Hour), "endless": redislease.WithMaxHold(redislease.NoMaxHold)} {
			deadline, ok = acquireIn(t, ctx, k, name, opt).Context().Deadline()
			require.True(t, ok)
			require.Equal(t, want, deadline)
		}
		_, ok = acquire(t, k, "unbounded", redislease.WithMaxHold(redislease.NoMaxHold)).Context().Deadline()
		require.False(t, ok)
	})
}

func TestC53TheGreatestTTLIsHonouredOrRefusedByRedisButNeverOverflows(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		l := acquire(t, w.locker(), "orders", redislease.WithTTL(math.MaxInt64), redislease.WithMaxHold(redislease.NoMaxHold))
		require.NoError(t, l.Err())
		require.NoError(t, l.Renew(context.Background()))
		require.Greater(t, l.Until().Year(), 2200)
		require.NoError(t, l.Release())
		require.Empty(t, w.get("orders"))
	})
}

// clientFunc is a client made of one function.
type clientFunc func(ctx context.Context, cmd redis.Cmder) error

func (f clientFunc) Process(ctx context.Context, cmd redis.Cmder) error { return f(ctx, cmd) }

func TestWhoeverLearnsThatALeaseIsOverFindsItsContextEnded(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker()
		for range 300 {
			l := acquire(t, k, "orders")
			require.NoError(t, w.operator.Del(context.Background(), "orders").Err())
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					if err := l.Renew(context.Background()); err == nil || l.Context().Err() == nil {
						t.Errorf("Renew returned %v, and the context's error is %v", err, l.Context().Err())
					}
				})
			}
			wg.Wait()
		}
	})
}
