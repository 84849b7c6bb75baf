package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"regexp"
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

// Stories about servers, proxies and scripts, about what goes on behind a lease, and about TTLs and clocks: see
// testdata/stories.md.

// order has a server execute a command.
func order(t testing.TB, server *redistest.Server, args ...string) {
	t.Helper()
	_, err := server.Do(args...)
	require.NoError(t, err)
}

// replicate makes a server the replica of another, and returns when it is in step.
func replicate(t testing.TB, replica, master *redistest.Server) {
	t.Helper()
	order(t, master, "CONFIG", "SET", "repl-diskless-sync-delay", "0")
	host, port, err := net.SplitHostPort(master.Addr())
	require.NoError(t, err)
	order(t, replica, "REPLICAOF", host, port)
	require.Eventually(t, func() bool {
		info, err := replica.Do("INFO", "replication")
		text, _ := info.(string)
		return err == nil && strings.Contains(text, "master_link_status:up")
	}, patience, time.Millisecond)
}

// movable returns a client with one connection, dialled to where at points by then.
func movable(t testing.TB, at *atomic.Pointer[redistest.Server]) *redis.Client {
	return connect(t, "moves", func(o *redis.Options) {
		o.PoolSize = 1
		o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", at.Load().Addr())
		}
	})
}

// often renews so often that a test need not wait, under a TTL that no machine is too slow for.
var often = []redislease.LockerOption{redislease.WithTTL(time.Minute), redislease.WithRenewInterval(50 * time.Millisecond)}

// texts returns what the errors of the events of a kind say.
func (r *record) texts(kind redislease.EventKind) (texts string) {
	for _, e := range r.all() {
		if e.Kind == kind && e.Err != nil {
			texts += e.Err.Error() + "\n"
		}
	}
	return texts
}

// beside returns a world at the same server with a proxy of its own.
func (f *faulty) beside(t *testing.T) *faulty {
	return &faulty{world: &world{T: t, addr: f.addr, operator: f.operator}, server: f.server, proxy: faultproxy.Start(t, f.server.Addr())}
}

// renewedTwice waits until two more renewals of the key have been answered, of which the second began after the call.
func (f *faulty) renewedTwice(key string) {
	f.Helper()
	answered := command("renew", key).And(faultproxy.Replied)
	f.proxy.WaitForN(f, answered, f.proxy.Count(answered)+2, patience)
}

// refused tries to acquire a key that another holds, by SET and then by the settling script.
func (f *faulty) refused(k *redislease.Locker, key string) {
	f.Helper()
	lost := f.proxy.On(command("set", key)).Times(1).Do(faultproxy.ResetAfter())
	_, err := k.TryAcquire(context.Background(), key)
	require.ErrorIs(f, err, redislease.ErrNotAcquired)
	require.Equal(f, 1, lost.Hits())
	lost.Remove()
}

// scripts returns the texts of the scripts that a lease is acquired, settled, renewed and released with.
func (f *faulty) scripts() map[string]string {
	f.proxy.On(command("set", "script")).Times(1).Do(faultproxy.ResetAfter())
	l := acquire(f, f.used(), "script")
	require.NoError(f, l.Renew(context.Background()))
	require.NoError(f, l.Release())
	require.NoError(f, acquire(f, f.used(), "script", redislease.WithFencing()).Release())
	texts := map[string]string{}
	for _, r := range f.proxy.Log() {
		switch {
		case r.Name() == "EVAL" && r.Args[2] == "2":
			texts["fence"] = r.Args[1]
		case r.Name() == "EVAL":
			texts[scriptName(r.Args[1])] = r.Args[1]
		}
	}
	require.Len(f, texts, 4)
	return texts
}

