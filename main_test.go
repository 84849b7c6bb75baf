package redislease_test

import (
	"bytes"
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// TestMain checks that no goroutine is left. A command that was left behind ends when go-redis gives it up, which may
// be a while after its test, and a subscription a second after its last waiter.
func TestMain(m *testing.M) { goleak.VerifyTestMain(patient{m}) }

type patient struct{ *testing.M }

func (p patient) Run() int {
	code := p.M.Run()
	stacks := make([]byte, 16<<20)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		n := runtime.Stack(stacks, true)
		if !bytes.Contains(stacks[:n], []byte("redislease.(*command).run")) && !bytes.Contains(stacks[:n], []byte("redislease.(*hub).")) &&
			!bytes.Contains(stacks[:n], []byte("redislease.(*reader).")) &&
			!bytes.Contains(stacks[:n], []byte("redislease.pipeline.run")) {
			break
		}
	}
	return code
}

// patience is how long a test waits for what has to happen. It is no assertion about speed.
const patience = 20 * time.Second

// everywhere runs a test on miniredis and on a real server.
func everywhere(t *testing.T, test func(t *testing.T, w *world)) {
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		m := miniredis.RunT(t)
		m.ClockTTL(true) // keys expire by themselves
		test(t, newWorld(t, m.Addr()))
	})
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		test(t, newWorld(t, redistest.Start(t).Addr()))
	})
}

// world is a server with an operator's client, which is not the library's.
type world struct {
	*testing.T
	addr     string
	operator *redis.Client
}

func newWorld(t *testing.T, addr string) *world {
	return &world{T: t, addr: addr, operator: connect(t, addr)}
}

// connect returns a client with go-redis' defaults, as changed by configure.
func connect(t testing.TB, addr string, configure ...func(*redis.Options)) *redis.Client {
	o := &redis.Options{Addr: addr}
	for _, f := range configure {
		f(o)
	}
	client := redis.NewClient(o)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// locker returns a Locker on a client of its own.
func (w *world) locker(opts ...redislease.LockerOption) *redislease.Locker {
	return newLocker(w.T, connect(w.T, w.addr), opts...)
}

func newLocker(t testing.TB, client redislease.RedisClient, opts ...redislease.LockerOption) *redislease.Locker {
	t.Helper()
	k, err := redislease.New(client, opts...)
	require.NoError(t, err)
	return k
}

// acquire acquires the key, and releases it when the test ends.
func acquire(t testing.TB, k *redislease.Locker, key string, opts ...redislease.Option) *redislease.Lease {
	t.Helper()
	return acquireIn(t, context.Background(), k, key, opts...)
}

func acquireIn(t testing.TB, ctx context.Context, k *redislease.Locker, key string, opts ...redislease.Option) *redislease.Lease {
	t.Helper()
	l, err := k.TryAcquire(ctx, key, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Release() })
	return l
}

// get returns what the key holds, and "" if it is absent.
func (w *world) get(key string) string {
	v, err := w.operator.Get(context.Background(), key).Result()
	if err != redis.Nil {
		require.NoError(w, err)
	}
	return v
}

func (w *world) pttl(key string) time.Duration {
	d, err := w.operator.PTTL(context.Background(), key).Result()
	require.NoError(w, err)
	return d
}

// ended waits for the lease's context and returns its cause.
func ended(t testing.TB, l *redislease.Lease) error {
	t.Helper()
	select {
	case <-l.Context().Done():
	case <-time.After(patience):
		require.FailNow(t, "the lease's context has not ended")
	}
	return context.Cause(l.Context())
}

// record collects events.
type record struct {
	mu     sync.Mutex
	events []redislease.Event
}

func (r *record) observe(_ context.Context, e redislease.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *record) all() []redislease.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]redislease.Event(nil), r.events...)
}

// kinds returns the kinds of the events, without those to leave out.
func (r *record) kinds(without ...redislease.EventKind) (kinds []redislease.EventKind) {
next:
	for _, e := range r.all() {
		for _, k := range without {
			if e.Kind == k {
				continue next
			}
		}
		kinds = append(kinds, e.Kind)
	}
	return kinds
}

// last waits for an event of the kind and returns it.
func (r *record) wait(t testing.TB, kind redislease.EventKind) (found redislease.Event) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, e := range r.all() {
			if e.Kind == kind {
				found = e
				return true
			}
		}
		return false
	}, patience, time.Millisecond, "no event %q", kind)
	return found
}
