package redislease_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

// The tests here are about one acquisition in a world whose time the test decides about: what it waits for, what it sends
// and when it ends. Whether it has taken the key is settled in settle_test.go; the faults of a real network are in
// fault_test.go.

func TestATryEndsInTimeWhenRedisIsSilentAndKnowsNothing(t *testing.T) {
	for _, executed := range []bool{false, true} {
		bubble(t, func(t *testing.T, b *bubbled) {
			var r record
			k := b.locker(redislease.WithObserver(r.observe))
			b.fault(func(what string, execute func() error) error {
				if executed {
					_ = execute()
				}
				time.Sleep(time.Minute)
				if !executed {
					_ = execute()
				}
				return errReset
			})
			sentAt := b.now()
			l, err := k.TryAcquire(context.Background(), "orders")
			require.Nil(t, l)
			require.NotErrorIs(t, err, redislease.ErrNotAcquired)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			if executed {
				require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
				require.Equal(t, sentAt+5*time.Second+100*time.Millisecond, b.now(), "its bound and a grace")
			} else {
				require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "nothing was written, and never will be")
				require.Equal(t, sentAt+5*time.Second, b.now(), "no grace is needed")
			}
			require.Equal(t, redislease.EventAcquireFailed, r.all()[len(r.all())-1].Kind)
			time.Sleep(2 * time.Minute)
			require.Empty(t, b.get("orders"))
			require.Empty(t, b.sent("renew", 0))
		})
	}
}

func TestAcquireRidesOutARedisThatRefuses(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(string, func() error) error { return errReadonly })
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, errReadonly, "a Try says so at once")
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)

		_, err = k.Acquire(context.Background(), "orders")
		require.ErrorIs(t, err, errReadonly, "without a bound three failures are enough")
		require.Len(t, append(b.sent("settle", 0), b.sent("set", 0)...), 1+3)

		begun := b.now()
		_, err = k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Minute))
		require.ErrorIs(t, err, errReadonly)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, begun+time.Minute, b.now())
		require.Less(t, len(b.sent("settle", begun)), 150, "with a backoff")

		go func() { time.Sleep(10 * time.Minute); b.fault(nil) }()
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		l, err := k.Acquire(ctx, "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
	})
}

func TestAcquireWithoutABoundGivesUpOnASilentRedis(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(_ string, execute func() error) error { _ = execute(); time.Sleep(time.Hour); return errReset })
		begun := b.now()
		_, err := k.Acquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Equal(t, begun+15*time.Second+100*time.Millisecond, b.now())
		time.Sleep(2 * time.Hour)
		require.Empty(t, b.get("orders"))
	})
}

func TestAWaitIsPolledWithJitterUpToTwoSeconds(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k)
		begun := b.now()
		_, err := b.locker().Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Minute))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		polls := b.sent("settle", begun)
		require.Len(t, b.sent("set", begun), 1)
		require.Less(t, len(polls), 100)
		for i := 1; i < len(polls); i++ {
			require.LessOrEqual(t, polls[i]-polls[i-1], 2*time.Second)
			require.Positive(t, polls[i]-polls[i-1])
			if polls[i]-begun > 5*time.Second {
				require.GreaterOrEqual(t, polls[i]-polls[i-1], time.Second, "once grown, one a second at the most")
			}
		}
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}

func TestACrashedHoldersKeyIsTakenWhenItLapses(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		ctx := context.Background()
		k := b.locker(redislease.WithBackoff(func(int) time.Duration { return time.Hour }))
		require.NoError(t, b.operator.Set(ctx, "orders", "crashed", 20*time.Second).Err())
		begun := b.now()
		// The first try is a plain SET, which says nothing about how long the key lives; the second one does.
		ctx, cancel := context.WithTimeout(ctx, 3*time.Hour)
		defer cancel()
		l, err := k.Acquire(ctx, "orders", redislease.WithBackoff(func(attempt int) time.Duration {
			return time.Duration(attempt-1) * time.Hour
		}))
		require.NoError(t, err)
		require.LessOrEqual(t, b.now()-begun, 20*time.Second+26*time.Millisecond, "never later than its TTL and a tick")
		require.NoError(t, l.Release())
	})
}

