package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// The stories about holding: testdata/stories.md has them all.

// TestC19AReleaseRightAfterTheAcquisitionIsFollowedByNoRenewal has releases, renewals and the ends of contexts fall on the
// same instants. Fewer rounds than in the story do for that.
func TestC19AReleaseRightAfterTheAcquisitionIsFollowedByNoRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const workers, rounds, interval = 10, 60, time.Millisecond
		var r record
		k := b.locker(redislease.WithTTL(time.Second), redislease.WithRenewInterval(interval), redislease.WithObserver(r.observe))
		redislease.SetRandom(k, func() float64 { return 0 })
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() {
				for j := range rounds {
					ctx, cancel := context.WithCancel(context.Background())
					if j%3 == 0 {
						time.AfterFunc(rand.N(3*interval).Truncate(interval), cancel)
					}
					l, err := k.TryAcquire(ctx, fmt.Sprint("orders:", i))
					if err == nil {
						time.Sleep(rand.N(3 * interval).Truncate(interval))
						err = l.Release()
					} else if errors.Is(err, context.Canceled) {
						err = nil
					}
					if err != nil {
						t.Error(err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		n := b.sentAny()
		require.Greater(t, len(b.sent("renew", 0)), workers*rounds/4, "they do meet renewals")
		require.Empty(t, b.operator.Keys(context.Background(), "*").Val())
		time.Sleep(5 * time.Second)
		require.Equal(t, n, b.sentAny())
		require.Empty(t, b.operator.Keys(context.Background(), "*").Val())
		require.NotContains(t, r.kinds(), redislease.EventLost)
	})
}

// litter runs short leases and returns how many of them something still refers to, a goroutine or a timer for one.
func litter(t *testing.T, workers, each int) (left int) {
	k := newLocker(t, agreeable, redislease.WithTTL(20*time.Second), redislease.WithAcquireTimeout(patience))
	leases := make([]weak.Pointer[redislease.Lease], workers*each)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for j := range each {
				l, err := k.TryAcquire(context.Background(), "orders")
				if err != nil {
					t.Error(err)
					return
				}
				leases[i*each+j] = weak.Make(l)
				if j%10 == 0 {
					time.Sleep(rand.N(time.Millisecond))
				}
				if err := l.Release(); errors.Is(err, redislease.ErrLost) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	runtime.GC()
	for _, l := range leases {
		if l.Value() != nil {
			left++
		}
	}
	return left
}

// noMoreGoroutines waits until there are no more of them than before.
func noMoreGoroutines(t *testing.T, before int) {
	t.Helper()
	for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "%d more goroutines than before", runtime.NumGoroutine()-before)
	}
}

// TestC20NothingOfAReleasedLeaseIsLeft runs alone: it counts the goroutines of the process.
func TestC20NothingOfAReleasedLeaseIsLeft(t *testing.T) {
	before := runtime.NumGoroutine()
	const leases = 5000
	left := litter(t, 100, leases/100)
	noMoreGoroutines(t, before)
	require.Less(t, left, leases/50, "the runtime drops stopped timers when there are enough of them")

	t.Run("released when a renewal is due", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker(redislease.WithTTL(20 * time.Second))
			redislease.SetRandom(k, func() float64 { return 0 })
			for range 100 {
				l := b.acquire(k)
				time.Sleep(20 * time.Second / 3)
				require.NoError(t, l.Release())
			}
			over := b.now()
			time.Sleep(time.Hour)
			require.Empty(t, b.sent("renew", over+1))
		})
	})
}

func TestC21WhateverAReleaseFindsTheLeaseIsOver(t *testing.T) {
	ctx := context.Background()
	for name, test := range map[string]struct {
		trouble func(b *bubbled)
		want    error
	}{
		"gone":     {func(b *bubbled) { b.operator.Del(ctx, "orders") }, redislease.ErrGone},
		"taken":    {func(b *bubbled) { b.operator.Set(ctx, "orders", "other", 0) }, redislease.ErrTaken},
		"refused":  {func(b *bubbled) { b.fault(func(string, func() error) error { return errReadonly }) }, errReadonly},
		"reset":    {func(b *bubbled) { b.fault(func(string, func() error) error { return errReset }) }, errReset},
		"no reply": {func(b *bubbled) { b.fault(func(_ string, do func() error) error { _ = do(); return errReset }) }, redislease.ErrOutcomeUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				l := b.acquire(b.locker())
				test.trouble(b)
				err := l.Release()
				require.ErrorIs(t, err, test.want)
				require.Equal(t, name == "gone" || name == "taken", errors.Is(err, redislease.ErrLost))
				require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrReleased)
				b.fault(nil)
				time.Sleep(time.Hour)
				require.Empty(t, b.sent("renew", 0))
				if name == "taken" {
					require.Equal(t, "other", b.get("orders"))
				}
			})
		})
	}
}

