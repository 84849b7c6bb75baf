package redislease_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// The tests here put a proxy between a real server and a go-redis client with its defaults.

// faulty is a world whose Lockers reach the server through a proxy.
type faulty struct {
	*world
	server *redistest.Server
	proxy  *faultproxy.Proxy

	shared      bool // see hold
	connections int  // see warm
}

func newFaulty(t *testing.T) *faulty {
	server := redistest.Start(t)
	return &faulty{world: newWorld(t, server.Addr()), server: server, proxy: faultproxy.Start(t, server.Addr())}
}

// connect returns a client that reaches the server through the proxy.
func (f *faulty) connect(configure ...func(*redis.Options)) *redis.Client {
	client := connect(f, f.proxy.Addr(), configure...)
	// go-redis' Close takes the deadline off a read that is under way and then waits for it, which is for ever on a
	// silent connection. Cleanups run last to first.
	f.Cleanup(f.proxy.Close)
	return client
}

// locker returns a Locker on a client of its own that reaches the server through the proxy.
func (f *faulty) locker(opts ...redislease.LockerOption) *redislease.Locker {
	return newLocker(f, f.connect(), opts...)
}

// used returns a Locker that has run its checks already, on a warm connection.
func (f *faulty) used(opts ...redislease.LockerOption) *redislease.Locker {
	k := f.locker(opts...)
	l, err := k.TryAcquire(context.Background(), "warm")
	require.NoError(f, err)
	require.NoError(f, l.Release())
	return k
}

// command matches one of the library's commands, about the key.
func command(what, key string) faultproxy.Matcher {
	return func(r faultproxy.Request) bool {
		switch {
		case r.Name() == "SET":
			return what == "set" && r.Args[1] == key
		case r.Name() == "EVAL":
			return what == scriptName(r.Args[1]) && r.Args[3] == key
		default:
			return false
		}
	}
}

// lapses checks that the key is gone within one TTL and that nothing gives it a longer life.
func (f *faulty) lapses(key string, ttl time.Duration) {
	f.Helper()
	var before time.Duration
	require.Eventually(f, func() bool {
		now := f.pttl(key)
		if before > 0 && now > before {
			f.Errorf("%s was renewed: from %v to %v", key, before, now)
		}
		before = now
		return now == -2
	}, ttl+patience, 5*time.Millisecond)
}

// trusted checks that a lease is not trusted for longer than its key lives.
func (f *faulty) trusted(l *redislease.Lease, key string) {
	f.Helper()
	left := f.pttl(key)
	require.Positive(f, left, "the key of a held lease exists")
	require.False(f, l.Until().After(time.Now().Add(left)), "trust ends before the key can expire")
}

func TestAnAcquisitionThatLosesAReplyInAnyWayAtAnyStep(t *testing.T) {
	t.Parallel()
	const ttl = time.Second
	ways := map[string][]faultproxy.Action{
		"closed before it arrived":  {faultproxy.CloseBefore()},
		"reset before it arrived":   {faultproxy.ResetBefore()},
		"request lost":              {faultproxy.DropRequest()},
		"closed after it arrived":   {faultproxy.CloseAfter()},
		"reset after it arrived":    {faultproxy.ResetAfter()},
		"reply lost":                {faultproxy.DropReply()},
		"reply late":                {faultproxy.DelayReply(ttl / 4)},
		"reply too late":            {faultproxy.DelayReply(2 * ttl)},
		"request late":              {faultproxy.DelayRequest(ttl / 4)},
		"request too late":          {faultproxy.DelayRequest(2 * ttl)},
		"request late, then closed": {faultproxy.DelayRequest(ttl / 2), faultproxy.CloseAfter()},
	}
	f := newFaulty(t)
	_, err := f.server.Do("CONFIG", "SET", "notify-keyspace-events", "K$")
	require.NoError(t, err)
	t.Run("group", func(t *testing.T) {
		for _, step := range []string{"renew", "release", "set", "settle", "all"} {
			for way, actions := range ways {
				for name, opts := range map[string][]redislease.LockerOption{"": nil, " with a fence": {redislease.WithFencing()}} {
					t.Run(step+" "+way+name, func(t *testing.T) {
						t.Parallel()
						f := &faulty{world: &world{T: t, addr: f.addr, operator: f.operator}, server: f.server, proxy: faultproxy.Start(t, f.server.Addr())}
						f.loseOne(step, ttl, actions, opts)
					})
				}
			}
		}
	})
}