func TestC37AServerThatBecomesAReplicaIsNoLossUntilTrustRunsOut(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	f := newFaulty(t)
	next := redistest.Start(t)
	replicate(t, next, f.server)
	var r record
	k := f.used(redislease.WithObserver(r.observe))
	freed := acquire(t, k, "freed")
	held := acquire(t, k, "orders", redislease.WithTTL(3*time.Second), redislease.WithRenewInterval(50*time.Millisecond))
	require.Eventually(t, func() bool { return next.Get("freed") == freed.Token() }, patience, time.Millisecond)

	order(t, next, "REPLICAOF", "NO", "ONE")
	replicate(t, f.server, next)
	cause := ended(t, held)
	require.False(t, time.Now().Before(held.Until()), "not earlier than trust")
	require.ErrorIs(t, cause, redislease.ErrUnconfirmed)
	require.NotErrorIs(t, cause, redislease.ErrGone)
	require.NotErrorIs(t, cause, redislease.ErrTaken)
	require.Eventually(t, func() bool { return strings.Contains(r.texts(renewFailed), "READONLY") }, patience, time.Millisecond)
	require.Less(t, f.proxy.Count(command("renew", "orders")), 80, "no tight loop")

	_, err := k.TryAcquire(ctx, "free")
	require.ErrorContains(t, err, "READONLY")
	require.NotErrorIs(t, err, redislease.ErrNotAcquired)
	err = freed.Release()
	require.ErrorContains(t, err, "READONLY")
	require.NotErrorIs(t, err, redislease.ErrLost)
	require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
	require.Equal(t, freed.Token(), f.get("freed"), "untouched")

	order(t, f.server, "REPLICAOF", "NO", "ONE")
	require.NoError(t, freed.Release())
	require.ErrorIs(t, held.Release(), redislease.ErrUnconfirmed)
	for _, key := range []string{"freed", "orders"} {
		require.NoError(t, acquire(t, k, key).Release())
	}
}

func TestC37ARefusalThatPassesIsNoLoss(t *testing.T) {
	t.Parallel()
	all := newFaulty(t)
	t.Run("group", func(t *testing.T) {
		for _, text := range []string{"READONLY You can't write against a read only replica.", "LOADING Redis is loading the dataset in memory",
			"MASTERDOWN Link with MASTER is down", "CLUSTERDOWN The cluster is down", "MISCONF Errors writing to the AOF file", "BUSY Redis is busy running a script"} {
			code, _, _ := strings.Cut(text, " ")
			t.Run(code, func(t *testing.T) {
				t.Parallel()
				ctx := context.Background()
				f := all.beside(t)
				var r record
				k := f.locker(append(often, redislease.WithObserver(r.observe))...)
				l := acquire(t, k, code)
				refused := f.proxy.On(faultproxy.Command("SET", "EVAL")).Do(faultproxy.AnswerError(text))
				refused.WaitHits(t, 3, patience)
				require.NoError(t, l.Err())
				r.wait(t, renewFailed)
				require.Contains(t, r.texts(renewFailed), text)
				_, err := k.TryAcquire(ctx, "free")
				require.ErrorContains(t, err, text)
				require.NotErrorIs(t, err, redislease.ErrNotAcquired)
				require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
				_, err = k.TryAcquire(ctx, code)
				require.NotErrorIs(t, err, redislease.ErrNotAcquired, "Redis has not said so")
				refused.Remove()
				f.renewedTwice(code)
				require.NoError(t, l.Err())

				f.proxy.On(command("release", code)).Times(1).Do(faultproxy.AnswerError(text))
				err = l.Release()
				require.ErrorContains(t, err, text)
				require.NotErrorIs(t, err, redislease.ErrLost)
				require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
				require.Equal(t, l.Token(), f.get(code), "untouched")
				require.NoError(t, l.Release())
			})
		}
	})
}

func TestC38AFailoverThatLostTheKeyEndsTheLeaseAndLeavesTheNextHolderAlone(t *testing.T) {
	t.Parallel()
	for name, taken := range map[string]bool{"taken": true, "free": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			master, replica := redistest.Start(t), redistest.Start(t)
			replicate(t, replica, master)
			order(t, replica, "REPLICAOF", "127.0.0.1", "1") // the link is cut
			var at atomic.Pointer[redistest.Server]
			at.Store(master)
			l := acquire(t, newLocker(t, movable(t, &at), often...), "orders")
			order(t, replica, "REPLICAOF", "NO", "ONE")
			b := newWorld(t, replica.Addr())
			require.Empty(t, b.get("orders"), "the replica has not seen it")
			reason, value := redislease.ErrGone, ""
			if taken {
				next := acquire(t, b.locker(), "orders")
				reason, value = redislease.ErrTaken, next.Token()
			}
			at.Store(replica)
			master.Kill()
			require.ErrorIs(t, ended(t, l), reason, "at the first renewal there")
			require.ErrorIs(t, l.Release(), reason)
			require.Equal(t, value, b.get("orders"))
			require.ErrorIs(t, l.Renew(ctx), reason)
			require.Equal(t, value, b.get("orders"))
		})
	}
}

