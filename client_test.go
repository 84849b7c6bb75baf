package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
)

// No option of the user's client can hold up the watchdog, a loss, or Release beyond its bound.
func TestNoOptionOfTheClientHoldsALeaseUp(t *testing.T) {
	t.Parallel()
	for name, configure := range map[string]func(*redis.Options){
		"defaults":                func(*redis.Options) {},
		"no read timeout":         func(o *redis.Options) { o.ReadTimeout = -1 },
		"the context's deadline":  func(o *redis.Options) { o.ContextTimeoutEnabled = true },
		"many retries":            func(o *redis.Options) { o.MaxRetries, o.MaxRetryBackoff = 10, 10*time.Millisecond },
		"no retries":              func(o *redis.Options) { o.MaxRetries = -1 },
		"one connection":          func(o *redis.Options) { o.PoolSize = 1 },
		"the second protocol":     func(o *redis.Options) { o.Protocol = 2 },
		"short timeouts":          func(o *redis.Options) { o.ReadTimeout, o.PoolTimeout = 50*time.Millisecond, 50*time.Millisecond },
		"connections used anyhow": func(o *redis.Options) { o.PoolFIFO = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			k := newLocker(t, f.connect(configure), redislease.WithTTL(time.Second))
			ctx := context.Background()
			l := acquire(t, k, "orders")
			require.NoError(t, l.Renew(ctx))
			_, err := k.TryAcquire(ctx, "orders")
			require.ErrorIs(t, err, redislease.ErrNotAcquired)
			require.NoError(t, l.Release())

			l = acquire(t, k, "orders")
			f.proxy.BlackHole()
			require.ErrorIs(t, ended(t, l), redislease.ErrUnconfirmed)
			require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
			_, err = k.TryAcquire(ctx, "orders")
			require.Error(t, err)
			require.NotErrorIs(t, err, redislease.ErrNotAcquired)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			f.lapses("orders", time.Second)
		})
	}
}

func TestAnExhaustedPoolIsATroubleThatPasses(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		client := connect(t, w.addr, func(o *redis.Options) { o.PoolSize = 2 })
		k := newLocker(t, client, redislease.WithTTL(time.Second))
		l := acquire(t, k, "orders")
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { client.BLPop(ctx, 3*time.Second, "queue") })
		}
		require.ErrorIs(t, ended(t, l), redislease.ErrUnconfirmed)
		begun := time.Now()
		err := l.Release()
		require.ErrorIs(t, err, redislease.ErrUnconfirmed)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "it was not sent, and will not be")
		_, err = k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(50*time.Millisecond))
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		require.Error(t, err)
		require.Less(t, time.Since(begun), patience)
		cancel()
		require.NoError(t, w.operator.RPush(context.Background(), "queue", "x", "y").Err())
		wg.Wait()
		got, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, got.Release())
	})
}

func TestAClosedClientEndsTheLease(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		client := connect(t, w.addr)
		var r record
		k := newLocker(t, client, redislease.WithTTL(400*time.Millisecond), redislease.WithObserver(r.observe))
		var leases []*redislease.Lease
		for i := range 100 {
			l, err := k.TryAcquire(context.Background(), fmt.Sprint("orders:", i))
			require.NoError(t, err)
			leases = append(leases, l)
		}
		held := acquire(t, k, "released")
		require.NoError(t, client.Close())
		require.ErrorIs(t, held.Release(), redis.ErrClosed)
		for _, l := range leases {
			cause := ended(t, l)
			require.ErrorIs(t, cause, redislease.ErrUnconfirmed)
			require.ErrorIs(t, cause, redis.ErrClosed)
			require.ErrorIs(t, l.Release(), redis.ErrClosed)
		}
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redis.ErrClosed)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
	})
}

// hook makes a go-redis hook of a function.
type hook func(next redis.ProcessHook) redis.ProcessHook