// TestC22LeasesCostNothingOnceTheyAreOverAndLittleWhileTheyAreHeld runs alone: it counts the goroutines and the bytes of
// the process. What leaks with each lease shows with far fewer of them than in the story.
func TestC22LeasesCostNothingOnceTheyAreOverAndLittleWhileTheyAreHeld(t *testing.T) {
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // pools live for two
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const short = 10_000
	litter(t, 100, 10)
	goroutines, bytes := runtime.NumGoroutine(), heap()
	left := litter(t, 100, short/100)
	noMoreGoroutines(t, goroutines)
	require.Less(t, left, short/50)
	require.Less(t, (heap()-bytes)/short, int64(100), "bytes for each")

	t.Run("held at the same time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			const held, ttl, hold = 500, 3 * time.Second, 30 * time.Second
			var mu sync.Mutex
			last := map[any]time.Time{}
			var worst time.Duration
			k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
				if nameOf(cmd) == "renew" {
					key := cmd.Args()[3]
					mu.Lock()
					worst = max(worst, time.Since(last[key]))
					last[key] = time.Now()
					mu.Unlock()
				}
				return agreeable(ctx, cmd)
			}), redislease.WithTTL(ttl))
			require.NoError(t, acquire(t, k, "check").Release())
			goroutines := runtime.NumGoroutine()
			leases := make([]*redislease.Lease, held)
			for i := range leases {
				key := fmt.Sprint("orders:", i)
				last[key] = time.Now()
				leases[i] = acquire(t, k, key)
			}
			mu.Lock()
			worst = 0
			mu.Unlock()
			time.Sleep(hold)
			synctest.Wait()
			require.Less(t, runtime.NumGoroutine()-goroutines, held/100, "a timer for each, and no goroutine")
			require.LessOrEqual(t, worst, ttl/3+5*time.Millisecond, "every renewal is on time, or goes out with others")
			for _, l := range leases {
				require.NoError(t, l.Err())
				require.NoError(t, l.Release())
			}
		})
	})
}

// onLine checks that the key of another, which is not renewed, lives for no longer and not for much less than it had left.
func onLine(w *world, key string, left time.Duration) {
	w.Helper()
	now := w.pttl(key)
	require.LessOrEqual(w, now, left)
	require.Greater(w, now, left/2)
}

func TestC23ARenewalThatComesBackFromAPartitionProlongsNothing(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	l := acquireSlowly(t, f.used(redislease.WithAcquireTimeout(patience)), "orders",
		redislease.WithTTL(3*time.Second), redislease.WithRenewInterval(50*time.Millisecond))
	f.proxy.SetRequests(faultproxy.Hold)
	f.proxy.WaitFor(t, command("renew", "orders").And(faultproxy.Not(faultproxy.Forwarded)), patience)
	next := acquireSlowly(t, newLocker(t, f.operator), "orders", redislease.WithTTL(time.Minute), redislease.WithMaxRenewals(0))
	require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed, "its time was over before another could have it")
	require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrLost)
	left := f.pttl("orders")

	f.proxy.SetRequests(faultproxy.Pass)
	f.proxy.WaitForN(t, command("renew", "orders").And(faultproxy.Replied), f.proxy.Count(command("renew", "orders")), patience)
	require.Equal(t, next.Token(), f.get("orders"))
	onLine(f.world, "orders", left)
	require.ErrorIs(t, l.Release(), redislease.ErrLost)
	require.Equal(t, next.Token(), f.get("orders"))
	require.NoError(t, next.Release())
}

