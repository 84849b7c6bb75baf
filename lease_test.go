package redislease_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

// The tests here are about one lease in a world whose time the test decides about. Those of real servers and networks are
// in lock_test.go and hold_test.go.

func TestRenewSendsNothingForALeaseWhoseTimeIsUp(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		l := b.acquire(k)
		s.Suspend(time.Minute)
		begun := b.now()
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrUnconfirmed)
		synctest.Wait()
		require.Empty(t, b.sent("renew", begun), "the clock is asked before Redis is")
		require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
	})
}

func TestAnAnswerThatComesAfterTheEndRevivesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		redislease.SetRandom(k, func() float64 { return 0 })
		l := b.acquire(k)
		b.fault(func(what string, execute func() error) error {
			if what == "renew" {
				defer time.Sleep(time.Second)
			}
			return execute()
		})
		time.Sleep(10*time.Second + 500*time.Millisecond)
		s.Suspend(17 * time.Second) // past the end of trust, while Redis' Yes is on its way
		time.Sleep(500*time.Millisecond + 1)
		require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed, "ended is ended")
		require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrUnconfirmed)
		require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
	})
}

func TestARenewalThatWasStuckIsNotSentAfterTheCallersContextHasEnded(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var stuck atomic.Bool
		k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
			if stuck.Load() && nameOf(cmd) == "renew" {
				time.Sleep(2 * time.Second)      // for a connection
				ctx = context.WithoutCancel(ctx) // a client need not look at it any more
			}
			err := b.redis.Process(ctx, cmd)
			if stuck.Load() && nameOf(cmd) == "renew" && err == nil {
				t.Error("it was sent")
			}
			return err
		}))
		redislease.SetRandom(k, func() float64 { return 0 })
		ctx, cancel := context.WithCancel(context.Background())
		l, err := k.TryAcquire(ctx, "orders")
		require.NoError(t, err)
		stuck.Store(true)
		until := l.Until()
		time.Sleep(11 * time.Second)
		require.Equal(t, 1, redislease.InFlight(l))
		cancel()
		time.Sleep(5 * time.Second)
		require.Equal(t, until, l.Until())
		require.NoError(t, l.Release())
	})
}

func TestTheContextEndsBeforeTheKeyIsDeleted(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		b.fault(func(what string, execute func() error) error {
			if what == "release" && (l.Context().Err() == nil || l.Err() == nil) {
				t.Error("others may have the key, and the work goes on")
			}
			return execute()
		})
		require.NoError(t, l.Release())
	})
}

func TestARenewThatWaitsHearsOfTheEndAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		b.fault(func(what string, execute func() error) error {
			if what == "renew" {
				time.Sleep(time.Minute)
				return errReset
			}
			return execute()
		})
		go func() { time.Sleep(time.Second); _ = l.Release() }()
		begun := b.now()
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrReleased)
		require.Equal(t, begun+time.Second, b.now())
		time.Sleep(2 * time.Minute)
	})
}

func TestAReleaseAfterANoSendsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		for _, gone := range []bool{true, false} {
			l := b.acquire(k)
			if gone {
				b.operator.Del(context.Background(), "orders")
			} else {
				b.operator.Set(context.Background(), "orders", "other", time.Minute)
			}
			require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrLost)
			begun := b.now()
			require.ErrorIs(t, l.Release(), redislease.ErrLost)
			require.Empty(t, b.sent("release", begun), "Redis has said it all")
			time.Sleep(time.Second)
		}
	})
}

func TestRenewalsThatWereAskedForDoNotCount(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0 })
		begun := b.now()
		l := b.acquire(k, redislease.WithMaxRenewals(1))
		for range 3 {
			require.NoError(t, l.Renew(context.Background()))
		}
		<-l.Context().Done()
		require.Equal(t, begun+10*time.Second+27*time.Second, b.now(), "the watchdog has renewed once")
		require.ErrorIs(t, l.Err(), redislease.ErrMaxHold)
	})
}

func TestARenewThatFailsChangesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0 })
		begun := b.now()
		l := b.acquire(k)
		dead, cancel := context.WithCancel(context.Background())
		cancel()
		require.ErrorIs(t, l.Renew(dead), context.Canceled)
		synctest.Wait()
		require.Empty(t, b.sent("renew", begun), "nothing is sent for a context that is done")
		time.Sleep(5 * time.Second)
		b.fault(func(string, func() error) error { return errReset })
		require.ErrorIs(t, l.Renew(context.Background()), errReset)
		b.fault(nil)
		time.Sleep(6 * time.Second)
		require.Equal(t, []time.Duration{begun + 5*time.Second, begun + 10*time.Second}, b.sent("renew", begun))
		require.NoError(t, l.Release())
	})
}