func (hook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return h(next)
}
func (hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestHooksThatFailPanicOrRepeat(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		boom := errors.New("boom")
		locker := func(h hook) *redislease.Locker {
			client := connect(t, w.addr)
			client.AddHook(h)
			return newLocker(t, client, redislease.WithTTL(time.Second))
		}
		isSet := func(cmd redis.Cmder) bool { return cmd.Name() == "set" }

		t.Run("an error about a command that was executed", func(t *testing.T) {
			k := locker(func(next redis.ProcessHook) redis.ProcessHook {
				return func(ctx context.Context, cmd redis.Cmder) error {
					if err := next(ctx, cmd); err != nil || !isSet(cmd) {
						return err
					}
					return boom
				}
			})
			l, err := k.TryAcquire(ctx, "executed")
			require.NoError(t, err, "it is settled")
			require.Equal(t, l.Token(), w.get("executed"))
			require.NoError(t, l.Release())
		})
		t.Run("an error instead of a command", func(t *testing.T) {
			k := locker(func(redis.ProcessHook) redis.ProcessHook {
				return func(context.Context, redis.Cmder) error { return boom }
			})
			_, err := k.TryAcquire(ctx, "instead")
			require.ErrorIs(t, err, boom)
			require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "it was never written")
			require.Empty(t, w.get("instead"))
		})
		t.Run("a panic after the command", func(t *testing.T) {
			k := locker(func(next redis.ProcessHook) redis.ProcessHook {
				return func(ctx context.Context, cmd redis.Cmder) error {
					err := next(ctx, cmd)
					if isSet(cmd) {
						panic("a hook")
					}
					return err
				}
			})
			l, err := k.TryAcquire(ctx, "panic")
			require.NoError(t, err)
			require.NoError(t, l.Release())
		})
		t.Run("the command twice", func(t *testing.T) {
			k := locker(func(next redis.ProcessHook) redis.ProcessHook {
				return func(ctx context.Context, cmd redis.Cmder) error {
					_ = next(ctx, cmd)
					return next(ctx, cmd)
				}
			})
			l, err := k.TryAcquire(ctx, "twice")
			require.NoError(t, err, "the second SET says No about a key of our own")
			require.Equal(t, l.Token(), w.get("twice"))
			require.NoError(t, l.Renew(ctx))
			_, err = k.TryAcquire(ctx, "twice")
			require.ErrorIs(t, err, redislease.ErrNotAcquired)
			require.ErrorIs(t, l.Release(), redislease.ErrOutcomeUnknown, "the second DEL finds nothing, the first one may have")
			require.Empty(t, w.get("twice"))
		})
		t.Run("arguments in other words", func(t *testing.T) {
			k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
				args := make([]any, len(cmd.Args()))
				for i, a := range cmd.Args() {
					args[i] = fmt.Sprint(a)
				}
				v, err := w.operator.Do(ctx, args...).Result()
				if c, ok := cmd.(interface{ SetVal(any) }); ok && err == nil {
					c.SetVal(v)
				}
				return err
			}))
			_, err := k.TryAcquire(ctx, "rewritten")
			require.ErrorContains(t, err, "rewrites arguments")
			require.NotErrorIs(t, err, redislease.ErrNotAcquired)
			require.Empty(t, w.get("rewritten"), "found out before a key is taken")
		})
		t.Run("no token is printed", func(t *testing.T) {
			var mu sync.Mutex
			var printed string
			k := locker(func(next redis.ProcessHook) redis.ProcessHook {
				return func(ctx context.Context, cmd redis.Cmder) error {
					mu.Lock()
					printed += fmt.Sprint(cmd.String(), cmd.Args()) + fmt.Sprintf("%v %+v %s %q", cmd, cmd.Args(), cmd.Args(), cmd.Args())
					mu.Unlock()
					return next(ctx, cmd)
				}
			})
			l := acquire(t, k, "printed")
			require.NoError(t, l.Renew(ctx))
			require.NoError(t, l.Release())
			mu.Lock()
			defer mu.Unlock()
			require.Contains(t, printed, "set printed [token] nx px 1000")
			require.NotContains(t, printed, l.Token())
		})
	})
}

