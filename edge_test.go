package redislease_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
)

// The tests here were each written because a version of the library that was wrong passed all others.

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

func TestEachCommandThatMayTakeTheKeyCarriesATokenOfItsOwn(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	k := f.used(redislease.WithBackoff(func(int) time.Duration { return 0 }))
	f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.ResetBefore())
	f.proxy.On(command("settle", "orders")).Times(19).Do(faultproxy.ResetBefore())
	l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(patience))
	require.NoError(t, err)
	var tokens []string
	for _, r := range f.proxy.Log() {
		switch {
		case command("set", "orders")(r):
			tokens = append(tokens, r.Args[2])
		case command("settle", "orders")(r):
			last := len(r.Args) - 2
			require.NotContains(t, tokens, r.Args[last])
			require.Equal(t, tokens[max(0, len(tokens)-16):], r.Args[4:last], "and asks about the newest before")
			tokens = append(tokens, r.Args[last])
		}
	}
	require.Len(t, tokens, 21)
	require.Equal(t, l.Token(), tokens[20])
	require.NoError(t, l.Release())
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

func TestAGrantThatWasNotLookedAtWhenABackoffPanicsIsGivenBack(t *testing.T) {
	for name, panicAt := range map[string]int{"not yet taken": 1, "taken": 2} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.locker()
				begun := b.now()
				b.fault(func(what string, execute func() error) error {
					switch {
					case what == "set": // silent at first
						time.Sleep(2500 * time.Millisecond)
						return execute()
					case what == "settle" && b.now()-begun < 2*time.Second:
						time.Sleep(1600 * time.Millisecond)
						return errReadonly
					case what == "settle":
						return errReadonly
					}
					return execute()
				})
				require.PanicsWithValue(t, "a backoff", func() {
					_, _ = k.Acquire(context.Background(), "orders", redislease.WithBackoff(func(attempt int) time.Duration {
						time.Sleep(time.Second) // the grant comes in meanwhile
						if attempt == panicAt {
							panic("a backoff")
						}
						return time.Second
					}))
				})
				synctest.Wait()
				require.Empty(t, b.get("orders"))
			})
		})
	}
}

func TestOfTwoGrantsTheOneSentLaterHoldsTheKey(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		begun := b.now()
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				time.Sleep(2500 * time.Millisecond) // for a connection
				return execute()
			case what == "settle" && b.now()-begun < 2*time.Second:
				defer time.Sleep(1600 * time.Millisecond)
				return execute()
			case what == "settle":
				return errReadonly
			}
			return execute()
		})
		go func() {
			time.Sleep(2200 * time.Millisecond)
			b.operator.Del(context.Background(), "orders") // and the SET finds it free again
		}()
		l, err := k.Acquire(context.Background(), "orders", redislease.WithBackoff(func(int) time.Duration {
			time.Sleep(time.Second) // both grants come in meanwhile
			return time.Second
		}))
		require.NoError(t, err)
		require.Equal(t, begun+3*time.Second, b.now())
		require.Equal(t, l.Token(), b.get("orders"))
		require.Equal(t, b.start.Add(begun+2500*time.Millisecond+27*time.Second), l.Until())
		synctest.Wait()
		require.Len(t, b.sent("release", begun), 1, "the other one is given back")
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

func TestAnErrorReplyWithoutAKnownCodeProvesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		proxied := redisError("ERR upstream timed out")
		b.fault(func(what string, execute func() error) error {
			if err := execute(); err != nil || what == "settle" {
				return err
			}
			return proxied
		})
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err, "it was settled")
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrOutcomeUnknown)
		err = l.Release()
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.ErrorIs(t, err, proxied)
	})
}

