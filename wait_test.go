package redislease_test

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// deaf is a backoff by which nothing but a release that is heard of brings a waiter its key in time.
var deaf = redislease.WithBackoff(func(int) time.Duration { return time.Hour })

// listener is a client in a bubble that can subscribe.
type listener struct{ *hooked }

func (l listener) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	return l.b.redis.Subscribe(ctx, channels...)
}

// waiting returns a Locker whose waiters are woken.
func (b *bubbled) waiting(opts ...redislease.LockerOption) *redislease.Locker {
	b.locker() // so that the scripts are known to run
	return newLocker(b, listener{b.client.(*hooked)}, opts...)
}

// served has somebody wait for the key, and tells when he got it.
func (b *bubbled) served(k *redislease.Locker, opts ...redislease.Option) <-chan time.Duration {
	at := make(chan time.Duration)
	go func() {
		require.NoError(b, k.Do(context.Background(), "orders", func(context.Context, *redislease.Lease) error {
			at <- b.now()
			return nil
		}, opts...))
	}()
	return at
}

func TestAWaiterIsWokenByTheRelease(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		a, other := w.locker(), w.locker(deaf)
		for range 20 {
			held := acquire(t, a, "orders")
			got := make(chan *redislease.Lease)
			go func() {
				l, err := other.Acquire(context.Background(), "orders")
				require.NoError(t, err)
				got <- l
			}()
			redislease.AwaitListening(t, other, "orders")
			require.NoError(t, held.Release())
			require.NoError(t, (<-got).Release())
		}
	})
}

func TestWaitersAreServedInTheOrderInWhichTheyCame(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const waiters = 50
		k := b.waiting(deaf)
		held := b.acquire(k)
		var order []int
		var wg sync.WaitGroup
		for i := range waiters {
			wg.Go(func() {
				require.NoError(t, k.Do(context.Background(), "orders", func(context.Context, *redislease.Lease) error {
					order = append(order, i)
					return nil
				}))
			})
			synctest.Wait()
		}
		begun := b.now()
		require.NoError(t, held.Release())
		wg.Wait()
		require.True(t, slices.IsSorted(order))
		require.Len(t, order, waiters)
		require.Equal(t, begun, b.now(), "a round trip after the release, and none takes time here")
		require.LessOrEqual(t, len(b.sent("set", 0))+len(b.sent("settle", 0)), waiters+4, "one try each")
		time.Sleep(3 * time.Second)
	})
}

func TestOnlyTheFirstInLineTalksToRedis(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const waiters, wait = 64, 10 * time.Minute
		k := b.waiting()
		held := b.acquire(k, redislease.WithMaxHold(2*wait))
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() {
				_, err := k.Acquire(ctx, "orders")
				require.ErrorIs(t, err, redislease.ErrNotAcquired)
				require.ErrorIs(t, err, context.DeadlineExceeded)
			})
		}
		wg.Wait()
		asked := append(b.sent("set", 0), b.sent("settle", 0)...)
		require.Less(t, len(asked), int(wait/time.Second)+10)
		require.Greater(t, len(asked), int(wait/time.Second)/3, "and it goes on asking")
		require.NoError(t, held.Release())
		time.Sleep(3 * time.Second)
	})
}