// loseOne loses a reply of the step; to lose one of the settling script there has to be something to settle.
func (f *faulty) loseOne(step string, ttl time.Duration, actions []faultproxy.Action, opts []redislease.LockerOption) {
	key := f.Name()
	sets := f.sets(key, key+":fence{"+key+"}")
	if fenced := len(opts) > 0; fenced {
		defer func() {
			grants, draws := sets()
			require.Equal(f, grants, draws, "one number for each grant")
		}()
	}
	switch step {
	case "set":
		f.proxy.On(takes(key)).Times(1).Do(actions...)
	case "all":
		f.proxy.On(faultproxy.Command("SET", "EVAL")).Do(actions...)
	case "settle":
		f.proxy.On(takes(key)).Times(1).Do(faultproxy.ResetAfter())
		f.proxy.On(command("settle", key)).Times(1).Do(actions...)
	default:
		f.proxy.On(command(step, key)).Times(1).Do(actions...)
	}
	k := f.locker(append(opts, redislease.WithTTL(ttl))...)
	l, err := k.TryAcquire(context.Background(), key)
	if err == nil {
		f.trusted(l, key)
		if len(opts) > 0 {
			require.Equal(f, f.get(key+":fence{"+key+"}"), strconv.FormatInt(l.Fence(), 10))
		}
		require.Equal(f, l.Token(), f.get(key))
		f.proxy.Clear()
		require.NoError(f, l.Release())
		f.lapses(key, ttl)
		return
	}
	require.NotErrorIs(f, err, redislease.ErrNotAcquired, "nobody else has it")
	require.Equal(f, "all", step, "one lost reply does not keep a Try from its lease: %v", err)
	f.lapses(key, ttl)
	f.proxy.Clear()
	f.lapses(key, 3*ttl)
}

// takes matches the first command that may take the key.
func takes(key string) faultproxy.Matcher {
	set, settle := command("set", key), command("settle", key)
	return func(r faultproxy.Request) bool { return set(r) || settle(r) }
}

// sets counts how often two keys are set from now on.
func (f *faulty) sets(keys ...string) func() (first, second int) {
	const keyspace = "__keyspace@0__:"
	sub := f.operator.Subscribe(context.Background(), keyspace+keys[0], keyspace+keys[1], f.Name())
	f.Cleanup(func() { _ = sub.Close() })
	for range 3 {
		_, err := sub.Receive(context.Background())
		require.NoError(f, err)
	}
	return func() (first, second int) {
		require.NoError(f, f.operator.Publish(context.Background(), f.Name(), "that was all").Err())
		for {
			m, err := sub.ReceiveMessage(context.Background())
			require.NoError(f, err)
			switch m.Channel {
			case keyspace + keys[0]:
				first++
			case keyspace + keys[1]:
				second++
			default:
				return first, second
			}
		}
	}
}

func TestASetThatExecutesLateHarmsNobody(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	t.Run("while its lease is held", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		k := f.used(redislease.WithTTL(ttl))
		late := f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.HoldRequest())
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err, "the settling script took it")
		late.Release()
		f.proxy.WaitFor(t, command("set", "orders").And(faultproxy.Replied), patience)
		require.Equal(t, l.Token(), f.get("orders"))
		require.NoError(t, l.Renew(context.Background()))
		require.NoError(t, l.Release())
	})
	t.Run("after the release", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		k := f.used(redislease.WithTTL(ttl))
		late := f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.HoldRequest())
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
		late.Release()
		f.proxy.WaitForN(t, command("release", "orders").And(faultproxy.Replied), 2, patience)
		require.Empty(t, f.get("orders"), "its Yes was answered by giving the key back")
		require.Equal(t, 2, f.proxy.Count(command("release", "orders")), "once for each token")
	})
	t.Run("under another holder", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		k := f.used(redislease.WithTTL(ttl))
		late := f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.HoldRequest())
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
		require.NoError(t, f.operator.Set(context.Background(), "orders", "other", time.Minute).Err())
		late.Release()
		f.proxy.WaitFor(t, command("set", "orders").And(faultproxy.Replied), patience)
		require.Equal(t, "other", f.get("orders"))
		require.Greater(t, f.pttl("orders"), 50*time.Second)
	})
	t.Run("when nobody listens any more", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		client := f.connect(func(o *redis.Options) { o.ReadTimeout = 500 * time.Millisecond })
		k := newLocker(t, client, redislease.WithTTL(ttl))
		require.NoError(t, acquire(t, k, "warm").Release())
		late := f.proxy.On(command("set", "orders")).Times(1).Do(faultproxy.HoldRequest())
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		require.NoError(t, l.Release())
		require.NoError(t, f.operator.Set(context.Background(), "orders", "other", time.Second).Err(), "another comes and goes")
		time.Sleep(time.Second) // past the client's timeout, and the other's TTL
		require.Eventually(t, func() bool { return f.get("orders") == "" }, patience, time.Millisecond)
		late.Release()
		f.proxy.WaitFor(t, command("set", "orders").And(faultproxy.Replied), patience)
		f.lapses("orders", ttl)
		require.Zero(t, f.proxy.Count(command("renew", "orders")))
	})
}