func TestARenewalThatWasWithdrawnIsNoFailure(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := b.locker(redislease.WithObserver(r.observe))
		redislease.SetRandom(k, func() float64 { return 0 })
		ctx, cancel := context.WithCancel(context.Background())
		l, err := k.TryAcquire(ctx, "orders")
		require.NoError(t, err)
		b.fault(func(what string, execute func() error) error {
			time.Sleep(2 * time.Second) // for a connection
			return execute()
		})
		time.Sleep(11 * time.Second)
		cancel()
		time.Sleep(5 * time.Second)
		b.fault(nil)
		require.NotContains(t, r.kinds(), redislease.EventRenewFailed)
		require.NoError(t, l.Release())
	})
}

func TestTheContextsDeadlineIsTheEarlierOfTheCallersAndTheLongestHold(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		for _, test := range []struct{ caller, hold, want time.Duration }{
			{time.Minute, time.Hour, time.Minute},
			{time.Hour, time.Minute, time.Minute},
			{time.Hour, redislease.NoMaxHold, time.Hour},
		} {
			begun := b.now()
			ctx, cancel := context.WithTimeout(context.Background(), test.caller)
			l, err := k.TryAcquire(ctx, "orders", redislease.WithMaxHold(test.hold))
			require.NoError(t, err)
			deadline, ok := l.Context().Deadline()
			require.True(t, ok)
			require.Equal(t, b.start.Add(begun+test.want), deadline)
			require.NoError(t, l.Release())
			cancel()
		}
		l := b.acquire(k, redislease.WithMaxHold(redislease.NoMaxHold))
		_, ok := l.Context().Deadline()
		require.False(t, ok)
		require.NoError(t, l.Release())
	})
}

func TestTheWatchdogIsAtWorkFromTheBeginning(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		begun := b.now()
		l := b.acquire(b.locker(), redislease.WithMaxHold(50*time.Millisecond))
		<-l.Context().Done()
		require.Equal(t, begun+50*time.Millisecond, b.now())
	})
}

func TestRenewalsOlderThanATTLDoNotKeepOthersFromBeingSent(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		hang := make(chan struct{})
		b.fault(func(string, func() error) error { <-hang; return errReset })
		time.Sleep(20 * time.Second)
		require.Equal(t, 3, redislease.InFlight(l))
		b.fault(nil)
		require.NoError(t, l.Renew(context.Background()))
		time.Sleep(25 * time.Second) // the first three are older than a TTL by now
		require.NoError(t, l.Err())
		time.Sleep(5 * time.Minute)
		require.NoError(t, l.Err())
		close(hang)
		synctest.Wait()
		require.NoError(t, l.Release())
	})
}

func TestRenewalsThatWereAskedForDoNotKeepTheWatchdogFromItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		b.fault(func(string, func() error) error { time.Sleep(time.Hour); return errReset })
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		for range 3 {
			go func() { _ = l.Renew(ctx) }()
		}
		time.Sleep(2 * time.Second)
		b.fault(nil)
		time.Sleep(time.Minute)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
		time.Sleep(2 * time.Hour)
	})
}

func TestALossIsNotBlamedOnAFailureThatWasMadeGood(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		l := b.acquire(k)
		b.fault(func(string, func() error) error { return errReset })
		require.ErrorIs(t, l.Renew(context.Background()), errReset)
		b.fault(nil)
		require.NoError(t, l.Renew(context.Background()))
		s.Suspend(time.Minute)
		require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed)
		require.NotErrorIs(t, l.Err(), errReset)
		require.ErrorContains(t, l.Err(), "stood still")
	})
}

func TestALossThatRenewFindsIsReportedBeforeItReturns(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := newLocker(t, b.client, redislease.WithObserver(func(ctx context.Context, e redislease.Event) {
			time.Sleep(time.Second)
			r.observe(ctx, e)
		}))
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		b.operator.Del(context.Background(), "orders")
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrGone)
		require.Equal(t, []redislease.EventKind{redislease.EventAcquired, redislease.EventLost}, r.kinds())
	})
}

func TestTheCauseOfAContextIsNoAnswerAboutThisLease(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker()
		var r record
		k2 := newLocker(t, b.client, redislease.WithObserver(r.observe))
		l := b.acquire(k)
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(&redislease.LostError{Key: "outer", Reason: redislease.ErrTaken})
		err := l.Renew(ctx)
		if errors.Is(err, redislease.ErrLost) {
			t.Error("Renew matches ErrLost though the lease is held: ", l.Err())
		}
		ctx, cancel = context.WithCancelCause(context.Background())
		cancel(redislease.ErrNotAcquired) // as errgroup does
		_, err = k2.TryAcquire(ctx, "free")
		if errors.Is(err, redislease.ErrNotAcquired) {
			t.Error("a free key is held by another")
		}
		require.NoError(t, l.Release())
	})
}

func TestUntilIsNeverAfterTheEndOfTheLease(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		l := b.acquire(k)
		b.fault(func(string, func() error) error { return errReset })
		s.Suspend(10 * time.Second)
		until := l.Until()
		<-l.Context().Done()
		require.False(t, until.After(time.Now()), "%v", time.Until(until))
	})
}