func TestC39AFlushedScriptCacheAndAPromotedReplicaGoUnnoticed(t *testing.T) {
	t.Parallel()
	t.Run("flushed", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		l := acquire(t, f.used(often...), "orders")
		order(t, f.server, "SCRIPT", "FLUSH")
		f.renewedTwice("orders")
		require.NoError(t, l.Err())
		order(t, f.server, "SCRIPT", "FLUSH")
		require.NoError(t, l.Release())
		require.Empty(t, f.get("orders"))
		require.Zero(t, f.proxy.Count(faultproxy.Command("EVALSHA", "SCRIPT")), "no cache is relied on")
	})
	t.Run("promoted", func(t *testing.T) {
		t.Parallel()
		master, replica := redistest.Start(t), redistest.Start(t)
		replicate(t, replica, master)
		var at atomic.Pointer[redistest.Server]
		at.Store(master)
		l := acquire(t, newLocker(t, movable(t, &at), often...), "orders")
		require.Eventually(t, func() bool { return replica.Get("orders") == l.Token() }, patience, time.Millisecond)
		order(t, replica, "REPLICAOF", "NO", "ONE")
		order(t, replica, "SCRIPT", "FLUSH")
		at.Store(replica)
		master.Kill()
		require.Eventually(t, func() bool { return l.Renew(context.Background()) == nil }, patience, time.Millisecond)
		require.NoError(t, l.Release())
		require.Empty(t, replica.Get("orders"))
	})
}

func TestC40AProxyHasToLetThroughOnlySETAndEVAL(t *testing.T) {
	t.Parallel()
	all := newFaulty(t)
	for name, sha := range map[string]string{"no EVALSHA": "ERR unknown command 'EVALSHA'", "scripts on other backends": "NOSCRIPT No matching script."} {
		t.Run(name, func(t *testing.T) {
			f := all.beside(t)
			f.proxy.On(faultproxy.Command("SCRIPT", "INFO", "CLUSTER", "COMMAND", "CLIENT", "WAIT", "TIME", "SUBSCRIBE")).
				Do(faultproxy.AnswerError("ERR unknown command"))
			f.proxy.On(faultproxy.Command("EVALSHA")).Do(faultproxy.AnswerError(sha))
			l := acquire(t, f.locker(often...), "orders")
			f.refused(f.locker(), "orders")
			f.renewedTwice("orders")
			require.NoError(t, l.Err())
			require.NoError(t, l.Release())
			require.Empty(t, f.get("orders"))
			for _, r := range f.proxy.Log() {
				require.Contains(t, []string{"SET", "EVAL", "HELLO", "CLIENT"}, r.Name(), "the last two are of go-redis' handshake")
			}
		})
	}
	t.Run("no scripts", func(t *testing.T) {
		f := all.beside(t)
		f.proxy.On(faultproxy.Command("EVAL", "EVALSHA", "SCRIPT")).Do(faultproxy.AnswerError("ERR unknown command 'EVAL'"))
		_, err := f.locker().TryAcquire(context.Background(), "orders")
		require.ErrorContains(t, err, "unknown command")
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.Zero(t, f.proxy.Count(faultproxy.Command("SET")), "found out before a key is taken")
		require.Empty(t, f.get("orders"))
	})
}