func TestAWaiterLeavesFromAnyPlaceAtOnceAndNoWakeUpIsLostWithIt(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k, other := b.waiting(deaf), b.waiting(deaf)
		enough := errors.New("enough")
		for round := range 300 {
			held := b.acquire(k)
			const waiters = 5
			var served atomic.Int32
			var cancels []context.CancelCauseFunc
			var wg sync.WaitGroup
			for i := range waiters {
				ctx, cancel := context.WithCancelCause(context.Background())
				cancels = append(cancels, cancel)
				locker := []*redislease.Locker{k, other}[i%2]
				wg.Go(func() {
					err := locker.Do(ctx, "orders", func(context.Context, *redislease.Lease) error {
						served.Add(1)
						return nil
					})
					if err != nil {
						require.ErrorIs(t, err, enough)
					}
				})
				synctest.Wait()
			}
			// Some leave, one of them perhaps between the signal and its try.
			leaving := rand.Perm(waiters)[:rand.IntN(waiters)]
			release := func() { require.NoError(t, held.Release()) }
			if round%2 == 0 {
				go release()
			}
			for _, i := range leaving {
				go cancels[i](enough)
			}
			if synctest.Wait(); round%2 == 1 {
				release()
			}
			begun := b.now()
			wg.Wait()
			require.Equal(t, begun, b.now(), "nobody was left asleep")
			require.GreaterOrEqual(t, int(served.Load()), waiters-len(leaving))
			for _, cancel := range cancels {
				cancel(nil)
			}
			if round%10 == 0 {
				time.Sleep(3 * time.Second)
			}
		}
		time.Sleep(3 * time.Second)
	})
}

func TestThreeFailuresEndEveryWaiterThatHasNoBound(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting()
		held := b.acquire(k)
		bounded, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		var ended atomic.Int32
		var wg sync.WaitGroup
		for i := range 20 {
			ctx := bounded
			if i%2 == 0 {
				ctx = context.Background()
			}
			wg.Go(func() {
				l, err := k.Acquire(ctx, "orders")
				if i%2 == 0 {
					require.Error(t, err)
					ended.Add(1)
					return
				}
				require.NoError(t, err)
				require.NoError(t, l.Release())
			})
			synctest.Wait()
		}
		b.fault(func(what string, execute func() error) error {
			if what == "settle" || what == "set" {
				return errReadonly
			}
			return execute()
		})
		time.Sleep(time.Minute)
		require.EqualValues(t, 10, ended.Load())
		b.fault(nil)
		require.NoError(t, held.Release())
		wg.Wait()
		time.Sleep(3 * time.Second)
	})
}

func TestAWaiterBehindOthersAnswersWithWhatTheFirstHasLearnt(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := b.waiting(redislease.WithObserver(r.observe))
		held := b.acquire(k)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		go func() { _, _ = k.Acquire(ctx, "orders") }()
		synctest.Wait()
		time.Sleep(time.Second)
		begun := time.Now()
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second))
		require.EqualError(t, err, `redislease: acquire "orders": held by another`)
		require.Equal(t, 5*time.Second, time.Since(begun), "no grace: it has sent nothing")
		i := slices.IndexFunc(r.all(), func(e redislease.Event) bool { return e.Kind == redislease.EventNotAcquired })
		require.GreaterOrEqual(t, i, 0)
		require.Equal(t, 5*time.Second, r.all()[i].Waited)

		b.fault(func(what string, execute func() error) error {
			if what == "settle" {
				return errReadonly
			}
			return execute()
		})
		time.Sleep(5 * time.Second)
		_, err = k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second))
		require.ErrorIs(t, err, errReadonly)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		b.fault(nil)
		cancel()
		require.NoError(t, held.Release())
		time.Sleep(time.Minute)
	})
}

func TestTheNextWaiterNeedsNoTryToKnowThatTheKeyIsHeld(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting()
		held := b.acquire(k)
		leases := make(chan *redislease.Lease, 2)
		for range 2 {
			go func() {
				l, err := k.Acquire(context.Background(), "orders")
				require.NoError(t, err)
				leases <- l
			}()
			synctest.Wait()
		}
		require.NoError(t, held.Release())
		l := <-leases
		synctest.Wait()
		tries := len(b.sent("set", 0)) + len(b.sent("settle", 0))
		time.Sleep(time.Second / 2)
		require.Len(t, append(b.sent("set", 0), b.sent("settle", 0)...), tries)
		require.NoError(t, l.Release())
		require.NoError(t, (<-leases).Release())
		time.Sleep(3 * time.Second)
	})
}