func TestARenewalThatTheClientNeverWroteIsNotUnknown(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		busy := func() {
			var n atomic.Int32
			b.fault(func(_ string, execute func() error) error {
				if n.Add(1) == 1 {
					time.Sleep(time.Minute) // waits for a connection
				}
				return execute()
			})
		}
		tired := errors.New("tired of waiting")
		ctx, cancel := context.WithTimeoutCause(context.Background(), time.Second, tired)
		defer cancel()
		busy()
		err := l.Renew(ctx)
		require.ErrorIs(t, err, tired)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.NoError(t, l.Err())

		end := time.Until(l.Until())
		begun := b.now()
		busy()
		err = l.Renew(context.Background())
		require.ErrorContains(t, err, "not sent in time")
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Equal(t, begun+end, b.now(), "it waits for the end that the lease had when it began")
		require.NoError(t, l.Err(), "the watchdog has renewed it meanwhile")
		time.Sleep(2 * time.Minute)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}

func TestHooksSeeTheValuesOfTheCallersContext(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		type key struct{}
		var mu sync.Mutex
		var seen []string
		client := connect(t, w.addr)
		client.AddHook(hook(func(next redis.ProcessHook) redis.ProcessHook {
			return func(ctx context.Context, cmd redis.Cmder) error {
				mu.Lock()
				seen = append(seen, fmt.Sprint(nameOf(cmd), " ", ctx.Value(key{})))
				mu.Unlock()
				return next(ctx, cmd)
			}
		}))
		with := func(v string) context.Context { return context.WithValue(context.Background(), key{}, v) }
		k := newLocker(t, client)
		require.NoError(t, acquire(t, k, "warm").Release())
		seen = nil
		l := acquireIn(t, with("acquiring"), k, "orders")
		require.NoError(t, l.Renew(with("renewing")))
		require.NoError(t, l.Release())
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, []string{"set acquiring", "renew renewing", "release acquiring"}, seen)
	})
}

func TestRepliesOfAnUnexpectedFormAreNoAnswers(t *testing.T) {
	t.Parallel()
	for _, reply := range []string{"+OK\r\n", "$2\r\nhi\r\n", "$-1\r\n", "*0\r\n", "*2\r\n:1\r\n$1\r\n1\r\n", ":7\r\n", ":-2\r\n",
		"*2\r\n:1\r\n:9\r\n", "*2\r\n:2\r\n:0\r\n", "*3\r\n:1\r\n:0\r\n:0\r\n"} {
		t.Run(reply, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			k := f.used(redislease.WithTTL(time.Second))
			f.proxy.On(command("set", "orders")).Do(faultproxy.ResetAfter())
			f.proxy.On(command("settle", "orders")).Times(2).Do(faultproxy.Answer(reply))
			l, err := k.TryAcquire(context.Background(), "orders")
			require.NoError(t, err, "asked again")
			f.proxy.On(command("renew", "orders")).Times(1).Do(faultproxy.Answer(reply))
			require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrOutcomeUnknown)
			require.NoError(t, l.Err())
			f.proxy.On(command("release", "orders")).Times(1).Do(faultproxy.Answer(reply))
			require.ErrorIs(t, l.Release(), redislease.ErrOutcomeUnknown)
			require.NoError(t, l.Release())
			require.Empty(t, f.get("orders"))
		})
	}
}

func TestErrorRepliesThatProveThatNothingWasDone(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"LOADING Redis is loading the dataset in memory", "READONLY You can't write against a read only replica.",
		"NOAUTH Authentication required.", "OOM command not allowed when used memory > 'maxmemory'.", "CLUSTERDOWN The cluster is down",
		"ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write", "NOPERM no"} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			k := f.used(redislease.WithTTL(time.Second))
			f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.AnswerError(text))
			_, err := k.TryAcquire(context.Background(), "orders")
			require.ErrorContains(t, err, text)
			require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
			require.NotErrorIs(t, err, redislease.ErrNotAcquired)
			var reply redis.Error
			require.ErrorAs(t, err, &reply)
			l := acquire(t, k, "orders")
			f.proxy.On(command("release", "orders")).Times(1).Do(faultproxy.AnswerError(text))
			err = l.Release()
			require.ErrorAs(t, err, &reply)
			require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
			require.NotErrorIs(t, err, redislease.ErrLost)
			require.Equal(t, l.Token(), f.get("orders"), "untouched")
			require.NoError(t, l.Release())
		})
	}
}