func TestC41NoScriptNeedsTheTimeOrChance(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	call := regexp.MustCompile(`redis\.(\w+)\(('\w+')?`)
	for name, text := range f.scripts() {
		for _, found := range call.FindAllStringSubmatch(text, -1) {
			switch found[1] {
			case "call":
				require.Contains(t, []string{"'SET'", "'PEXPIRE'", "'DEL'"}, found[2], name)
			case "pcall":
				if found[2] != "'TIME'" || name != "fence" { // which does without where it is refused
					require.Contains(t, []string{"'GET'", "'PTTL'", "'PUBLISH'"}, found[2], name)
				}
			default:
				require.Equal(t, "error_reply", found[1], name)
			}
		}
		require.NotContains(t, text, "math.random")
		require.NotContains(t, text, "os.")
	}
	order(t, f.server, "ACL", "SETUSER", "app", "on", ">p", "~*", "+@all", "-time", "-randomkey", "-script")
	k := newLocker(t, f.connect(func(o *redis.Options) { o.Username, o.Password = "app", "p" }))
	for _, opts := range [][]redislease.Option{nil, {redislease.WithFencing()}} {
		l := acquire(t, k, "orders", opts...)
		f.refused(k, "orders")
		require.NoError(t, l.Renew(context.Background()))
		require.NoError(t, l.Release())
	}
}

func TestC41AnErrorIsKnownByItsCodeWhateverItsWording(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	k := f.used()
	for _, text := range []string{"READONLY", "READONLY In the words of another version.", "NOPERM in new words",
		"ERR Error running script (call to f_0): @user_script:9: @user_script: 9: -MISCONF in new words", "ERR f_0: BUSY in new words"} {
		l := acquire(t, k, "orders")
		f.proxy.On(command("release", "orders")).Times(1).Do(faultproxy.AnswerError(text))
		err := l.Release()
		require.ErrorContains(t, err, text)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "certainly not executed")
		require.NoError(t, l.Release())
	}
}

func TestC42EveryKeyThatAScriptTouchesIsDeclared(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	call := regexp.MustCompile(`redis\.p?call\('\w+', ?([^,)]+)`)
	for name, text := range f.scripts() {
		touched := call.FindAllStringSubmatch(text, -1)
		require.NotEmpty(t, touched)
		for _, found := range touched {
			switch {
			case name == "fence" && found[1] == "KEYS[2]":
			case strings.Contains(found[0], "PUBLISH"):
				require.Equal(t, "KEYS[1]..':released'", found[1], "a channel is no key")
			default:
				require.Equal(t, "KEYS[1]", found[1], name)
			}
		}
	}
	for _, r := range f.proxy.Log() {
		if r.Name() == "EVAL" && r.Args[2] != "1" {
			require.Equal(t, []string{"2", "script", "script:fence{script}"}, r.Args[2:5], "the lock's key and its fence's")
		}
	}
	// A server that refuses every other key.
	order(t, f.server, "ACL", "SETUSER", "app", "on", ">p", "~orders", "+@all")
	k := newLocker(t, f.connect(func(o *redis.Options) { o.Username, o.Password = "app", "p" }))
	l := acquire(t, k, "orders")
	f.refused(k, "orders")
	require.NoError(t, l.Renew(context.Background()))
	require.NoError(t, l.Release())
	_, err := k.TryAcquire(context.Background(), "others")
	require.ErrorContains(t, err, "NOPERM")
	_, err = k.TryAcquire(context.Background(), "orders", redislease.WithFencing())
	require.ErrorContains(t, err, "NOPERM", "the fence has a key of its own")
	require.Empty(t, f.get("orders"))
	order(t, f.server, "ACL", "SETUSER", "app", "~orders:fence{orders}")
	require.NoError(t, acquire(t, k, "orders", redislease.WithFencing()).Release())
}