func TestAClientThatCannotSubscribeIsToldOfOnceAndPolls(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := b.locker(redislease.WithObserver(r.observe))
		for range 3 {
			held := b.acquire(k)
			time.AfterFunc(10*time.Second, func() { require.NoError(t, held.Release()) })
			l, err := k.Acquire(context.Background(), "orders")
			require.NoError(t, err)
			require.NoError(t, l.Release())
		}
		n := 0
		for _, e := range r.all() {
			if e.Kind == redislease.EventPolling {
				n++
				require.EqualError(t, e.Err, "redislease: waiters are not woken: the client cannot subscribe")
				require.Empty(t, e.Key)
				require.EqualValues(t, -1, e.Fence)
			}
		}
		require.Equal(t, 1, n)
	})
}

func TestTheSubscriptionEndsASecondAfterTheLastWaiter(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting()
		subscribers := func() int64 {
			return b.operator.PubSubNumSub(context.Background(), "orders:released").Val()["orders:released"]
		}
		for range 3 {
			held := b.acquire(k)
			require.Zero(t, subscribers(), "whoever need not wait opens nothing")
			ctx, cancel := context.WithCancel(context.Background())
			go func() { _, _ = k.Acquire(ctx, "orders") }()
			synctest.Wait()
			require.EqualValues(t, 1, subscribers())
			cancel()
			time.Sleep(lingers - time.Millisecond)
			require.EqualValues(t, 1, subscribers())
			time.Sleep(2 * time.Millisecond)
			synctest.Wait()
			require.Zero(t, subscribers())
			require.NoError(t, held.Release())
		}
	})
}

const lingers = time.Second

func TestASubscriptionThatIsLostIsMadeAnewAndLookedAtAgain(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	var r record
	k := f.used(redislease.WithObserver(r.observe), deaf)
	kill := func() {
		_, err := f.server.Do("CLIENT", "KILL", "TYPE", "pubsub")
		require.NoError(t, err)
	}
	for i := range 10 {
		held := acquire(t, f.world.locker(), "orders")
		got := make(chan *redislease.Lease)
		go func() {
			l, err := k.Acquire(context.Background(), "orders")
			require.NoError(t, err)
			got <- l
		}()
		redislease.AwaitListening(t, k, "orders")
		if i%3 != 1 { // before the release, after it, or both
			kill()
		}
		require.NoError(t, held.Release())
		if i%3 != 0 {
			kill()
		}
		require.NoError(t, (<-got).Release())
		if i == 0 { // later one may be killed that has not been confirmed
			require.NotContains(t, r.kinds(), redislease.EventPolling, "it was made anew at once")
		}
	}
}

func TestAUserWhoMayNotSubscribeNorPublishWaitsByPolling(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	order(t, s, "ACL", "SETUSER", "app", "on", ">p", "~*", "resetchannels", "+@all")
	var r record
	client := connect(t, s.Addr(), func(o *redis.Options) { o.Username, o.Password = "app", "p" })
	k := newLocker(t, client, redislease.WithObserver(r.observe))
	for range 3 {
		held := acquire(t, k, "orders")
		time.AfterFunc(100*time.Millisecond, func() { require.NoError(t, held.Release()) })
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
	}
	e := r.wait(t, redislease.EventPolling)
	require.ErrorContains(t, e.Err, "NOPERM")
	n := 0
	for _, kind := range r.kinds() {
		if kind == redislease.EventPolling {
			n++
		}
	}
	require.Equal(t, 1, n)
}