func TestC24ARenewalCreatesAndDeletesNothing(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		watched := acquire(t, w.locker(often...), "orders")
		require.NoError(t, w.operator.Del(ctx, "orders").Err())
		require.ErrorIs(t, ended(t, watched), redislease.ErrGone)
		require.Empty(t, w.get("orders"))

		k, other := w.locker(), w.locker()
		l := acquire(t, k, "orders")
		require.NoError(t, w.operator.Del(ctx, "orders").Err())
		require.NoError(t, acquire(t, other, "orders").Release())
		require.ErrorIs(t, l.Renew(ctx), redislease.ErrGone)
		require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrLost)
		require.Empty(t, w.get("orders"))

		l = acquire(t, k, "orders")
		require.NoError(t, w.operator.Del(ctx, "orders").Err())
		next := acquire(t, other, "orders")
		require.ErrorIs(t, l.Renew(ctx), redislease.ErrTaken)
		require.Equal(t, next.Token(), w.get("orders"), "one that is refused deletes nothing")
	})
}

func TestC25AFailedRenewalIsRepeatedAndARefusedOneIsNot(t *testing.T) {
	const ttl, useful = 3 * time.Second, 2700 * time.Millisecond
	down := func(b *bubbled, from, to time.Duration) {
		b.fault(func(_ string, execute func() error) error {
			if now := b.now(); now >= from && now < to {
				return errReset
			}
			return execute()
		})
	}
	t.Run("down for a while", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker(redislease.WithTTL(ttl))
			redislease.SetRandom(k, func() float64 { return 0 })
			begun := b.now()
			l := b.acquire(k)
			down(b, begun+900*time.Millisecond, begun+1600*time.Millisecond)
			time.Sleep(1800 * time.Millisecond)
			tries := b.sent("renew", begun)
			require.Equal(t, begun+time.Second, tries[0])
			require.Greater(t, len(tries), 2, "again before the next interval")
			require.GreaterOrEqual(t, tries[len(tries)-1], begun+1600*time.Millisecond)
			require.Equal(t, b.start.Add(tries[len(tries)-1]+useful), l.Until(), "confirmed within the validity")
			time.Sleep(time.Minute)
			require.NoError(t, l.Err())
			require.NoError(t, l.Release())
		})
	})
	t.Run("down for good", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker(redislease.WithTTL(ttl))
			redislease.SetRandom(k, func() float64 { return 0 })
			begun := b.now()
			l := b.acquire(k)
			down(b, begun+800*time.Millisecond, begun+time.Hour)
			<-l.Context().Done()
			require.Equal(t, begun+useful, b.now(), "with the end of trust, and not earlier")
			require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrLost)
			require.ErrorIs(t, context.Cause(l.Context()), errReset)
		})
	})
	t.Run("a definite No", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			l := b.acquire(b.locker(redislease.WithTTL(ttl)))
			b.operator.Del(context.Background(), "orders")
			<-l.Context().Done()
			tries := b.sent("renew", 0)
			require.Len(t, tries, 1)
			require.Equal(t, tries[0], b.now(), "at once")
			require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrGone)
		})
	})
}

func TestC26WhoWorksUnderTheContextHearsOfEveryLossAndOfNoHiccup(t *testing.T) {
	// worked returns for how long one works who looks only at the context.
	worked := func(b *bubbled, l *redislease.Lease, most time.Duration) time.Duration {
		begun := b.now()
		for b.now() < begun+most {
			select {
			case <-l.Context().Done():
				return b.now() - begun
			case <-time.After(10 * time.Millisecond):
			}
		}
		return most
	}
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl = 3 * time.Second
		k := b.locker(redislease.WithTTL(ttl))
		l := b.acquire(k)
		b.operator.Del(context.Background(), "orders")
		require.LessOrEqual(t, worked(b, l, time.Minute), ttl/3, "one renewal interval")
		cause := context.Cause(l.Context())
		require.ErrorIs(t, cause, redislease.ErrLost)
		require.ErrorIs(t, cause, redislease.ErrGone)
		require.NotErrorIs(t, cause, redislease.ErrUnconfirmed)

		l = b.acquire(k)
		b.fault(func(string, func() error) error { return errReset })
		require.LessOrEqual(t, worked(b, l, time.Minute), ttl)
		cause = context.Cause(l.Context())
		require.ErrorIs(t, cause, redislease.ErrLost)
		require.ErrorIs(t, cause, redislease.ErrUnconfirmed)
		require.NotErrorIs(t, cause, redislease.ErrGone)
		b.fault(nil)
		time.Sleep(ttl)

		l = b.acquire(k)
		var failures atomic.Int32
		b.fault(func(what string, execute func() error) error {
			if what == "renew" && failures.Add(1)%2 == 1 {
				return errReset
			}
			return execute()
		})
		require.Equal(t, time.Minute, worked(b, l, time.Minute), "every other renewal fails")
		require.Greater(t, failures.Load(), int32(50))
		require.NoError(t, l.Err())
		b.fault(nil)
		require.NoError(t, l.Release())
	})
}