func TestC43EveryNameIsOneKeyTakenLiterally(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		names := []string{"job", "{job}", "a{b}c", "{}x", "x}{y", "{", "}", "{{a}}", " ", "\x00", "\r\n", "*", "ключ"}
		told := len(names)
		for range 1000 {
			name := make([]byte, 1+rand.IntN(12))
			for i := range name {
				name[i] = "{}ab:\xff"[rand.IntN(6)]
			}
			names = append(names, string(name))
		}
		var mu sync.Mutex
		var keys []any
		k := newLocker(t, clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
			mu.Lock()
			defer mu.Unlock()
			if args := cmd.Args(); nameOf(cmd) == "set" {
				keys = append(keys, args[1])
			} else {
				require.Equal(t, "1", args[2], "one key, and so one slot")
				keys = append(keys, args[3])
			}
			return b.redis.Process(ctx, cmd)
		}))
		b.locker() // so that it does not matter which name the checks are about
		for i, name := range names {
			mu.Lock()
			keys = nil
			mu.Unlock()
			l, err := k.TryAcquire(context.Background(), name)
			require.NoError(t, err)
			require.Equal(t, l.Token(), b.get(name))
			if i < told {
				_, err = k.Acquire(context.Background(), name, redislease.WithAcquireTimeout(50*time.Millisecond))
				require.ErrorIs(t, err, redislease.ErrNotAcquired)
				require.NoError(t, l.Renew(context.Background()))
			}
			require.NoError(t, l.Release())
			for _, key := range keys {
				require.Equal(t, name, key)
			}
			require.Zero(t, b.operator.DBSize(context.Background()).Val(), "and no companion")
		}
	})
}

func TestC45AUserWithoutEVALSHAWorksAndOneWithoutScriptsTakesNothing(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	ctx := context.Background()
	user := func(name string, rights ...string) *redislease.Locker {
		order(t, f.server, append([]string{"ACL", "SETUSER", name, "on", ">p", "~*"}, rights...)...)
		return newLocker(t, f.connect(func(o *redis.Options) { o.Username, o.Password = name, "p" }), often...)
	}
	k := user("scripts", "+set", "+get", "+pexpire", "+del", "+eval")
	l := acquire(t, k, "orders")
	f.renewedTwice("orders")
	require.NoError(t, l.Err())
	f.refused(k, "orders")
	require.NoError(t, l.Release())
	require.Zero(t, f.proxy.Count(faultproxy.Command("EVALSHA")))

	_, err := user("plain", "+set").TryAcquire(ctx, "orders")
	require.ErrorContains(t, err, "NOPERM")
	require.NotErrorIs(t, err, redislease.ErrNotAcquired)
	require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
	require.Empty(t, f.get("orders"))

	_, err = user("nothing-in-scripts", "+set", "+eval").TryAcquire(ctx, "orders")
	require.ErrorContains(t, err, "can't run this command", "that is how it reads out of a script")
	require.NotErrorIs(t, err, redislease.ErrNotAcquired)
	require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
	require.Empty(t, f.get("orders"))
}

func TestC46RepliesThatComeInABurstAreFollowedByOneRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(3*time.Second), redislease.WithRenewInterval(500*time.Millisecond))
		l := b.acquire(k)
		stalled := make(chan struct{})
		b.fault(func(_ string, execute func() error) error { err := execute(); <-stalled; return err })
		for range 25 {
			time.Sleep(100 * time.Millisecond)
			require.LessOrEqual(t, redislease.InFlight(l), 3)
		}
		require.Len(t, b.sent("renew", 0), 3)
		burst := b.now()
		b.fault(nil)
		close(stalled)
		time.Sleep(500*time.Millisecond*7/8 - 500*time.Millisecond/64 - 1) // the earliest that another one is due
		require.Equal(t, []time.Duration{burst}, b.sent("renew", burst))
		time.Sleep(time.Minute)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}

func TestC47WhateverTheClientDoesToARenewalTheLeaseEndsInTime(t *testing.T) {
	for name, spoil := range map[string]func(cmd redis.Cmder){
		"a hook panics": func(redis.Cmder) { panic("a hook") },
		"a string":      func(cmd redis.Cmder) { cmd.(interface{ SetVal(any) }).SetVal("OK") },
		"a number":      func(cmd redis.Cmder) { cmd.(interface{ SetVal(any) }).SetVal(int64(2)) },
		"a bool":        func(cmd redis.Cmder) { cmd.(interface{ SetVal(any) }).SetVal(true) },
		"an array":      func(cmd redis.Cmder) { cmd.(interface{ SetVal(any) }).SetVal([]any{int64(1)}) },
		"nil":           func(cmd redis.Cmder) { cmd.(interface{ SetVal(any) }).SetVal(nil) },
		"redis.Nil":     func(cmd redis.Cmder) { cmd.SetErr(redis.Nil) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				var r record
				k := b.locker(redislease.WithObserver(r.observe))
				b.redis.AddHook(hook(func(next redis.ProcessHook) redis.ProcessHook {
					return func(ctx context.Context, cmd redis.Cmder) error {
						err := next(ctx, cmd)
						if nameOf(cmd) == "renew" {
							spoil(cmd)
						}
						return errors.Join(err, cmd.Err())
					}
				}))
				sentAt := b.now()
				l := b.acquire(k)
				<-l.Context().Done()
				require.Equal(t, sentAt+27*time.Second, b.now())
				cause := context.Cause(l.Context())
				require.ErrorIs(t, cause, redislease.ErrUnconfirmed)
				require.NotErrorIs(t, cause, redislease.ErrGone)
				var loss *redislease.LostError
				require.ErrorAs(t, cause, &loss)
				require.Error(t, loss.Err)
				require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
				require.Contains(t, r.kinds(), renewFailed)
				require.NotContains(t, r.kinds(), renewed)
			})
		})
	}
}

