package redislease_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

// The tests here are about one acquisition in a world whose time the test decides about. The faults of a real network
// are in fault_test.go.

func TestALostReplyIsSettledByOneMoreCommand(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				defer time.Sleep(40 * time.Millisecond)
				_ = execute()
				return errReset
			}
			return execute()
		})
		sentAt := b.now()
		l := b.acquire(k)
		require.Equal(t, b.start.Add(sentAt+27*time.Second), l.Until(), "trust counts from the send that carried the token")
		require.Equal(t, l.Token(), b.get("orders"))
		require.Len(t, b.sent("settle", 0), 1)
		require.Equal(t, sentAt+40*time.Millisecond, b.now())
		require.NoError(t, l.Release())
	})
}

func TestASilentSetIsSettledBesideIt(t *testing.T) {
	for name, executed := range map[string]bool{"executed": true, "not executed": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.locker()
				b.fault(func(what string, execute func() error) error {
					if what != "set" {
						return execute()
					}
					if executed {
						_ = execute()
					}
					time.Sleep(5 * time.Second)
					return errReset
				})
				sentAt := b.now()
				l := b.acquire(k)
				require.Equal(t, sentAt+time.Second, b.now())
				trusted := sentAt
				if !executed {
					trusted += time.Second
				}
				require.Equal(t, b.start.Add(trusted+27*time.Second), l.Until())
				require.Equal(t, l.Token(), b.get("orders"))
				require.NoError(t, l.Release())
				time.Sleep(10 * time.Second)
				require.Empty(t, b.get("orders"))
			})
		})
	}
}

func TestALateSetThatExecutesAfterAllIsGivenBack(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				time.Sleep(5 * time.Second)
			}
			return execute()
		})
		l := b.acquire(k)
		require.NoError(t, l.Release(), "the settling script had taken the key")
		require.Empty(t, b.get("orders"))
		released := b.now()
		time.Sleep(5 * time.Second)
		require.Empty(t, b.get("orders"), "the late SET was withdrawn, or given back")
		require.Empty(t, b.sent("renew", released))
	})
}

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

func TestAGrantWithLittleTrustLeftIsConfirmedOrGivenBack(t *testing.T) {
	for name, confirmed := range map[string]bool{"confirmed": true, "not confirmed": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.locker(redislease.WithTTL(4 * time.Second))
				b.fault(func(what string, execute func() error) error {
					switch what {
					case "set":
						defer time.Sleep(3 * time.Second)
					case "settle":
						time.Sleep(time.Minute)
						return errReset
					case "renew":
						if !confirmed {
							return errReadonly
						}
					}
					return execute()
				})
				sentAt := b.now()
				l, err := k.TryAcquire(context.Background(), "orders")
				require.Equal(t, sentAt+3*time.Second, b.now())
				if confirmed {
					require.NoError(t, err)
					require.Equal(t, b.start.Add(sentAt+3*time.Second+3600*time.Millisecond), l.Until())
					require.NoError(t, l.Release())
				} else {
					require.Nil(t, l)
					require.ErrorContains(t, err, "given back")
					require.NotErrorIs(t, err, redislease.ErrNotAcquired)
				}
				require.Empty(t, b.get("orders"))
				time.Sleep(2 * time.Minute)
				require.Empty(t, b.get("orders"))
			})
		})
	}
}

func TestAGrantThatMeetsADeadContextIsGivenBack(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		why := errors.New("enough")
		ctx, cancel := context.WithCancelCause(context.Background())
		b.fault(func(what string, execute func() error) error {
			err := execute()
			if what == "set" {
				cancel(why)
			}
			return err
		})
		l, err := k.TryAcquire(ctx, "orders")
		require.Nil(t, l)
		require.ErrorIs(t, err, why)
		require.ErrorContains(t, err, "given back")
		require.Empty(t, b.get("orders"))
	})
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

func TestATokenTooOldToAskAboutIsNoReasonToHurry(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(100 * time.Millisecond))
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				_ = execute()
				return errReset
			}
			return errReadonly
		})
		go func() {
			time.Sleep(300 * time.Millisecond) // longer than two TTLs
			b.operator.Set(context.Background(), "orders", "other", 0)
			b.fault(nil)
		}()
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(1300*time.Millisecond))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Less(t, len(b.sent("settle", 0)), 60)
	})
}

func TestMoreUnknownTokensThanCanBeAskedAboutAreNoReasonToHurry(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error { _ = execute(); return errReset })
		go func() {
			time.Sleep(30 * time.Second)
			b.operator.Set(context.Background(), "orders", "other", 0)
			b.fault(nil)
		}()
		begun := b.now()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		_, err := k.Acquire(ctx, "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Greater(t, len(b.sent("settle", begun)), 17)
		require.Less(t, len(b.sent("settle", begun)), 6*60)
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

func TestTheConfirmationOfALateGrantIsBoundedByTheContext(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			switch what {
			case "set":
				defer time.Sleep(18100 * time.Millisecond)
				return execute()
			case "release":
				return execute()
			}
			<-hang
			return errReset
		})
		begun := b.now()
		ctx, cancel := context.WithTimeout(context.Background(), 19*time.Second)
		defer cancel()
		_, err := k.Acquire(ctx, "orders")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, begun+19*time.Second, b.now())
		require.Empty(t, b.get("orders"), "given back")
		close(hang)
	})
}