func TestC27TheCauseOfTheContextTellsReleaseLossAndTheCallersEndApart(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		type key struct{}
		k := b.locker()
		deadline := time.Now().Add(time.Hour)
		ctx, cancel := context.WithDeadline(context.WithValue(context.Background(), key{}, "v"), deadline)
		defer cancel()
		under := func(ctx context.Context) (l *redislease.Lease, child context.Context) {
			l, err := k.TryAcquire(ctx, "orders", redislease.WithMaxHold(redislease.NoMaxHold))
			require.NoError(t, err)
			child, stop := context.WithCancel(l.Context())
			t.Cleanup(stop)
			require.Equal(t, "v", child.Value(key{}))
			at, ok := child.Deadline()
			require.True(t, ok)
			require.Equal(t, deadline, at)
			return l, child
		}
		ends := func(l *redislease.Lease, child context.Context, want error, others ...error) {
			<-child.Done()
			for _, ctx := range []context.Context{child, l.Context()} {
				require.ErrorIs(t, context.Cause(ctx), want)
				for _, other := range others {
					require.NotErrorIs(t, context.Cause(ctx), other)
				}
			}
		}
		l, child := under(ctx)
		require.NoError(t, l.Release())
		ends(l, child, redislease.ErrReleased, redislease.ErrLost, context.DeadlineExceeded)

		l, child = under(ctx)
		b.operator.Del(context.Background(), "orders")
		ends(l, child, redislease.ErrLost, redislease.ErrReleased, context.Canceled)

		parent, stop := context.WithCancel(ctx)
		l, child = under(parent)
		stop()
		stopped := b.now()
		ends(l, child, context.Canceled, redislease.ErrReleased, redislease.ErrLost)
		time.Sleep(time.Minute)
		require.Empty(t, b.sent("renew", stopped+1), "it is not kept by nobody")
		require.Empty(t, b.get("orders"))
		_ = l.Release()
	})
}

func TestC28ALostLeaseDoesNothingToTheNextOneOfItsKey(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl = time.Second
		k := b.locker(redislease.WithTTL(ttl))
		redislease.SetRandom(k, func() float64 { return 0 })
		var renewals atomic.Int32
		b.fault(func(what string, execute func() error) error {
			if what == "renew" && renewals.Add(1) == 1 {
				time.Sleep(3 * time.Second) // and fails when the next lease exists
				return errReset
			}
			return execute()
		})
		first := b.acquire(k)
		b.operator.Del(context.Background(), "orders")
		<-first.Context().Done()
		second := b.acquire(k)
		begun := b.now()
		for b.now() < begun+10*time.Second {
			time.Sleep(10 * time.Millisecond)
			require.NoError(t, second.Err())
			require.Greater(t, b.operator.PTTL(context.Background(), "orders").Val(), ttl/2)
			require.ErrorIs(t, first.Err(), redislease.ErrGone)
		}
		require.InDelta(t, 30, len(b.sent("renew", begun)), 1, "on schedule")
		require.ErrorIs(t, first.Renew(context.Background()), redislease.ErrGone)
		require.ErrorIs(t, first.Release(), redislease.ErrGone)
		require.Equal(t, second.Token(), b.get("orders"))
		require.NoError(t, second.Release())
	})
}