func TestC48TwoReleasesAtOnceSendOneCommand(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var current atomic.Pointer[redislease.Lease]
		k := b.locker(redislease.WithObserver(func(_ context.Context, e redislease.Event) {
			if e.Kind == lost || e.Kind == released {
				_ = current.Load().Release()
			}
		}))
		for i := range 1000 {
			l := b.acquire(k)
			current.Store(l)
			var want error
			if i%2 == 1 {
				b.operator.Del(context.Background(), "orders")
				want = redislease.ErrGone
			}
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() {
					if err := l.Release(); !errors.Is(err, want) {
						t.Errorf("%v, want %v", err, want)
					}
				})
			}
			wg.Wait()
			require.ErrorIs(t, l.Release(), want)
		}
		require.Len(t, b.sent("release", 0), 1000)

		current.Store(b.acquire(k))
		b.operator.Del(context.Background(), "orders")
		<-current.Load().Context().Done()
		synctest.Wait() // the observer releases it, too
		require.ErrorIs(t, current.Load().Release(), redislease.ErrGone)
		require.Len(t, b.sent("release", 0), 1000, "Redis has said it all")
	})
}

func TestC49AChildProcessHoldsNothing(t *testing.T) {
	const ttl, envChild = 3 * time.Second, "REDISLEASE_TEST_CHILD"
	if addr, ok := inAnother(); ok {
		client := connect(t, addr)
		if os.Getenv(envChild) == "" {
			acquire(t, newLocker(t, client, redislease.WithTTL(ttl)), "orders")
			child := exec.Command(os.Args[0], os.Args[1:]...)
			child.Env = append(os.Environ(), envChild+"=1")
			child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
			require.NoError(t, child.Start())
			select {}
		}
		require.Equal(t, int64(1), client.Exists(context.Background(), "orders").Val())
		fmt.Println("begun")
		for client.Exists(context.Background(), "orders").Val() != 0 {
			time.Sleep(time.Millisecond)
		}
		fmt.Println("lapsed")
		select {}
	}
	t.Parallel()
	w := newWorld(t, redistest.Start(t).Addr())
	holder := another(t, w.addr)
	require.Equal(t, "begun", holder.line())
	require.NoError(t, holder.cmd.Process.Kill())
	_, err := holder.cmd.Process.Wait() // that of cmd would close the output
	require.NoError(t, err)
	(&faulty{world: w}).lapses("orders", ttl)
	require.Equal(t, "lapsed", holder.line(), "under the eyes of the child")
}

func TestC50TheTTLInRedisIsTheOneAskedForToTheMillisecond(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0 })
		pttl := func() time.Duration { return b.operator.PTTL(context.Background(), "orders").Val() }
		for _, ttl := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, 999 * time.Millisecond, time.Second,
			1500 * time.Millisecond, 2*time.Second + 1} {
			want := ttl.Truncate(time.Millisecond)
			begun := b.now()
			l := b.acquire(k, redislease.WithTTL(ttl))
			require.Equal(t, want, pttl())
			time.Sleep(want / 3)
			synctest.Wait()
			renewals := b.sent("renew", begun+1)
			require.Len(t, renewals, 1)
			passed := b.now() - renewals[0] + time.Millisecond - 1
			require.Equal(t, want, pttl()+passed.Truncate(time.Millisecond), "the watchdog's renewal")
			time.Sleep(want / 10)
			require.NoError(t, l.Renew(context.Background()))
			require.Equal(t, want, pttl())
			require.NoError(t, l.Release())
		}
		begun := b.now()
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithTTL(time.Millisecond))
		require.ErrorContains(t, err, "TTL 1ms is below the least, 100ms")
		require.Empty(t, b.sent("set", begun+1))
	})
}