func TestAHookThatExecutesACommandAfterItsAnswerTakesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		full := errors.New("bulkhead full")
		b.fault(func(what string, execute func() error) error {
			if what == "set" {
				go func() { time.Sleep(50 * time.Millisecond); _ = execute() }()
				return full
			}
			return execute()
		})
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, full)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "certainly not executed")
		time.Sleep(time.Second)
		require.Empty(t, b.get("orders"))
	})
}

// unseenEnd is a context whose end wakes nobody, so that it is found by whoever is woken by something else.
type unseenEnd struct {
	context.Context
	done  chan struct{} // never closed
	ended atomic.Bool
}

func (c *unseenEnd) Done() <-chan struct{} { return c.done }

func (c *unseenEnd) Err() error {
	if c.ended.Load() {
		return context.Canceled
	}
	return nil
}

func TestACleanUpThatIsNotSentWithinTheGraceGoesOnBehind(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		ctx := &unseenEnd{Context: context.Background(), done: make(chan struct{})}
		b.fault(func(what string, execute func() error) error {
			if what == "release" {
				time.Sleep(150 * time.Millisecond) // a handshake
				return execute()
			}
			err := execute()
			ctx.ended.Store(true)
			return err
		})
		begun := b.now()
		_, err := k.TryAcquire(ctx, "orders")
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, begun+100*time.Millisecond, b.now())
		time.Sleep(time.Second)
		require.Empty(t, b.get("orders"))
		require.Len(t, b.sent("release", begun), 1)
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

func TestANoThatMayBeAboutAnOwnTokenIsNoAnswerHoweverLateItComes(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker(redislease.WithTTL(time.Second))
		redislease.SetSkew(k, &s)
		taken := make(chan struct{})
		take := sync.OnceFunc(func() { close(taken) })
		b.fault(func(what string, execute func() error) error {
			switch what {
			case "set": // is executed when another token of the same acquisition holds the key
				<-taken
				err := execute()
				s.Suspend(time.Minute)
				return err
			case "settle":
				_ = execute()
				time.AfterFunc(time.Millisecond, take)
				return errReset
			}
			return execute()
		})
		_, err := k.TryAcquire(context.Background(), "orders")
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		require.ErrorIs(t, err, errReset, "whatever it took has lapsed by then")
		require.NotEmpty(t, b.sent("settle", 0))
	})
}

func TestACommandWhoseTokenWasGivenBackIsNotExecutedAnew(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithFencing())
		released, again := make(chan struct{}), make(chan error, 1)
		done := sync.OnceFunc(func() { close(released) })
		first := true
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "settle" && first: // is executed twice, as by a client that tries again
				first = false
				_ = execute()
				b.operator.Del(context.Background(), ordersFence) // so that the lease is not to be had
				<-released
				again <- execute()
				return errReset
			case what == "release":
				err := execute()
				done()
				return err
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(10*time.Second))
		require.Error(t, <-again, "it was withdrawn")
		require.NoError(t, err)
		require.NoError(t, l.Release())
	})
}

// twoTokens has an acquisition hear that two of its tokens have held the key: of the newer one so late that it has to be
// confirmed, and of the older one meanwhile. The newer one is gone by then. If twice is set the older one was written
// twice. giveBack decides about the DEL of the older one.
func twoTokens(t *testing.T, b *bubbled, twice bool, giveBack func(older string, execute func() error) error) {
	ctx, begun := context.Background(), b.now()
	taken, confirming, end := make(chan struct{}), make(chan struct{}), make(chan struct{})
	givenBack, gone := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(end) })
	var older string
	first := map[string]bool{"settle": true, "release": true}
	b.fault(func(what string, execute func() error) error {
		b.mu.Lock()
		isFirst := first[what]
		first[what] = false
		b.mu.Unlock()
		switch {
		case what == "set":
			if twice {
				b.operator.Set(ctx, "orders", "other", 0)
				_ = execute() // in vain
				b.operator.Del(ctx, "orders")
				<-taken
				b.operator.Del(ctx, "orders")
			}
			err := execute()
			older = b.get("orders")
			b.operator.Del(ctx, "orders")
			<-confirming
			return err
		case what == "settle" && isFirst:
			err := execute()
			close(taken)
			time.Sleep(begun + 20*time.Second - b.now())
			return err
		case what == "settle" && b.now()-begun < 20*time.Second: // is never written
			<-end
			return errReset
		case what == "renew":
			close(confirming)
			<-givenBack
			b.operator.Del(ctx, "orders")
			close(gone)
		case what == "release" && isFirst:
			close(givenBack)
			<-gone
			return giveBack(older, execute)
		}
		return execute()
	})
}

func TestATokenThatWasWrittenTwiceIsReckonedWithAfterItWasGivenBack(t *testing.T) {
	late := func(t *testing.T, b *bubbled) func(string, func() error) error {
		return func(older string, execute func() error) error {
			require.NotEmpty(t, older)
			err := execute()
			b.operator.Set(context.Background(), "orders", older, 30*time.Second) // what was written the second time
			return err
		}
	}
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		twoTokens(t, b, true, late(t, b))
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(25*time.Second))
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
	})
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		twoTokens(t, b, true, late(t, b))
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(25*time.Second))
		require.Error(t, err)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired, "nobody else has it")
	})
}

func TestWhileATokenIsBeingGivenBackNobodySaysThatTheKeyIsNotHeld(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		silent := make(chan struct{})
		t.Cleanup(func() { close(silent) })
		twoTokens(t, b, false, func(_ string, execute func() error) error {
			<-silent
			return execute()
		})
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(25*time.Second))
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Len(t, b.sent("release", 0), 2, "one of them is not answered")
	})
}