func TestC29AJobThatHangsKeepsItsKeyForTheLongestHoldAndATTL(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl, hold = time.Second, 3 * time.Second
		k, other := b.locker(redislease.WithTTL(ttl)), b.other()
		redislease.SetRandom(k, func() float64 { return 0 })
		begun := b.now()
		hung := b.acquire(k, redislease.WithMaxHold(hold))
		next, err := other.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.LessOrEqual(t, b.now(), begun+hold+ttl+26*time.Millisecond, "and a tick of the poll")
		require.ErrorIs(t, context.Cause(hung.Context()), redislease.ErrMaxHold)
		require.Empty(t, b.sent("renew", begun+hold))
		require.ErrorIs(t, hung.Release(), redislease.ErrLost)
		require.Equal(t, next.Token(), b.get("orders"))
		require.NoError(t, next.Release())

		endless := b.acquire(k, redislease.WithTTL(10*time.Minute), redislease.WithMaxHold(redislease.NoMaxHold))
		time.Sleep(24 * time.Hour)
		require.NoError(t, endless.Err(), "a limit can be done without")
		require.Equal(t, endless.Token(), b.get("orders"))
		require.NoError(t, endless.Release())
	})
}

func TestC30AWaiterWaitsForTheHolderHoweverLongItsOwnTTL(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl = time.Second
		k := b.locker(redislease.WithTTL(ttl))
		held := b.acquire(k)
		var released atomic.Bool
		begun := b.now()
		time.AfterFunc(5*time.Second, func() {
			released.Store(true)
			if err := held.Release(); err != nil {
				t.Error(err)
			}
		})
		var wg sync.WaitGroup
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			l, err := k.Acquire(ctx, "orders")
			if l != nil || !errors.Is(err, redislease.ErrNotAcquired) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v, %v", l, err)
			}
			if b.now() != begun+2*time.Second {
				t.Error("at", b.now()-begun)
			}
			err = k.Do(ctx, "orders", func(context.Context, *redislease.Lease) error { t.Error("without the lease"); return nil })
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.True(t, released.Load())
		require.NoError(t, l.Release())
		wg.Wait()
	})
}

func TestC31AnIntervalThatLosesTheLeaseIsRefusedAndSlowRenewalsDoNotDrift(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl = 3 * time.Second
		k := b.locker(redislease.WithTTL(ttl))
		for _, interval := range []time.Duration{ttl, ttl + 1, 10 * ttl, ttl / 2, -1} {
			n := b.sentAny()
			_, err := k.TryAcquire(context.Background(), "orders", redislease.WithRenewInterval(interval))
			require.ErrorContains(t, err, fmt.Sprintf("renew interval %v", interval))
			require.Equal(t, n, b.sentAny())
			_, err = redislease.New(b.redis, redislease.WithTTL(ttl), redislease.WithRenewInterval(interval))
			require.ErrorContains(t, err, fmt.Sprintf("renew interval %v", interval))
		}
		for _, interval := range []time.Duration{0, ttl / 3} { // 0 is the default
			begun := b.now()
			l := b.acquire(k, redislease.WithRenewInterval(interval))
			b.fault(func(_ string, execute func() error) error {
				defer time.Sleep(ttl / 4)
				return execute()
			})
			time.Sleep(time.Minute)
			require.NoError(t, l.Err())
			before := begun
			for _, at := range b.sent("renew", begun) {
				require.LessOrEqual(t, at-before, ttl/3, "from send to send")
				before = at
			}
			b.fault(nil)
			require.NoError(t, l.Release())
			time.Sleep(ttl) // for what is on its way
		}
	})
}

// pausedTTL is that of the lease of a process that stands still for longer.
const pausedTTL = time.Second

// pausedHolder starts a process that holds "orders" through the proxy, and stops it until another has the key. It returns
// that other lease.
func (f *faulty) pausedHolder() (*process, *redislease.Lease) {
	p := another(f.T, f.proxy.Addr())
	require.Equal(f, "held", p.line())
	p.signal("STOP")
	return p, acquireSlowly(f, newLocker(f, f.operator), "orders", redislease.WithTTL(time.Minute), redislease.WithMaxRenewals(0))
}

// resume lets the process go on with input that has arrived meanwhile.
func (p *process) resume() {
	p.Helper()
	_, err := p.in.Write([]byte("go on\n"))
	require.NoError(p, err)
	p.signal("CONT")
}