func TestASilentSubscriptionIsToldOfAndPolledBeside(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := b.waiting(redislease.WithObserver(r.observe))
		held := b.acquire(k, redislease.WithMaxHold(time.Hour))
		got := make(chan *redislease.Lease, 1)
		go func() {
			l, err := k.Acquire(context.Background(), "orders")
			require.NoError(t, err)
			got <- l
		}()
		synctest.Wait()
		b.deafen(true)
		time.Sleep(time.Minute)
		require.Contains(t, r.kinds(), redislease.EventPolling)
		require.NoError(t, held.Release())
		begun := b.now()
		l := <-got
		require.LessOrEqual(t, b.now()-begun, 2*time.Second, "by the next poll")
		b.deafen(false)
		require.NoError(t, l.Release())
		time.Sleep(10 * time.Minute)
	})
}

func TestC08AReleaseBetweenATryAndTheSubscriptionIsFound(t *testing.T) {
	t.Parallel()
	for name, hold := range map[string]faultproxy.Action{"not yet asked for": faultproxy.HoldRequest(), "not yet confirmed": faultproxy.HoldReply()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			k := f.used(deaf)
			held := acquire(t, f.world.locker(), "orders")
			subscription := f.proxy.On(faultproxy.Command("SUBSCRIBE")).Times(1).Do(hold)
			got := make(chan *redislease.Lease)
			go func() {
				l, err := k.Acquire(context.Background(), "orders")
				require.NoError(t, err)
				got <- l
			}()
			subscription.WaitHits(t, 1, patience)
			require.NoError(t, held.Release())
			subscription.Release()
			require.NoError(t, (<-got).Release(), "that it is listened to is a reason to look again")
		})
	}
}

func TestAServerThatRefusesScriptsThatPublishIsPolled(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
			if script, ok := cmd.Args()[1].(string); ok && strings.Contains(script, "PUBLISH") {
				for _, arg := range cmd.Args() {
					if m, ok := arg.(encoding.BinaryMarshaler); ok {
						_, _ = m.MarshalBinary()
					}
				}
				err := redisError("ERR This Redis command is not allowed from script: publish")
				cmd.SetErr(err)
				return err
			}
			return b.redis.Process(ctx, cmd)
		}))
		for range 3 {
			held, err := k.TryAcquire(context.Background(), "orders")
			require.NoError(t, err)
			time.AfterFunc(time.Minute, func() { require.NoError(t, held.Release()) })
			l, err := k.Acquire(context.Background(), "orders")
			require.NoError(t, err)
			require.NoError(t, l.Release())
		}
	})
}

func TestManyWaitersInManyProcessesAreAllServed(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		const processes, waiters = 6, 10
		for round := range 5 {
			key := fmt.Sprint("orders:", round)
			held := acquire(t, w.locker(), key)
			ready := make(chan struct{}, processes*waiters)
			var inside atomic.Int32
			var wg sync.WaitGroup
			for range processes {
				k := w.locker(deaf)
				for range waiters {
					wg.Go(func() {
						ready <- struct{}{}
						require.NoError(t, k.Do(context.Background(), key, func(context.Context, *redislease.Lease) error {
							require.EqualValues(t, 1, inside.Add(1))
							inside.Add(-1)
							return nil
						}))
					})
				}
			}
			for range processes * waiters {
				<-ready
			}
			require.NoError(t, held.Release())
			wg.Wait()
		}
	})
}

func TestASlowHandshakeOfTheSubscriptionHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	k := f.used()
	held := acquire(t, f.world.locker(), "orders")
	handshake := f.proxy.On(faultproxy.Command("SUBSCRIBE")).Do(faultproxy.HoldRequest())
	defer handshake.Release()
	got := make(chan *redislease.Lease)
	go func() {
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		got <- l
	}()
	handshake.WaitHits(t, 1, patience)
	require.NoError(t, acquire(t, k, "others").Release())
	require.NoError(t, held.Release())
	require.NoError(t, (<-got).Release(), "by a poll")
}

// subscribing is a client whose subscriptions come from f.
type subscribing struct {
	redislease.RedisClient
	f func(ctx context.Context, channels ...string) *redis.PubSub
}

func (s subscribing) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	return s.f(ctx, channels...)
}