func TestC59AReleaseWhoseReplyIsLostIsSentOnce(t *testing.T) {
	t.Parallel()
	for name, action := range map[string]faultproxy.Action{
		"closed": faultproxy.CloseAfter(), "reset": faultproxy.ResetAfter(), "silent": faultproxy.DropReply(),
		"request lost": faultproxy.DropRequest(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			var r record
			k := f.used(redislease.WithTTL(time.Second), redislease.WithObserver(r.observe))
			l := acquire(t, k, "orders")
			f.proxy.On(command("release", "orders")).Times(1).Do(action)
			err := l.Release()
			require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
			require.NotErrorIs(t, err, redislease.ErrLost)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 1, f.proxy.Count(command("release", "orders")))
			e := r.all()[len(r.all())-1]
			require.Equal(t, redislease.EventReleased, e.Kind)
			require.ErrorIs(t, e.Err, redislease.ErrOutcomeUnknown)
			f.lapses("orders", time.Second)
			require.Equal(t, 1, f.proxy.Count(command("release", "orders")), "the library never sends a second one by itself")

			next := acquire(t, k, "orders")
			require.NoError(t, l.Release(), "another call may; the key is not ours any more")
			require.NoError(t, l.Release())
			require.Equal(t, 2, f.proxy.Count(command("release", "orders")))
			require.Equal(t, next.Token(), f.get("orders"))
		})
	}
}

func TestARenewalInFlightAtReleaseNeitherRevivesTheKeyNorIsALoss(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	var r record
	k := f.used(redislease.WithTTL(time.Second), redislease.WithObserver(r.observe))
	for _, action := range []faultproxy.Action{faultproxy.HoldRequest(), faultproxy.HoldReply()} {
		l := acquire(t, k, "orders")
		late := f.proxy.On(command("renew", "orders")).Do(action)
		late.WaitHits(t, 1, patience)
		require.NoError(t, l.Release())
		late.Release()
		late.Remove()
		n := f.proxy.Count(command("renew", "orders"))
		f.proxy.WaitForN(t, command("renew", "orders").And(faultproxy.Replied), n, patience)
		require.Empty(t, f.get("orders"))
		require.ErrorIs(t, l.Err(), redislease.ErrReleased)
	}
	require.NotContains(t, r.kinds(), redislease.EventLost)
}

func TestAConnectionThatComesTooLateTakesNothing(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	k := f.used()
	f.proxy.CloseConns()
	handshake := f.proxy.On(faultproxy.Command("HELLO")).Do(faultproxy.HoldReply())
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		handshake.WaitHits(t, 1, patience)
		cancel()
	}()
	_, err := k.TryAcquire(ctx, "orders")
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "nothing was sent, and nothing will be")
	handshake.Release()
	f.proxy.Clear()
	require.NoError(t, acquire(t, k, "later").Release(), "the connection is of use to others")
	for _, r := range f.proxy.Log() {
		if command("set", "orders")(r) {
			require.Equal(t, "0", r.Args[len(r.Args)-1], "what nobody wants any more is refused")
		}
	}
	require.Empty(t, f.get("orders"))
}

// flushed is a client that sends each command together with another one of the application's.
type flushed struct {
	*redis.Client
	mu     sync.Mutex
	before func()
	failed error
}

func (f *flushed) Process(ctx context.Context, cmd redis.Cmder) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	pipe := f.Pipeline()
	first := pipe.Incr(context.Background(), "counter")
	_ = pipe.Process(ctx, cmd)
	last := pipe.Incr(context.Background(), "counter")
	f.before()
	_, _ = pipe.Exec(context.Background())
	f.failed = errors.Join(f.failed, first.Err(), last.Err())
	return cmd.Err()
}

func TestAWithdrawnCommandHarmsNoOtherInTheSameFlush(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		client := &flushed{Client: connect(t, w.addr), before: func() {}}
		k := newLocker(t, client)
		require.NoError(t, acquire(t, k, "orders").Release())
		n, err := w.operator.Get(context.Background(), "counter").Int()
		require.NoError(t, err)
		require.Equal(t, 2*4, n)

		ctx, cancel := context.WithCancel(context.Background())
		client.before = cancel
		_, err = k.TryAcquire(ctx, "orders")
		require.ErrorIs(t, err, context.Canceled)
		require.Eventually(t, func() bool {
			n, _ := w.operator.Get(context.Background(), "counter").Int()
			return n == 2*5
		}, patience, time.Millisecond)
		require.Empty(t, w.get("orders"))
		client.mu.Lock()
		defer client.mu.Unlock()
		require.NoError(t, client.failed)
	})
}