func TestABackoffIsAskedForEachAttemptAndCountsAsAtLeastAMillisecond(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k)
		for range 2 {
			var asked []int
			begun := b.now()
			_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(20*time.Millisecond-1),
				redislease.WithBackoff(func(attempt int) time.Duration {
					asked = append(asked, attempt)
					return -time.Second
				}))
			require.ErrorIs(t, err, redislease.ErrNotAcquired)
			require.Len(t, b.sent("settle", begun), 19)
			for i, attempt := range asked {
				require.Equal(t, i+1, attempt, "each acquisition has a progression of its own")
			}
		}
		require.NoError(t, l.Release())
	})
}

func TestAServerWithoutScriptsIsFoundOutBeforeAKeyIsTaken(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		unknown := redisError("ERR unknown command 'EVAL'")
		b.fault(func(what string, execute func() error) error {
			if what != "set" {
				return unknown
			}
			return execute()
		})
		k := newLocker(t, b.client)
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, unknown)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Empty(t, b.sent("set", 0))
		b.fault(nil)
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
		before := len(b.sent("renew", 0))
		l, err = k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		require.Len(t, b.sent("renew", 0), before, "once is enough")
		require.NoError(t, l.Release())
	})
}

func TestABlackHoledSetDoesNotKeepAWaiterFromAFreeKey(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(time.Second))
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 2*time.Second).Err())
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				_ = execute()
				<-hang
				return errReset
			}
			return execute()
		})
		begun := b.now()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		l, err := k.Acquire(ctx, "orders")
		require.NoError(t, err)
		require.Less(t, b.now()-begun, 4*time.Second)
		require.NoError(t, l.Release())
		close(hang)
	})
}

func TestANoIsToldAtOnceWhateverElseIsStuckUnsent(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			if what != "set" {
				<-hang // dialling
				return errReset
			}
			err := execute()
			time.Sleep(1100 * time.Millisecond)
			return err
		})
		begun := b.now()
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Equal(t, begun+1100*time.Millisecond, b.now())
		close(hang)
	})
}

func TestCommandsThatFailTogetherAreOneFailure(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		reset := make(chan struct{})
		b.fault(func(what string, execute func() error) error { _ = execute(); <-reset; return errReset })
		go func() { time.Sleep(2500 * time.Millisecond); b.fault(nil); close(reset) }()
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.Equal(t, l.Token(), b.get("orders"))
		require.NoError(t, l.Release())
	})
}

func TestABackoffThatPanicsLeavesNothingBehind(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				go func() { time.Sleep(time.Second); _ = execute() }()
			}
			return errReadonly
		})
		require.PanicsWithValue(t, "a backoff", func() {
			_, _ = k.Acquire(context.Background(), "orders", redislease.WithBackoff(func(int) time.Duration { panic("a backoff") }))
		})
		b.fault(nil)
		time.Sleep(2 * time.Second)
		require.Empty(t, b.get("orders"))
	})
}

func TestACommandThatIsWrittenWhenItsTimeIsUpIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		redislease.SetRandom(k, func() float64 { return 0 })
		l := b.acquire(k)
		suspended := func(what string) {
			b.fault(func(name string, execute func() error) error {
				if name != what {
					return execute()
				}
				time.Sleep(100 * time.Millisecond) // for a connection
				s.Suspend(20 * time.Second)
				err := execute() // before anybody else has looked at the clock
				if err == nil {
					t.Errorf("%s was executed", what)
				}
				return err
			})
		}
		suspended("renew")
		time.Sleep(11 * time.Second)
		require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed)
		require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)

		suspended("set")
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(10*time.Second))
		require.Error(t, err)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "nothing was taken")
		require.Empty(t, b.get("orders"))
	})
}

func TestATryEndsWithTheUsefulLifeOfWhatItMayHaveTaken(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error {
			_ = execute()
			time.Sleep(10 * time.Minute)
			return errReset
		})
		begun := b.now()
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Minute))
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Equal(t, begun+27*time.Second+100*time.Millisecond, b.now())
		time.Sleep(time.Hour)
	})
}

func TestASilentSetIsWaitedForForOneTTL(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(time.Second))
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 1200*time.Millisecond).Err())
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			err := execute()
			if what == "set" {
				<-hang
				return errReset
			}
			return err
		})
		begun := b.now()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		l, err := k.Acquire(ctx, "orders")
		require.NoError(t, err)
		require.Less(t, b.now()-begun, 1300*time.Millisecond)
		require.NoError(t, l.Release())
		close(hang)
	})
}