func TestTheNextInLineFindsAKeyThatLapsesUnreleased(t *testing.T) {
	for name, opts := range map[string][]redislease.Option{
		"by default":     nil,
		"with a backoff": {redislease.WithBackoff(func(int) time.Duration { return 10 * time.Millisecond })},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.waiting()
				held := b.acquire(k)
				opts := append(opts, redislease.WithTTL(200*time.Millisecond), redislease.WithMaxHold(300*time.Millisecond))
				got := make(chan time.Duration, 2)
				for range 2 {
					go func() {
						_, err := k.Acquire(context.Background(), "orders", opts...)
						require.NoError(t, err)
						got <- b.now() // and it is never released
					}()
					synctest.Wait()
				}
				require.NoError(t, held.Release())
				<-got
				for b.get("orders") != "" {
					time.Sleep(time.Millisecond)
				}
				lapsed := b.now()
				require.LessOrEqual(t, <-got-lapsed, 26*time.Millisecond, "never later than its TTL and a tick")
				time.Sleep(3 * time.Second)
			})
		})
	}
}

func TestWhoTriedInVainAfterAReleaseFindsAKeyThatLapsesUnreleased(t *testing.T) {
	for name, opts := range map[string][]redislease.Option{
		"by default":     nil,
		"with a backoff": {deaf},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.waiting()
				for round := range 30 {
					held := b.acquire(k)
					got := b.served(k, opts...)
					time.Sleep(10*time.Second + time.Duration(round)*97*time.Millisecond) // polls have grown rare
					begun := b.now()
					ctx, ttl := context.Background(), 300*time.Millisecond
					require.NoError(t, b.redis.Set(ctx, "orders", "another's", ttl).Err())
					require.NoError(t, b.redis.Publish(ctx, "orders:released", "").Err())
					synctest.Wait()
					require.NotEmpty(t, b.sent("settle", begun))
					require.Less(t, <-got-begun, ttl+30*time.Millisecond, "the holder's TTL and a tick")
					require.Error(t, held.Release())
					synctest.Wait()
				}
				time.Sleep(3 * time.Second)
			})
		})
	}
}

func TestATryThatIsNotAnsweredHoldsUpNoOtherSignal(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const keys = 5
		k := b.waiting(deaf)
		answer := make(chan struct{})
		var first atomic.Bool
		b.fault(func(what string, execute func() error) error {
			if what == "settle" && first.CompareAndSwap(true, false) {
				<-answer
			}
			return execute()
		})
		var held []*redislease.Lease
		got := make(chan string, keys)
		for i := range keys {
			key := fmt.Sprint("orders:", i)
			held = append(held, acquire(t, k, key))
			go func() {
				require.NoError(t, k.Do(context.Background(), key, func(context.Context, *redislease.Lease) error {
					got <- key
					return nil
				}))
			}()
			synctest.Wait()
		}
		first.Store(true)
		begun := b.now()
		for i, l := range held {
			require.NoError(t, l.Release())
			if synctest.Wait(); i > 0 {
				require.Equal(t, l.Key(), <-got)
			}
		}
		require.Equal(t, begun, b.now(), "no signal waits for an answer")
		close(answer)
		require.Equal(t, "orders:0", <-got)
		time.Sleep(3 * time.Second)
	})
}

func TestATryThatStaysSilentIsFollowedByAnotherInTwoSeconds(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting(deaf)
		held := b.acquire(k)
		got := b.served(k)
		time.Sleep(time.Minute)
		answer := make(chan struct{})
		var first atomic.Bool
		b.fault(func(what string, execute func() error) error {
			if what == "settle" && first.CompareAndSwap(false, true) {
				<-answer
				return errReset
			}
			return execute()
		})
		begun := b.now()
		require.NoError(t, held.Release())
		require.LessOrEqual(t, <-got-begun, 2*time.Second)
		close(answer)
		time.Sleep(3 * time.Second)
	})
}

