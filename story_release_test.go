package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// Stories about releasing, about shutting down, about keys that vanish, and about what a lease is: see
// testdata/stories.md.

func TestC57AReleaseAfterTheLeaseHasLapsedLeavesTheNextHolderAlone(t *testing.T) {
	t.Run("lapsed before", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker(redislease.WithTTL(300 * time.Millisecond))
			b.fault(func(what string, execute func() error) error {
				if what == "renew" {
					return errReset
				}
				return execute()
			})
			l := b.acquire(k)
			time.Sleep(300 * time.Millisecond)
			next := b.acquire(k, redislease.WithTTL(time.Minute))
			require.ErrorIs(t, l.Release(), redislease.ErrLost)
			require.Len(t, b.sent("release", 0), 1, "comparison and DEL are one command")
			require.Equal(t, next.Token(), b.get("orders"))
			require.NoError(t, next.Release())
		})
	})
	t.Run("lapsed on the way", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		l := acquire(t, f.used(redislease.WithTTL(time.Second)), "orders")
		late := f.proxy.On(command("release", "orders")).Do(faultproxy.HoldRequest())
		require.Error(t, l.Release())
		next, err := f.world.locker().Acquire(context.Background(), "orders")
		require.NoError(t, err)
		late.Release()
		f.proxy.WaitFor(t, command("release", "orders").And(faultproxy.Replied), patience)
		require.Equal(t, next.Token(), f.get("orders"))
		require.Equal(t, 1, f.proxy.Count(command("release", "orders")))
		require.NoError(t, next.Release())
	})
}

func TestC58ASecondReleaseDeletesNothingOfTheNextLease(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k)
		hang := make(chan struct{})
		b.fault(func(_ string, execute func() error) error { _ = execute(); <-hang; return errReset })
		require.ErrorIs(t, l.Release(), redislease.ErrOutcomeUnknown)
		b.fault(nil)
		next := b.acquire(k)
		require.NoError(t, l.Release(), "the first one may have done it")
		require.Equal(t, next.Token(), b.get("orders"))
		begun := b.now()
		time.Sleep(time.Minute)
		require.NoError(t, next.Err())
		require.Greater(t, len(b.sent("renew", begun)), 5, "still renewed")
		require.NoError(t, l.Release())
		require.Equal(t, next.Token(), b.get("orders"))
		close(hang)
		require.NoError(t, next.Release())
	})
}

func TestC60AReleaseIsSentWhateverHasBecomeOfTheCallersContext(t *testing.T) {
	for name, end := range map[string]func(ctx context.Context) (context.Context, context.CancelFunc){
		"cancelled": func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, cancel
		},
		"a millisecond before its deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Second+time.Millisecond)
		},
		"cancelled with its parent": func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return context.WithCancel(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.locker()
				ctx, cancel := end(context.Background())
				defer cancel()
				l, err := k.TryAcquire(ctx, "orders")
				require.NoError(t, err)
				time.Sleep(time.Second)
				synctest.Wait()
				require.NoError(t, l.Release())
				require.Empty(t, b.get("orders"))
				require.Len(t, b.sent("release", time.Second), 1)

				l, err = k.TryAcquire(context.Background(), "orders")
				require.NoError(t, err)
				hang := make(chan struct{})
				b.fault(func(_ string, execute func() error) error { _ = execute(); <-hang; return errReset })
				begun := b.now()
				require.ErrorIs(t, l.Release(), redislease.ErrOutcomeUnknown)
				require.Equal(t, begun+2*time.Second, b.now(), "and never waits for longer than its bound")
				close(hang)
			})
		})
	}
}

func TestC61AReleaseThatIsNotAnsweredIsUnknownAndTheKeyLapses(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	for name, action := range map[string]faultproxy.Action{"not executed": faultproxy.DropRequest(), "executed": faultproxy.DropReply()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			k := f.used(redislease.WithTTL(ttl), redislease.WithRenewInterval(50*time.Millisecond))
			l := acquire(t, k, "orders")
			f.renewedTwice("orders")
			silent := f.proxy.On(command("release", "orders")).Do(action)
			require.ErrorIs(t, l.Release(), redislease.ErrOutcomeUnknown)
			require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrReleased)
			renewals := f.proxy.Count(command("renew", "orders"))
			f.lapses("orders", ttl)
			require.Equal(t, renewals, f.proxy.Count(command("renew", "orders")), "the watchdog has stopped")
			require.Equal(t, 1, f.proxy.Count(command("release", "orders")), "no second DEL by itself")
			silent.Remove()
		})
	}
}