func TestANoSettlesNothingThatMayHaveArrivedAfterIt(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	k := f.used(redislease.WithTTL(5*time.Second), redislease.WithBackoff(func(int) time.Duration { return 300 * time.Millisecond }))
	require.NoError(t, f.operator.Set(context.Background(), "orders", "other", 0).Err())
	f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.ResetBefore())
	late := f.proxy.On(command("settle", "orders")).Times(1).Do(faultproxy.HoldRequest(), faultproxy.CloseAfter())
	asked := f.proxy.On(command("settle", "orders")).Times(2).Do(faultproxy.HoldReply())
	done := make(chan error, 1)
	var l *redislease.Lease
	go func() {
		var err error
		l, err = k.TryAcquire(context.Background(), "orders")
		done <- err
	}()
	f.proxy.WaitForN(t, command("settle", "orders").And(faultproxy.Replied), 2, patience) // another's, both say
	require.NoError(t, f.operator.Del(context.Background(), "orders").Err())
	late.Release()
	f.proxy.WaitForN(t, command("settle", "orders").And(faultproxy.Replied), 3, patience) // and only now it is ours
	time.Sleep(50 * time.Millisecond)                                                     // the client finds the connection closed
	asked.Release()
	require.NoError(t, <-done, "nobody is told that another holds a key of his own")
	require.Equal(t, l.Token(), f.get("orders"))
	require.NoError(t, l.Release())
}

func TestALostNoIsSettledByOneMoreCommand(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		b.fault(func(what string, execute func() error) error {
			err := execute()
			if what == "set" {
				return errReset
			}
			return err
		})
		begun := b.now()
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Equal(t, begun, b.now())
		require.Len(t, b.sent("settle", 0), 1)
	})
}

func TestAConfirmedGrantIsTrustedFromTheConfirmationsSendAndHeldFromItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(4*time.Second), redislease.WithMaxHold(5*time.Second))
		b.fault(func(what string, execute func() error) error {
			switch what {
			case "set":
				defer time.Sleep(3 * time.Second)
			case "settle":
				time.Sleep(time.Minute)
				return errReset
			case "renew":
				defer time.Sleep(200 * time.Millisecond)
			}
			return execute()
		})
		begun := b.now()
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.Equal(t, begun+3200*time.Millisecond, b.now())
		deadline, _ := l.Context().Deadline()
		require.Equal(t, b.start.Add(begun+5*time.Second), deadline)
		require.Equal(t, deadline, l.Until(), "the hold counts from the grant")
		require.NoError(t, l.Release())

		l, err = k.Acquire(context.Background(), "orders", redislease.WithMaxHold(time.Hour))
		require.NoError(t, err)
		require.Equal(t, b.now()-200*time.Millisecond+3600*time.Millisecond, l.Until().Sub(b.start))
		require.NoError(t, l.Release())
		time.Sleep(2 * time.Minute)
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

func TestAHookThatExecutesACommandAfterItsAnswerTakesNothingWhileTheAcquisitionGoesOn(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		full := errors.New("bulkhead full")
		b.fault(func(what string, execute func() error) error {
			go func() {
				time.Sleep(50 * time.Millisecond)
				if execute() == nil {
					t.Error("an answered command was executed")
				}
			}()
			return full
		})
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Second))
		require.ErrorIs(t, err, full)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		time.Sleep(time.Second)
	})
}

func TestARefusalOfARepeatedCommandProvesNothingAboutTheFirst(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error {
			if what != "settle" {
				_, _ = execute(), execute()
				return errReadonly
			}
			return execute()
		})
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err, "the first SET had taken it")
		err = l.Release()
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.ErrorIs(t, err, errReadonly)
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

func TestACleanUpIsNotSentWhenWhatItWouldGiveBackHasLapsed(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		ctx, cancel := context.WithCancel(context.Background())
		b.fault(func(what string, execute func() error) error {
			if what == "release" {
				time.Sleep(time.Minute) // for a connection
				err := execute()
				if err == nil {
					t.Error("sent after two TTLs")
				}
				return err
			}
			err := execute()
			cancel()
			return err
		})
		_, err := k.TryAcquire(ctx, "orders")
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		time.Sleep(2 * time.Minute)
	})
}