// signal uses a shell, since package syscall does not have these signals everywhere.
func (p *process) signal(name string) {
	p.Helper()
	require.NoError(p, exec.Command("sh", "-c", fmt.Sprintf("kill -%s %d", name, p.cmd.Process.Pid)).Run())
}

// holdOverAPause is what that process does. It returns as soon as it runs again.
func holdOverAPause(t *testing.T, client *redis.Client) *redislease.Lease {
	l := acquireSlowly(t, newLocker(t, client, redislease.WithTTL(pausedTTL)), "orders")
	fmt.Println("held")
	<-told
	return l
}

func TestC32AProcessThatStoodStillFindsOutByItselfAndDisturbsNobody(t *testing.T) {
	if addr, ok := inAnother(); ok {
		l := holdOverAPause(t, connect(t, addr))
		err := l.Err() // the first thing
		<-l.Context().Done()
		fmt.Println(errors.Is(err, redislease.ErrLost), errors.Is(context.Cause(l.Context()), redislease.ErrLost),
			errors.Is(l.Release(), redislease.ErrLost))
		os.Exit(0)
	}
	for _, asks := range []bool{true, false} {
		t.Run(fmt.Sprintf("before its timers run, asks %v", asks), func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				var s redislease.Skew
				k := b.locker()
				redislease.SetSkew(k, &s)
				l := b.acquire(k)
				s.Monotonic.Add(int64(time.Minute))
				s.Suspend(time.Minute)
				if asks {
					require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed)
					require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrUnconfirmed)
				}
				time.Sleep(10 * time.Second) // in which the watchdog looks
				require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrUnconfirmed)
				require.Empty(t, b.sent("renew", 0), "it asks the clock before it sends anything")
				require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
			})
		})
	}
	t.Run("stopped", func(t *testing.T) {
		t.Parallel()
		stoppedHolderDisturbsNobody(newFaulty(t))
	})
}

func stoppedHolderDisturbsNobody(f *faulty) {
	t := f.T
	p, next := f.pausedHolder()
	left := f.pttl("orders")
	renewals := command("renew", "orders").And(func(r faultproxy.Request) bool { return r.Args[len(r.Args)-1] != "0" }) // "0" is refused
	n := f.proxy.Count(renewals)
	p.resume()
	require.Equal(t, "true true true", p.line(), "the clock, the context and the release say that it is lost")
	require.LessOrEqual(t, f.proxy.Count(renewals), n+1, "no burst of renewals: at most one that was on its way")
	require.Equal(t, next.Token(), f.get("orders"))
	onLine(f.world, "orders", left)
	require.NoError(t, next.Renew(context.Background()))
}

func TestC33AProcessThatStoodStillDoesNotWriteIfItAsksFirst(t *testing.T) {
	if addr, ok := inAnother(); ok {
		client := connect(t, addr)
		l := holdOverAPause(t, client)
		if l.Err() == nil {
			require.NoError(t, client.Set(context.Background(), "store", "first", 0).Err())
		}
		fmt.Println("over")
		os.Exit(0)
	}
	t.Parallel()
	f := newFaulty(t)
	p, next := f.pausedHolder()
	require.NoError(t, f.operator.Set(context.Background(), "store", "second", 0).Err())
	p.resume()
	require.Equal(t, "over", p.line())
	require.Equal(t, "second", f.get("store"))
	require.NoError(t, next.Renew(context.Background()))
}

func TestC34ALeaseIsRenewedWhileItsHolderIsBlocked(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl, hold = time.Second, 30 * time.Second
		k := b.locker(redislease.WithTTL(ttl))
		begun := b.now()
		l := b.acquire(k)
		done := make(chan time.Duration)
		go func() {
			least := ttl
			for b.now() < begun+hold-1 {
				least = min(least, b.operator.PTTL(context.Background(), "orders").Val())
				time.Sleep(10 * time.Millisecond)
			}
			done <- least
		}()
		time.Sleep(hold) // one long call
		require.Greater(t, <-done, ttl/2)
		require.NoError(t, l.Err())
		require.Equal(t, l.Token(), b.get("orders"))
		require.NoError(t, l.Release())
	})
}