func TestC51ATTLInAWrongUnitIsRefusedOrHonouredExactly(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker()
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithTTL(30))
		require.ErrorContains(t, err, "TTL 30ns is below the least, 100ms")
		require.Empty(t, w.get("orders"))

		const years = 30 * time.Hour * 24 * 365
		l := acquire(t, k, "orders", redislease.WithTTL(years))
		require.InDelta(t, years, w.pttl("orders"), float64(time.Minute))
		require.NoError(t, w.operator.PExpire(context.Background(), "orders", time.Minute).Err())
		require.NoError(t, l.Renew(context.Background()))
		require.InDelta(t, years, w.pttl("orders"), float64(time.Minute), "in the same unit")
		require.NoError(t, l.Release())
	})
}

func TestC52AFractionOfAMillisecondIsRoundedDownOnTheWireAndInTrust(t *testing.T) {
	const ttl = 1500*time.Millisecond + 700*time.Microsecond
	t.Run("on the wire", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		k := f.used(redislease.WithTTL(ttl))
		_, err := k.TryAcquire(context.Background(), "orders", redislease.WithTTL(1500*time.Microsecond))
		require.ErrorContains(t, err, "TTL 1.5ms is below the least")
		f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.ResetBefore())
		l := acquire(t, k, "orders")
		_ = l.Renew(context.Background())
		var seen int
		for _, r := range f.proxy.Log() {
			for _, what := range []string{"set", "settle", "renew"} {
				if command(what, "orders")(r) {
					require.Equal(t, "1500", r.Args[len(r.Args)-1], what)
					seen++
				}
			}
		}
		require.GreaterOrEqual(t, seen, 3)
	})
	t.Run("in trust", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			l := b.acquire(b.locker(), redislease.WithTTL(ttl))
			require.Equal(t, time.Now().Add(1500*time.Millisecond-150*time.Millisecond), l.Until())
			require.NoError(t, l.Release())
		})
	})
	t.Run("refused by the server", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker()
			refusal := redisError("ERR value is not an integer or out of range")
			b.fault(func(_ string, execute func() error) error { _ = execute(); return refusal })
			_, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Second))
			require.ErrorIs(t, err, refusal)
			require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		})
	})
}

func TestC53OptionsAtTheirExtremesMakeNoHotLoop(t *testing.T) {
	for _, ttl := range []time.Duration{100 * time.Millisecond, 100 * 365 * 24 * time.Hour, math.MaxInt64} {
		t.Run(ttl.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				ctx := context.Background()
				for _, backoff := range []time.Duration{math.MinInt64, 0, math.MaxInt64} {
					k := b.locker(redislease.WithTTL(ttl), redislease.WithRenewInterval(0), redislease.WithMaxHold(redislease.NoMaxHold),
						redislease.WithMaxRenewals(3_000_000), redislease.WithAcquireTimeout(math.MaxInt64),
						redislease.WithBackoff(func(int) time.Duration { return backoff }))
					l := b.acquire(k)
					begun := b.now()
					_, err := k.Acquire(ctx, "orders", redislease.WithAcquireTimeout(50*time.Millisecond))
					require.ErrorIs(t, err, redislease.ErrNotAcquired)
					require.Equal(t, begun+50*time.Millisecond, b.now())
					require.LessOrEqual(t, len(b.sent("settle", begun)), 50)
					b.fault(func(string, func() error) error { return errReset })
					time.Sleep(50 * time.Millisecond)
					b.fault(nil)
					time.Sleep(time.Second)
					require.NoError(t, l.Err())
					require.True(t, l.Until().After(time.Now()))
					require.LessOrEqual(t, len(b.sent("renew", begun)), 100)
					require.NoError(t, l.Release())
					require.Empty(t, b.get("orders"))
				}
			})
		})
	}
}