func TestC62WaitingWithoutEndDoesNotApplyToARelease(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithAcquireTimeout(math.MaxInt64), redislease.WithBackoff(func(int) time.Duration { return time.Second }))
		l := b.acquire(k)
		b.operator.Del(context.Background(), "orders")
		b.fault(func(_ string, execute func() error) error { time.Sleep(100 * time.Millisecond); return execute() })
		begun := b.now()
		require.ErrorIs(t, l.Release(), redislease.ErrGone)
		require.Equal(t, begun+100*time.Millisecond, b.now(), "one round trip")
		time.Sleep(time.Hour)
		require.Len(t, b.sent("release", begun), 1)
	})
}

func TestC63ALossAndASecondReleaseAreToldApart(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		for _, value := range []string{"", "other"} {
			l := b.acquire(k, redislease.WithMaxRenewals(0))
			time.Sleep(31 * time.Second)
			require.Empty(t, b.get("orders"))
			if value != "" {
				require.NoError(t, b.operator.Set(context.Background(), "orders", value, 0).Err())
			}
			for range 2 {
				require.ErrorIs(t, l.Release(), redislease.ErrLost)
				require.Equal(t, value, b.get("orders"))
			}
		}
		b.operator.Del(context.Background(), "orders")
		l := b.acquire(k)
		require.NoError(t, l.Release())
		require.NoError(t, l.Release())
		require.ErrorIs(t, l.Err(), redislease.ErrReleased)
		require.NotErrorIs(t, l.Err(), redislease.ErrLost)
	})
}

func TestC64NeitherTheFunctionsErrorNorThatOfTheLeaseHidesTheOther(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		ctx := context.Background()
		var r record
		k := b.locker(redislease.WithObserver(r.observe))
		errA := errors.New("A")
		lose := func(err error) func(context.Context, *redislease.Lease) error {
			return func(ctx context.Context, _ *redislease.Lease) error {
				b.operator.Del(context.Background(), "orders")
				<-ctx.Done()
				return err
			}
		}
		require.ErrorIs(t, k.Do(ctx, "orders", lose(nil)), redislease.ErrLost, "no success")
		err := k.Do(ctx, "orders", lose(errA))
		require.ErrorIs(t, err, errA)
		require.ErrorIs(t, err, redislease.ErrGone)

		for _, want := range []error{errA, nil} {
			err = k.Do(ctx, "orders", func(context.Context, *redislease.Lease) error {
				b.fault(func(_ string, execute func() error) error { _ = execute(); return errReset })
				return want
			})
			b.fault(nil)
			require.Equal(t, want, err, "the lease was held all the time")
			last := r.all()[len(r.all())-1]
			require.Equal(t, released, last.Kind)
			require.ErrorIs(t, last.Err, redislease.ErrOutcomeUnknown, "what became of the release is an event")
		}

		require.PanicsWithValue(t, "A", func() {
			_ = k.Do(ctx, "orders", func(context.Context, *redislease.Lease) error { panic("A") })
		})
		require.Empty(t, b.get("orders"))
	})
}

func TestC65AClosedClientEndsEveryLeaseOnceAndLeavesNothingBehind(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const leases = 100
		var r record
		k := b.locker(redislease.WithObserver(r.observe))
		begun := b.now()
		var held []*redislease.Lease
		for i := range leases {
			l, err := k.TryAcquire(context.Background(), fmt.Sprint("orders:", i))
			require.NoError(t, err)
			held = append(held, l)
		}
		require.NoError(t, b.redis.Close())
		for _, l := range held {
			<-l.Context().Done()
			require.Equal(t, begun+27*time.Second, b.now())
			require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrUnconfirmed)
			require.ErrorIs(t, context.Cause(l.Context()), redis.ErrClosed)
		}
		synctest.Wait()
		require.Less(t, len(b.sent("renew", begun)), 50*leases, "no busy loop")
		time.Sleep(time.Hour)
		for _, l := range held {
			require.ErrorIs(t, l.Release(), redis.ErrClosed)
		}
		var ends int
		for _, e := range r.all() {
			if (e.Kind == lost || e.Kind == released) && e.Key != "check" {
				require.ErrorIs(t, e.Err, redis.ErrClosed)
				ends++
			}
		}
		require.Equal(t, leases, ends, "one event each")
	})
}