func TestAnAcquisitionThatEndsInDoubtCleansUp(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		hang := make(chan struct{})
		b.fault(func(what string, execute func() error) error {
			if what != "release" {
				_ = execute()
				<-hang
				return errReset
			}
			return execute()
		})
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Empty(t, b.get("orders"))
		close(hang)
	})
}

func TestANoWithdrawsWhatIsStuckUnsent(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		begun := b.now()
		b.fault(func(what string, execute func() error) error {
			if what == "settle" && b.now()-begun < 1100*time.Millisecond {
				time.Sleep(2 * time.Second) // for a connection
				err := execute()
				if err == nil {
					t.Error("it was sent after the No")
				}
				return err
			}
			if what == "set" {
				defer time.Sleep(1100 * time.Millisecond)
			}
			return execute()
		})
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		time.Sleep(time.Minute)
	})
}

func TestATokenIsAskedAboutForTwoTTLs(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(time.Second))
		begun := b.now()
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				time.Sleep(900 * time.Millisecond) // for a connection
				_ = execute()
				return errReset
			case what == "settle" && b.now()-begun < 1200*time.Millisecond:
				return errReset
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second),
			redislease.WithBackoff(func(int) time.Duration { return 50 * time.Millisecond }))
		require.NoError(t, err)
		require.Equal(t, l.Token(), b.get("orders"))
		require.Less(t, b.now()-begun, 1300*time.Millisecond, "it was recognised")
		require.NoError(t, l.Release())
	})
}

func TestTheConfirmationOfALateGrantIsBoundedByTheAcquisitionsTimeout(t *testing.T) {
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
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(19*time.Second))
		require.ErrorContains(t, err, "given back")
		require.Equal(t, begun+19*time.Second, b.now())
		require.Empty(t, b.get("orders"))
		close(hang)
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

func TestAnAcquisitionWhoseGiveBackIsUnknownIsNotToldThatAnotherHoldsTheKey(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker(redislease.WithTTL(4 * time.Second))
		b.fault(func(what string, execute func() error) error {
			switch what {
			case "set":
				defer time.Sleep(3 * time.Second)
			case "renew", "release":
				return errReset // nothing gets through for a while
			case "settle":
				if b.now() < 2500*time.Millisecond {
					time.Sleep(time.Hour)
				}
			}
			return execute()
		})
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(3500*time.Millisecond))
		require.NotErrorIs(t, err, redislease.ErrNotAcquired, "nobody else ever had it")
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

func TestATokenIsAskedAboutForTwoTTLsAfterItWasWritten(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker(redislease.WithTTL(time.Second))
		begun := b.now()
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				time.Sleep(1900*time.Millisecond - (b.now() - begun)) // for a connection
				_ = execute()
				time.Sleep(50 * time.Millisecond)
				return errReset
			case what == "settle" && b.now()-begun < 1940*time.Millisecond, what == "release":
				time.Sleep(time.Hour)
			case what == "settle" && b.now()-begun < 2020*time.Millisecond:
				return errReset
			}
			return execute()
		})
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(2500*time.Millisecond))
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

func TestAGrantThatIsBeingGivenBackIsNotKeptAfterAll(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		defer time.Sleep(2 * time.Hour)
		k := b.locker(redislease.WithTTL(4 * time.Second))
		redislease.SetRandom(k, func() float64 { return 0 })
		begun := b.now()
		var renewals atomic.Int32
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				defer time.Sleep(time.Hour)
			case what == "settle" && b.now()-begun < 2500*time.Millisecond:
				time.Sleep(2600*time.Millisecond - (b.now() - begun))
				return errReset
			case what == "renew" && renewals.Add(1) == 1:
				return errReset
			case what == "release":
				time.Sleep(500 * time.Millisecond) // on its way
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(10*time.Second))
		require.NoError(t, err)
		b.fault(nil)
		time.Sleep(600 * time.Millisecond)
		_, err = k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired, "one holder at a time")
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}