// stuck has a waiter of k try in vain: after a release its try goes to a client that does as it is told, and somebody else
// has the key. Afterwards a signal has the waiter, or whoever follows it, have the key at once.
func (b *bubbled) stuck(k *redislease.Locker, held *redislease.Lease, instead func(execute func() error) error) {
	var first atomic.Bool
	b.fault(func(what string, execute func() error) error {
		if what == "settle" && first.CompareAndSwap(false, true) {
			return instead(execute)
		}
		return execute()
	})
	require.NoError(b, held.Release())
	require.NoError(b, b.redis.Set(context.Background(), "orders", "another", 0).Err())
	synctest.Wait()
	require.True(b, first.Load())
}

// free has somebody else release the key, and tells when.
func (b *bubbled) free() time.Duration {
	require.NoError(b, b.redis.Del(context.Background(), "orders").Err())
	require.NoError(b, b.redis.Publish(context.Background(), "orders:released", "").Err())
	return b.now()
}

func TestWhileATryIsNotAnsweredAnotherLineIsHeardOf(t *testing.T) {
	for name, stoodIn := range map[string]bool{
		"a new one":               false,
		"one that is listened to": true,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.waiting(deaf)
				answer := make(chan struct{})
				held := b.acquire(k)
				got := b.served(k)
				time.Sleep(time.Second)
				other := acquire(t, k, "invoices")
				if stoodIn {
					b.standsIn(k, "invoices")
				}
				b.stuck(k, held, func(execute func() error) error { <-answer; return execute() })
				served := make(chan time.Duration)
				go func() {
					l, err := k.Acquire(context.Background(), "invoices")
					require.NoError(t, err)
					served <- b.now()
					require.NoError(t, l.Release())
				}()
				time.Sleep(time.Second) // the try is younger than the time after which its head looks
				begun := b.now()
				require.NoError(t, other.Release())
				require.Equal(t, begun, <-served)
				close(answer)
				synctest.Wait()
				require.Equal(t, b.free(), <-got)
				time.Sleep(3 * time.Second)
			})
		})
	}
}

// standsIn has somebody stand in the line for a key for a moment, so that it is listened to a little longer.
func (b *bubbled) standsIn(k *redislease.Locker, key string) {
	_, err := k.Acquire(context.Background(), key, redislease.WithAcquireTimeout(10*time.Millisecond))
	require.ErrorIs(b, err, redislease.ErrNotAcquired)
}

func TestWhereNobodyStandsInAnotherLineWhoTriesReadsOnItself(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting(deaf)
		held, other := b.acquire(k), acquire(t, k, "invoices")
		got := b.served(k)
		synctest.Wait()
		b.standsIn(k, "invoices")
		b.fault(func(what string, execute func() error) error {
			if what == "settle" {
				time.Sleep(100 * time.Millisecond)
			}
			return execute()
		})
		for range 3 {
			require.NoError(t, b.redis.Publish(context.Background(), "orders:released", "").Err())
			time.Sleep(50 * time.Millisecond)
			require.Zero(t, readersIn("next"), "nobody else reads")
			time.Sleep(100 * time.Millisecond)
			require.Equal(t, 1, readersIn("next"))
		}
		require.NoError(t, held.Release())
		<-got
		require.NoError(t, other.Release())
		time.Sleep(3 * time.Second)
	})
}

func TestATryThatStaysSilentKeepsNobodyFromHearingMore(t *testing.T) {
	for name, again := range map[string]func(cancel func()){
		"once its head has looked": func(func()) { time.Sleep(2 * time.Second) },
		"once its head has left":   func(cancel func()) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.waiting(deaf)
				held := b.acquire(k)
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				got := make(chan time.Duration, 2)
				for _, ctx := range []context.Context{ctx, context.Background()} {
					go func() {
						if l, err := k.Acquire(ctx, "orders"); err == nil {
							got <- b.now()
							require.NoError(t, l.Release())
						}
					}()
					time.Sleep(time.Second)
				}
				answer := make(chan struct{})
				b.stuck(k, held, func(func() error) error { <-answer; return errReset }) // never sent
				again(cancel)
				time.Sleep(time.Second)
				require.Empty(t, got)
				require.Equal(t, b.free(), <-got)
				close(answer)
				time.Sleep(3 * time.Second)
			})
		})
	}
}