func TestC35AnExhaustedPoolIsATroubleThatPassesOrALossInTime(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	w := newWorld(t, redistest.Start(t).Addr())
	shared := func(timeout time.Duration) *redis.Client {
		return connect(t, w.addr, func(o *redis.Options) { o.PoolSize, o.PoolTimeout = 2, timeout })
	}
	// block occupies every connection of app until the result is called.
	block := func(app *redis.Client) (free func()) {
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				err := redis.ErrPoolTimeout // or a lease has the connection just now
				for errors.Is(err, redis.ErrPoolTimeout) {
					err = app.BLPop(ctx, 0, "queue").Err()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		t.Cleanup(func() { w.operator.RPush(ctx, "queue", "x", "y") }) // or app cannot be closed
		require.Eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			return app.Ping(ctx).Err() != nil
		}, patience, time.Millisecond)
		return func() {
			require.NoError(t, w.operator.RPush(ctx, "queue", "x", "y").Err())
			wg.Wait()
		}
	}
	var r record
	app := shared(50 * time.Millisecond)
	k := newLocker(t, app, redislease.WithRenewInterval(300*time.Millisecond), redislease.WithObserver(r.observe))
	l := acquire(t, k, "orders")
	own := acquire(t, w.locker(often...), "own")
	free := block(app)
	e := r.wait(t, redislease.EventRenewFailed)
	require.ErrorIs(t, e.Err, redis.ErrPoolTimeout)
	until := l.Until()
	free()
	require.Eventually(t, func() bool { return l.Until().After(until) }, patience, time.Millisecond)
	require.NoError(t, l.Err(), "a trouble that passed")
	require.NoError(t, l.Release())

	app = shared(time.Hour)
	l = acquireSlowly(t, newLocker(t, app), "orders", redislease.WithTTL(2*time.Second))
	free = block(app)
	until = own.Until()
	require.ErrorIs(t, ended(t, l), redislease.ErrUnconfirmed)
	err := l.Release() // and returns, although no connection has become free
	require.ErrorIs(t, err, redislease.ErrLost)
	require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "it was not sent")
	require.Eventually(t, func() bool { return own.Until().After(until) }, patience, time.Millisecond, "a client of its own is not affected")
	require.NoError(t, own.Err())
	require.NoError(t, own.Release())
	free()
}

func TestC36AConnectionThatWasCutWhileIdleLosesNothing(t *testing.T) {
	t.Parallel()
	for name, retries := range map[string]int{"with the client's retries": 0, "without": -1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			ctx := context.Background()
			var r record
			k := newLocker(t, f.connect(func(o *redis.Options) { o.MaxRetries = retries }), redislease.WithObserver(r.observe))
			cut := func() {
				_, err := f.server.Do("CLIENT", "KILL", "TYPE", "normal")
				require.NoError(t, err)
			}
			l := acquireSlowly(t, k, "orders", redislease.WithRenewInterval(500*time.Millisecond))
			cut()
			r.wait(t, redislease.EventRenewed)
			require.NoError(t, l.Err())
			_ = l.Release()

			// What is cut while a command is on its way, the client cannot know.
			l = acquireSlowly(t, k, "asked", redislease.WithTTL(time.Hour))
			f.proxy.On(command("renew", "asked")).Times(1).Do(faultproxy.CloseBefore())
			require.ErrorIs(t, l.Renew(ctx), redislease.ErrOutcomeUnknown)
			require.Eventually(t, func() bool { return l.Renew(ctx) == nil }, patience, time.Millisecond, "on a fresh connection")
			_ = l.Release()

			for i := range 30 {
				key := fmt.Sprint("orders:", i)
				l := acquireSlowly(t, k, key)
				if i%3 == 0 {
					f.proxy.On(command("release", key)).Times(1).Do(faultproxy.CloseBefore())
				} else {
					cut()
				}
				err := l.Release()
				require.NotErrorIs(t, err, redislease.ErrLost, "nobody took it")
				n := f.proxy.Count(command("release", key))
				require.LessOrEqual(t, n, 1, "the client repeats nothing")
				if err == nil {
					require.NotZero(t, i%3)
					require.Empty(t, f.get(key))
				} else if n == 1 {
					require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
				}
			}
		})
	}
}