func TestAUserWithTheLeastRights(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	ctx := context.Background()
	user := func(name string, rights ...any) *redislease.Locker {
		args := append([]any{"acl", "setuser", name, "on", ">secret", "resetchannels", "~app:*", "-@all"}, rights...)
		require.NoError(t, f.operator.Do(ctx, args...).Err())
		return newLocker(t, connect(t, f.addr, func(o *redis.Options) { o.Username, o.Password = name, "secret" }),
			redislease.WithTTL(time.Second), redislease.WithPrefix("app:"))
	}
	k := user("enough", "+set", "+eval", "+get", "+pttl", "+pexpire", "+del")
	l := acquire(t, k, "orders")
	require.NoError(t, l.Renew(ctx))
	_, err := k.Acquire(ctx, "orders", redislease.WithAcquireTimeout(100*time.Millisecond))
	require.ErrorIs(t, err, redislease.ErrNotAcquired)
	require.NoError(t, l.Release())

	for _, missing := range []string{"+set", "+eval", "+get", "+pexpire", "+del"} {
		var rights []any
		for _, r := range []string{"+set", "+eval", "+get", "+pttl", "+pexpire", "+del"} {
			if r != missing {
				rights = append(rights, r)
			}
		}
		_, err := user("without"+missing[1:], rights...).TryAcquire(ctx, "orders")
		require.Error(t, err, missing)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Empty(t, f.get("app:orders"), "found out before a key is taken")
	}
}

// TestTwentyThousandRoundsAroundARenewal releases leases just before, during and after their renewals.
func TestTwentyThousandRoundsAroundARenewal(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		const rounds, workers = 10_000, 100
		const interval = 20 * time.Millisecond
		var mu sync.Mutex
		var failed []redislease.Event
		k := w.locker(redislease.WithTTL(3*time.Second), redislease.WithRenewInterval(interval), redislease.WithObserver(func(_ context.Context, e redislease.Event) {
			if e.Err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = append(failed, e)
			}
		}))
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() {
				key := fmt.Sprint("orders:", i)
				for range rounds / workers {
					l, err := k.TryAcquire(context.Background(), key)
					if err != nil {
						t.Errorf("acquire: %v", err)
						return
					}
					time.Sleep(interval/2 + rand.N(interval))
					if err := l.Release(); err != nil {
						t.Errorf("release: %v", err)
					}
				}
			})
		}
		wg.Wait()
		for i := range workers {
			require.Empty(t, w.get(fmt.Sprint("orders:", i)))
		}
		mu.Lock()
		defer mu.Unlock()
		require.Empty(t, failed)
	})
}

func TestConcurrentReleasesShareOneCommand(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	k := f.used()
	for i := range 100 {
		key := fmt.Sprint("orders:", i)
		l := acquire(t, k, key)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if err := l.Release(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, 1, f.proxy.Count(command("release", key)))
	}
}

// TestALockerWorksThroughAnAutoPipeline has the library's commands written by go-redis' AutoPipeline, which newer
// versions have: it marshals each command twice, once to know its size.
func TestALockerWorksThroughAnAutoPipeline(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		for _, name := range []string{"AutoPipeline", "AsyncAutoPipeline"} {
			method := reflect.ValueOf(connect(t, w.addr)).MethodByName(name)
			if !method.IsValid() || method.Type().NumIn() != 0 {
				t.Skipf("this version of go-redis has no %s", name)
			}
			result := method.Call(nil)
			client, ok := result[0].Interface().(redislease.RedisClient)
			require.True(t, ok)
			if closer, ok := client.(io.Closer); ok {
				t.Cleanup(func() { _ = closer.Close() })
			}
			ctx := context.Background()
			k := newLocker(t, client, redislease.WithTTL(time.Second))
			l, err := k.TryAcquire(ctx, "orders")
			require.NoError(t, err)
			require.Equal(t, l.Token(), w.get("orders"))
			_, err = k.TryAcquire(ctx, "orders")
			require.ErrorIs(t, err, redislease.ErrNotAcquired)
			require.NoError(t, l.Renew(ctx))
			until := l.Until()
			require.Eventually(t, func() bool { return l.Until().After(until) }, patience, time.Millisecond, "the watchdog renews it")
			require.NoError(t, l.Release())
			require.Empty(t, w.get("orders"))
		}
	})
}