func TestC66AShutdownReleasesAndAKillLeavesKeysForATTL(t *testing.T) {
	const leases, ttl = 20, 3 * time.Second
	key := func(i int) string { return fmt.Sprint("orders:", i) }
	if addr, ok := inAnother(); ok {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		k := newLocker(t, connect(t, addr), redislease.WithTTL(ttl))
		var begun, done sync.WaitGroup
		begun.Add(leases)
		for i := range leases {
			done.Go(func() {
				err := k.TryDo(ctx, key(i), func(ctx context.Context, _ *redislease.Lease) error {
					begun.Done()
					<-ctx.Done()
					return nil
				})
				if err != nil {
					fmt.Println(err)
					os.Exit(1)
				}
			})
		}
		begun.Wait()
		fmt.Println("begun")
		done.Wait()
		fmt.Println("done")
		os.Exit(0)
	}
	for name, sig := range map[string]os.Signal{"terminated": syscall.SIGTERM, "killed": os.Kill} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, redistest.Start(t).Addr())
			p := another(t, w.addr)
			require.Equal(t, "begun", p.line())
			require.NoError(t, p.cmd.Process.Signal(sig))
			if sig != os.Kill {
				require.Equal(t, "done", p.line(), "though the root context is dead")
				for i := range leases {
					require.Empty(t, w.get(key(i)))
				}
				return
			}
			_, err := p.cmd.Process.Wait()
			require.NoError(t, err)
			k := w.locker()
			for i := range leases {
				(&faulty{world: w}).lapses(key(i), ttl)
				l, err := k.TryAcquire(context.Background(), key(i))
				require.NoError(t, err, "nobody has to delete it")
				require.NoError(t, l.Release())
			}
		})
	}
	t.Run("only cancelled", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker()
			ctx, cancel := context.WithCancel(context.Background())
			var held []*redislease.Lease
			for i := range leases {
				l, err := k.TryAcquire(ctx, key(i))
				require.NoError(t, err)
				held = append(held, l)
			}
			cancel()
			time.Sleep(26 * time.Second)
			require.Empty(t, b.sent("renew", 0), "that alone ends renewing")
			for i, l := range held[:leases/2] {
				require.NoError(t, l.Release())
				require.Empty(t, b.get(key(i)))
			}
			time.Sleep(4 * time.Second)
			require.Zero(t, b.operator.DBSize(context.Background()).Val())
		})
	})
}

func TestC67AnEvictedKeyEndsTheLeaseAndIsNotMadeAgain(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	f := newFaulty(t)
	order(t, f.server, "CONFIG", "SET", "maxmemory-policy", "allkeys-random")
	order(t, f.server, "CONFIG", "SET", "maxmemory", "4mb")
	l := acquire(t, f.used(often...), "orders")
	filler := strings.Repeat("x", 32<<10)
	require.Eventually(t, func() bool {
		for i := range 100 {
			require.NoError(t, f.operator.Set(ctx, fmt.Sprint("filler:", i), filler, 0).Err())
		}
		return f.get("orders") == ""
	}, patience, time.Millisecond)
	evicted := time.Now()
	require.ErrorIs(t, ended(t, l), redislease.ErrGone)
	require.NoError(t, f.operator.ConfigSet(ctx, "maxmemory", "0").Err())
	require.LessOrEqual(t, f.proxy.Count(command("renew", "orders").And(func(r faultproxy.Request) bool { return r.At.After(evicted) })), 1,
		"by the first renewal")
	require.ErrorIs(t, l.Release(), redislease.ErrGone)
	require.Empty(t, f.get("orders"))
}

func TestC68AFlushEndsEveryLeaseAndLeavesTheNextHoldersAlone(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		key := func(i int) string { return fmt.Sprint("orders:", i) }
		k, next := w.locker(often...), w.locker()
		apart := newLocker(t, connect(t, w.addr, func(o *redis.Options) { o.DB = 1 }), often...)
		safe := acquire(t, apart, "orders")
		var held []*redislease.Lease
		for i := range 10 {
			held = append(held, acquire(t, k, key(i)))
		}
		require.NoError(t, w.operator.FlushDB(ctx).Err())
		var others []*redislease.Lease
		for i := range held {
			others = append(others, acquire(t, next, key(i)))
		}
		for _, l := range held {
			cause := ended(t, l)
			require.ErrorIs(t, cause, redislease.ErrLost)
			require.NotErrorIs(t, cause, redislease.ErrUnconfirmed, "a renewal has found out")
			require.ErrorIs(t, l.Release(), redislease.ErrLost)
		}
		for i, l := range others {
			require.Equal(t, l.Token(), w.get(key(i)))
			require.LessOrEqual(t, w.pttl(key(i)), 30*time.Second, "the TTL of the others")
			require.NoError(t, l.Err())
		}
		require.NoError(t, safe.Renew(ctx), "in a database of its own")
	})
}