func TestATryWhoseGoroutineEndsTakesNoHearingWithIt(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting() // since a try that failed is followed by a pause
		held := b.acquire(k)
		got := b.served(k)
		time.Sleep(time.Second)
		b.stuck(k, held, func(func() error) error { runtime.Goexit(); return nil })
		time.Sleep(10 * time.Second)
		require.Equal(t, b.free(), <-got)
		time.Sleep(3 * time.Second)
	})
}

// readersIn counts the goroutines that are in a method of a reader.
func readersIn(method string) (n int) {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for _, stack := range strings.Split(string(stacks), "\n\n") { // those of earlier tests may not have ended
		if strings.Contains(stack, "synctest bubble") && strings.Contains(stack, "redislease.(*reader)."+method+"(") {
			n++
		}
	}
	return n
}

func TestOneGoroutineReadsAndOneStandsBy(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const keys = 5
		k, publish := b.waiting(deaf), b.redis.Publish
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		for i := range keys {
			key := fmt.Sprint("orders:", i)
			l := acquire(t, k, key)
			defer func() { require.NoError(t, l.Release()) }()
			go func() {
				_, err := k.Acquire(ctx, key)
				require.ErrorIs(t, err, context.Canceled)
			}()
			synctest.Wait()
		}
		b.fault(func(what string, execute func() error) error {
			if what == "settle" {
				time.Sleep(time.Second)
			}
			return execute()
		})
		for round := range 3 {
			for i := range keys { // all at once, and each is followed by a try that takes a second
				require.NoError(t, publish(ctx, fmt.Sprintf("orders:%d:released", i), "").Err())
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			require.Equal(t, 2, readersIn("run"), round)
		}
		cancel()
		time.Sleep(3 * time.Second)
	})
}

func TestASubscriptionThatNeverLastsIsNotTriedInATightLoop(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		b.locker()
		var opened atomic.Int32
		k := newLocker(b, subscribing{b.client, func(ctx context.Context, _ ...string) *redis.PubSub {
			opened.Add(1)
			p := b.redis.Subscribe(ctx)
			time.AfterFunc(time.Millisecond, func() { _ = p.Close() })
			return p
		}})
		held := b.acquire(k)
		begun := b.now()
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(10*time.Second))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Less(t, int(opened.Load()), 20)
		require.Less(t, len(b.sent("settle", begun)), 40)
		require.NoError(t, held.Release())
		time.Sleep(10 * time.Second)
	})
}

func TestWhoWaitsBehindOneThatFailsIsNotToldThatAnotherHoldsTheKey(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting(redislease.WithTTL(10 * time.Second))
		b.operator.Set(context.Background(), "orders", "another's", 0)
		errs := make(chan error, 3)
		for range 3 {
			go func() {
				_, err := k.Acquire(context.Background(), "orders")
				errs <- err
			}()
			synctest.Wait()
		}
		time.Sleep(time.Second)
		b.fault(func(what string, execute func() error) error {
			if what == "settle" {
				_ = execute()
				return errReset
			}
			return execute()
		})
		for range 3 {
			err := <-errs
			require.ErrorIs(t, err, errReset)
			require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		}
		b.fault(nil)
		time.Sleep(time.Minute)
	})
}