func TestC54NoTTLAndNoIntervalMakesATickerPanic(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		for _, opt := range []redislease.Option{redislease.WithTTL(1), redislease.WithTTL(2), redislease.WithTTL(3), redislease.WithTTL(time.Millisecond),
			redislease.WithTTL(0), redislease.WithTTL(-1), redislease.WithRenewInterval(-1), redislease.WithRenewInterval(1)} {
			_, err := k.TryAcquire(context.Background(), "orders", opt)
			require.ErrorContains(t, err, "is below the least")
		}
		require.Empty(t, b.sent("set", 0))
		for interval, least := range map[time.Duration]time.Duration{0: 100 * time.Millisecond / 3, time.Millisecond: time.Millisecond} {
			begun := b.now()
			l := b.acquire(k, redislease.WithTTL(100*time.Millisecond), redislease.WithRenewInterval(interval))
			time.Sleep(time.Second)
			require.NoError(t, l.Err())
			last, gap := begun, least/2-least/64
			for _, at := range b.sent("renew", begun+1) {
				require.GreaterOrEqual(t, at-last, gap)
				last, gap = at, least*7/8-least/64
			}
			require.NoError(t, l.Release())
		}
	})
}

func TestC55AStepOfTheClientsClockChangesNeitherALeaseNorAWait(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker(redislease.WithTTL(3 * time.Second))
		redislease.SetSkew(k, &s)
		redislease.SetRandom(k, func() float64 { return 0 })
		begun := b.now()
		l := b.acquire(k)
		for _, step := range []time.Duration{time.Hour, -time.Hour, -time.Hour, time.Hour} {
			s.Wall.Add(int64(step))
			time.Sleep(2300 * time.Millisecond)
			require.NoError(t, l.Err())
		}
		last := begun
		for _, at := range b.sent("renew", begun) {
			require.Equal(t, time.Second, at-last, "on schedule")
			last = at
		}
		b.fault(func(string, func() error) error { return errReset })
		s.Wall.Add(-int64(time.Hour))
		<-l.Context().Done()
		require.Equal(t, last+2700*time.Millisecond, b.now(), "no extra life")
		b.fault(nil)
		require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)

		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		for _, step := range []time.Duration{time.Hour, -time.Hour} {
			for _, bounded := range []bool{true, false} {
				begun := b.now()
				time.AfterFunc(time.Second, func() { s.Wall.Add(int64(step)) })
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
				var opts []redislease.Option
				if bounded {
					cancel()
					ctx, cancel = context.Background(), func() {}
					opts = append(opts, redislease.WithAcquireTimeout(3*time.Second))
				}
				_, err := k.Acquire(ctx, "orders", opts...)
				cancel()
				require.ErrorIs(t, err, redislease.ErrNotAcquired)
				require.Equal(t, begun+3*time.Second, b.now())
			}
		}
	})
}

func TestC56AStepOfTheServersClockIsFoundOutOrMadeGoodByTheNextRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		ctx := context.Background()
		k := b.locker(redislease.WithTTL(10 * time.Second))
		l := b.acquire(k)
		time.Sleep(time.Second)
		require.NoError(t, b.operator.PExpire(ctx, "orders", time.Millisecond).Err())
		begun := b.now()
		<-l.Context().Done()
		require.LessOrEqual(t, b.now()-begun, 10*time.Second/3)
		require.ErrorIs(t, l.Err(), redislease.ErrGone)
		require.True(t, l.Until().After(time.Now()), "no deadline that was remembered counts against a No")
		require.Empty(t, b.get("orders"))

		l = b.acquire(k)
		require.NoError(t, b.operator.PExpire(ctx, "orders", time.Hour).Err())
		time.Sleep(10 * time.Second / 3)
		synctest.Wait()
		require.LessOrEqual(t, b.operator.PTTL(ctx, "orders").Val(), 10*time.Second)
		require.NoError(t, b.operator.PExpire(ctx, "orders", time.Hour).Err())
		require.NoError(t, l.Release())
		require.Empty(t, b.get("orders"))
	})
}