func TestC69WhereverAnAcquisitionIsCutTheKeyHasATTL(t *testing.T) {
	t.Parallel()
	all := newFaulty(t)
	for i, cut := range []faultproxy.Action{faultproxy.ResetBefore(), faultproxy.ResetAfter(), faultproxy.CloseAfter(),
		faultproxy.ResetBefore(), faultproxy.ResetAfter(), faultproxy.CloseAfter()} {
		name := []string{"before", "after", "closed", "fenced before", "fenced after", "fenced closed"}[i]
		var opts []redislease.Option
		if i >= 3 {
			opts = append(opts, redislease.WithFencing())
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := all.beside(t)
			cuts := 0
			for ; ; cuts++ {
				key := fmt.Sprint(name, cuts)
				k := f.locker(redislease.WithTTL(time.Minute))
				rule := f.proxy.On(faultproxy.Command("SET", "EVAL")).Skip(cuts).Times(1).Do(cut)
				l, err := k.TryAcquire(context.Background(), key, opts...)
				if left := f.pttl(key); left != -2 {
					require.Positive(t, left)
					require.LessOrEqual(t, left, time.Minute)
				}
				if left := f.pttl(key + ":fence{" + key + "}"); left != -2 {
					require.Positive(t, left)
				}
				rule.Remove()
				if err == nil {
					require.NoError(t, l.Release())
				}
				if rule.Hits() == 0 {
					break
				}
			}
			require.GreaterOrEqual(t, cuts, 3, "two checks and one that takes the key")
		})
	}
}

func TestC72ALeaseIsMutualExclusionAndNotRunOnce(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		ctx := context.Background()
		a, other := b.locker(redislease.WithFencing()), b.other(redislease.WithFencing())
		var runs, refused int
		var fences []int64
		job := func(_ context.Context, l *redislease.Lease) error {
			runs++
			fences = append(fences, l.Fence())
			err := other.TryDo(ctx, "orders", func(context.Context, *redislease.Lease) error { runs++; return nil })
			require.ErrorIs(t, err, redislease.ErrNotAcquired, "a function whose lease was refused does not run")
			refused++
			time.Sleep(5 * time.Millisecond)
			return nil
		}
		require.NoError(t, a.TryDo(ctx, "orders", job))
		time.Sleep(50 * time.Millisecond)
		require.NoError(t, other.TryDo(ctx, "orders", func(_ context.Context, l *redislease.Lease) error {
			runs++
			fences = append(fences, l.Fence())
			return nil
		}))
		require.Equal(t, 2, runs, "one run after the other")
		require.Greater(t, fences[1], fences[0])
		require.Equal(t, 1, refused)
	})
}

func TestC73EveryAnswerIsReadInBothProtocols(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprint("RESP", protocol), func(t *testing.T) {
			everywhere(t, func(t *testing.T, w *world) {
				ctx := context.Background()
				var lose atomic.Bool // the answers to SET
				client := connect(t, w.addr, func(o *redis.Options) { o.Protocol = protocol })
				k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
					err := client.Process(ctx, cmd)
					if lose.Load() && nameOf(cmd) == "set" {
						cmd.SetErr(errReset)
						return errReset
					}
					return err
				}))
				l := acquire(t, k, "orders")
				refused := func() {
					_, err := k.TryAcquire(ctx, "orders")
					require.ErrorIs(t, err, redislease.ErrNotAcquired)
				}
				refused()
				require.NoError(t, l.Renew(ctx))
				require.NoError(t, l.Release())

				lose.Store(true)
				l = acquire(t, k, "orders")
				require.Equal(t, l.Token(), w.get("orders"), "settled")
				refused()
				lose.Store(false)
				require.NoError(t, w.operator.Del(ctx, "orders").Err())
				require.ErrorIs(t, l.Renew(ctx), redislease.ErrGone)
				l = acquire(t, k, "orders")
				require.NoError(t, w.operator.Set(ctx, "orders", "other", 0).Err())
				require.ErrorIs(t, l.Release(), redislease.ErrTaken)
			})
		})
	}
}

func TestC73AnAnswerOfAnotherTypeIsUnknown(t *testing.T) {
	t.Parallel()
	all := newFaulty(t)
	t.Run("group", func(t *testing.T) {
		for _, reply := range []string{":1", "$1\r\n1", "#t", "+OK", "$1\r\n0", "#f", "_"} {
			t.Run(reply, func(t *testing.T) {
				t.Parallel()
				f := all.beside(t)
				key := t.Name()
				l := acquire(t, f.locker(), key)
				check := func(err error) {
					if reply == ":1" { // the only one that a script gives
						require.NoError(t, err)
						return
					}
					require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
					require.NotErrorIs(t, err, redislease.ErrLost)
				}
				f.proxy.On(command("renew", key)).Times(1).Do(faultproxy.Answer(reply + "\r\n"))
				check(l.Renew(context.Background()))
				require.NoError(t, l.Err())
				f.proxy.On(command("release", key)).Times(1).Do(faultproxy.Answer(reply + "\r\n"))
				check(l.Release())
				require.NoError(t, l.Release())
			})
		}
	})
}