func TestWaitersWhoseTimeIsUpOneAfterAnotherCostNoTryEach(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.waiting()
		held := b.acquire(k, redislease.WithMaxHold(time.Hour))
		begun := b.now()
		var wg sync.WaitGroup
		for range 1000 {
			time.Sleep(10 * time.Millisecond)
			wg.Go(func() {
				_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Second))
				require.ErrorIs(t, err, redislease.ErrNotAcquired)
			})
		}
		wg.Wait()
		require.Less(t, len(b.sent("set", begun))+len(b.sent("settle", begun)), 30, "in eleven seconds")
		require.NoError(t, held.Release())
		time.Sleep(3 * time.Second)
	})
}

func TestASubscriptionThatCannotEvenBeClosedEndsNoProcess(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		b.locker()
		k := newLocker(b, subscribing{b.client, func(context.Context, ...string) *redis.PubSub { return &redis.PubSub{} }})
		held := b.acquire(k)
		time.AfterFunc(time.Second, func() { require.NoError(t, held.Release()) })
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
		time.Sleep(10 * time.Second)
	})
}

func TestAnObserverThatBlocksIsToldNothingMoreOfTheSubscription(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		b.locker()
		var opened, blocked atomic.Int32
		gate := make(chan struct{})
		k := newLocker(b, subscribing{b.client, func(ctx context.Context, _ ...string) *redis.PubSub {
			p := b.redis.Subscribe(ctx)
			if opened.Add(1)%3 != 0 {
				_ = p.Close() // it fails twice, and then works for a moment
			} else {
				time.AfterFunc(time.Millisecond, func() { _ = p.Close() })
			}
			return p
		}}, redislease.WithObserver(func(_ context.Context, e redislease.Event) {
			if e.Kind == redislease.EventPolling {
				blocked.Add(1)
				<-gate
			}
		}))
		held := b.acquire(k, redislease.WithMaxHold(time.Hour))
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Minute))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.EqualValues(t, 1, blocked.Load())
		close(gate)
		require.NoError(t, held.Release())
		time.Sleep(time.Minute)
	})
}

func TestAChannelThatIsDeniedDoesNotConcernTheOthers(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	order(t, s, "ACL", "SETUSER", "app", "on", ">p", "~*", "resetchannels", "&a:*", "+@all")
	k := newLocker(t, connect(t, s.Addr(), func(o *redis.Options) { o.Username, o.Password = "app", "p" }), deaf)
	other := newLocker(t, connect(t, s.Addr()))
	held := acquire(t, other, "a:1")
	acquire(t, other, "b:1")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	denied := make(chan error, 1)
	go func() { _, err := k.Acquire(ctx, "b:1"); denied <- err }()
	got := make(chan *redislease.Lease)
	go func() {
		l, err := k.Acquire(context.Background(), "a:1")
		require.NoError(t, err)
		got <- l
	}()
	redislease.AwaitListening(t, k, "a:1")
	require.NoError(t, held.Release())
	require.NoError(t, (<-got).Release())
	redislease.AwaitHeld(t, k, "b:1")
	cancel()
	require.ErrorIs(t, <-denied, redislease.ErrNotAcquired)
}

func TestAUserWhoMayNotPublishIsToldOfItAndAsksForItsOwnKeys(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	order(t, s, "ACL", "SETUSER", "app", "on", ">p", "~*", "allchannels", "+@all", "-publish")
	var r record
	k := newLocker(t, connect(t, s.Addr(), func(o *redis.Options) { o.Username, o.Password = "app", "p" }), redislease.WithObserver(r.observe))
	held := acquire(t, k, "orders")
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			require.NoError(t, k.Do(context.Background(), "orders", func(context.Context, *redislease.Lease) error { return nil }))
		})
	}
	redislease.AwaitListening(t, k, "orders")
	require.NoError(t, held.Release())
	wg.Wait()
	require.EqualError(t, r.wait(t, redislease.EventPolling).Err, "redislease: waiters are not woken: releases are not published: Redis refuses it")
	order(t, s, "ACL", "SETUSER", "app", "+publish")
	require.NoError(t, acquire(t, k, "orders").Release())
}