func TestAfterANoNothingMoreIsSentBesideWhatIsWaitedFor(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		b.fault(func(what string, execute func() error) error {
			err := execute()
			if what == "set" {
				time.Sleep(4 * time.Second)
			}
			return err
		})
		begun := b.now()
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Equal(t, begun+4*time.Second, b.now())
		require.Equal(t, []time.Duration{begun + time.Second}, b.sent("settle", begun))
	})
}

func TestAnAcquisitionHasAtMostThreeInFlight(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(string, func() error) error { time.Sleep(time.Hour); return errReset })
		begun := b.now()
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(25*time.Second))
		require.Error(t, err)
		require.Equal(t, []time.Duration{begun + time.Second, begun + 2*time.Second}, b.sent("settle", begun))
		time.Sleep(2 * time.Hour)
	})
}

func TestACommandHasNoDeadlineSinceALateAnswerIsOfUse(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var seen atomic.Int32
		k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
			if _, ok := ctx.Deadline(); ok {
				t.Errorf("%s has a deadline", nameOf(cmd))
			}
			seen.Add(1)
			return b.redis.Process(ctx, cmd)
		}))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		l, err := k.TryAcquire(ctx, "orders")
		require.NoError(t, err)
		require.NoError(t, l.Renew(ctx))
		require.NoError(t, l.Release())
		require.EqualValues(t, 2+3, seen.Load())
	})
}

func TestAnErrorReplyToACheckIsAnAnswerWhateverItMeans(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		unknown := redisError("ERR unknown command 'EVAL'")
		b.fault(func(what string, execute func() error) error {
			_ = execute()
			return unknown
		})
		begun := b.now()
		_, err := newLocker(t, b.client).TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, unknown)
		require.Equal(t, begun, b.now(), "a Try says so at once")
		require.Empty(t, b.sent("set", 0))
	})
}

func TestASilentConnectionDoesNotEndAWaitForAHolder(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 40*time.Second).Err())
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				_ = execute()
				<-hang
				return errReset
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders")
		close(hang)
		require.NoError(t, err, "Redis has answered all the time")
		require.NoError(t, l.Release())
	})
}

func TestASilentConnectionDoesNotEndASlowPoll(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker(redislease.WithTTL(time.Second))
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		go func() { time.Sleep(time.Minute); b.operator.Del(context.Background(), "orders") }()
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				_ = execute()
				<-hang
				return errReset
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders", redislease.WithBackoff(func(int) time.Duration { return 5 * time.Second }))
		close(hang)
		require.NoError(t, err)
		require.NoError(t, l.Release())
	})
}

func TestAWrittenCommandIsWaitedForHoweverLongItWaitedForAConnection(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker(redislease.WithTTL(time.Second))
		var settles atomic.Int32
		begun := b.now()
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				time.Sleep(1500*time.Millisecond - (b.now() - begun)) // for a connection
				return execute()
			case what == "settle" && settles.Add(1) == 1:
				time.Sleep(1490*time.Millisecond - (b.now() - begun)) // for a connection
				defer time.Sleep(100 * time.Millisecond)
				return execute()
			case what == "settle":
				time.Sleep(time.Hour)
			}
			return execute()
		})
		l, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second))
		if l != nil {
			_ = l.Release()
		}
		require.NotErrorIs(t, err, redislease.ErrNotAcquired, "nobody else ever had it")
	})
}

func TestAKeyThatIsAboutToLapseIsNotWaitedForForAWholeBackoff(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0.9999 })
		require.NoError(t, b.operator.Set(context.Background(), "orders", "crashed", time.Second).Err())
		begun := b.now()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Hour)
		defer cancel()
		l, err := k.Acquire(ctx, "orders", redislease.WithBackoff(func(attempt int) time.Duration {
			if attempt == 1 {
				return 1500 * time.Microsecond // so that its PTTL is rounded down
			}
			return time.Hour
		}))
		require.NoError(t, err)
		require.LessOrEqual(t, b.now()-begun, time.Second+25*time.Millisecond)
		require.NoError(t, l.Release())
	})
}

func TestATimeoutOfTheClientIsNoEndOfAContext(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k)
		dial := &net.OpError{Op: "dial", Err: context.DeadlineExceeded}
		b.fault(func(string, func() error) error { return dial })
		_, err := k.TryAcquire(context.Background(), "other", redislease.WithAcquireTimeout(time.Second))
		for _, err := range []error{err, l.Renew(context.Background()), l.Release()} {
			require.ErrorContains(t, err, "dial")
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			var op *net.OpError
			require.ErrorAs(t, err, &op)
		}
	})
}
