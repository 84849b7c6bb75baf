package redislease_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
)

// The tests here are about an acquisition that cannot tell from an answer whether it has taken the key, and about what it
// gives back.

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

func TestTheConfirmationOfALateGrantIsBounded(t *testing.T) {
	const bound = 19 * time.Second
	late := func(acquire func(k *redislease.Locker) error, check func(t *testing.T, err error)) func(t *testing.T) {
		return func(t *testing.T) {
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
				check(t, acquire(k))
				require.Equal(t, begun+bound, b.now())
				require.Empty(t, b.get("orders"), "given back")
				close(hang)
			})
		}
	}
	t.Run("by the context", late(func(k *redislease.Locker) error {
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		_, err := k.Acquire(ctx, "orders")
		return err
	}, func(t *testing.T, err error) { require.ErrorIs(t, err, context.DeadlineExceeded) }))
	t.Run("by the acquisition's timeout", late(func(k *redislease.Locker) error {
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(bound))
		return err
	}, func(t *testing.T, err error) { require.ErrorContains(t, err, "given back") }))
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
	taken, confirming := make(chan struct{}), make(chan struct{})
	givenBack, gone := make(chan struct{}), make(chan struct{})
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
			<-gone
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

func TestATokenThatWasGivenBackBetweenTwoPollsIsNotReckonedWithAnyMore(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k, begun := b.locker(), b.now()
		twoTokens(t, b, false, func(_ string, execute func() error) error {
			b.operator.Set(context.Background(), "orders", "other", 0)
			time.Sleep(begun + 22*time.Second - b.now())
			return execute()
		})
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(25*time.Second),
			redislease.WithBackoff(func(int) time.Duration {
				if b.now()-begun < 21*time.Second {
					return time.Second
				}
				return time.Hour
			}))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
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
	// The client finds the connection closed before the No comes, as a rule. In the other order the lease is no other.
	time.Sleep(50 * time.Millisecond)
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
