package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// ordersFence is where the fence of the key "orders" is kept.
const ordersFence = "orders:fence{orders}"

// kept returns the fence that Redis keeps for the key "orders".
func (w *world) kept() int64 {
	w.Helper()
	n, err := strconv.ParseInt(w.get(ordersFence), 10, 64)
	require.NoError(w, err)
	return n
}

func TestEachLeaseHasAGreaterFence(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		before := time.Now()
		last := int64(0)
		lockers := []*redislease.Locker{w.locker(redislease.WithFencing()), w.locker(), w.locker(redislease.WithFencing())}
		for i := range 30 {
			l := acquire(t, lockers[i%3], "orders", redislease.WithFencing())
			require.Greater(t, l.Fence(), last)
			last = l.Fence()
			require.Equal(t, last, w.kept(), "to the last digit")
			require.InDelta(t, 7*24*time.Hour+30*time.Second, w.pttl(ordersFence), float64(time.Minute))
			require.NoError(t, l.Renew(context.Background()))
			require.Equal(t, last, l.Fence(), "a renewal does not change it")
			require.Equal(t, last, w.kept())
			require.NoError(t, l.Release())
			require.Equal(t, last, l.Fence(), "nor does the end")
		}
		require.WithinRange(t, time.UnixMicro(last), before.Add(-time.Second), time.Now().Add(time.Second), "it is the time, in µs")
	})
}

func TestWithoutFencingAFenceFailsEveryCheck(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		l := acquire(t, w.locker(), "orders")
		require.Equal(t, int64(-1), l.Fence())
		require.Empty(t, w.get(ordersFence))
		require.Equal(t, int64(-1), (*redislease.Lease)(nil).Fence())
		require.Equal(t, int64(-1), new(redislease.Lease).Fence())
	})
}

func TestARefusedAcquisitionDrawsNoFence(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		l := acquire(t, w.locker(), "orders", redislease.WithFencing())
		other := w.locker(redislease.WithFencing())
		for range 3 {
			_, err := other.TryAcquire(context.Background(), "orders")
			require.EqualError(t, err, `redislease: acquire "orders": held by another`)
		}
		_, err := other.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(100*time.Millisecond))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Equal(t, l.Fence(), w.kept())
	})
}

func TestFencesGrowAlthoughTheKeptOneIsLost(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		for name, lose := range map[string]func(){
			"flushed": func() { w.operator.FlushAll(ctx) },
			"deleted": func() { w.operator.Del(ctx, ordersFence) },
			"expired": func() {
				w.operator.PExpire(ctx, ordersFence, time.Millisecond)
				require.Eventually(t, func() bool { return w.get(ordersFence) == "" }, patience, time.Millisecond)
			},
		} {
			last := int64(0)
			for range 5 {
				for _, k := range []*redislease.Locker{w.locker(), w.locker()} {
					l := acquire(t, k, "orders", redislease.WithFencing())
					require.Greater(t, l.Fence(), last, name)
					last = l.Fence()
					require.NoError(t, l.Release())
					lose()
				}
			}
		}
	})
}

func TestFencesOfManyClientsGrowInTheOrderOfTheirLeases(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		var order []int64 // guarded by the lease
		var wg sync.WaitGroup
		for range 8 {
			k := w.locker(redislease.WithFencing(), redislease.WithBackoff(func(int) time.Duration { return time.Millisecond }))
			wg.Go(func() {
				for range 125 {
					err := k.Do(context.Background(), "orders", func(_ context.Context, l *redislease.Lease) error {
						order = append(order, l.Fence())
						return nil
					})
					require.NoError(t, err)
				}
			})
		}
		wg.Wait()
		require.Len(t, order, 1000)
		for i := 1; i < len(order); i++ {
			require.Greater(t, order[i], order[i-1])
		}
		require.Equal(t, order[999], w.kept())
	})
}

func TestAFenceThatIsNoNumberLeavesNoLock(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		k := w.locker(redislease.WithFencing())
		for _, bad := range []string{"", "abc", "1.5", "1e3", " 5", "5 ", "0x10", "--1", "-", "9007199254740992", "9007199254740993",
			"1" + strings.Repeat("0", 400)} {
			w.operator.Set(ctx, ordersFence, bad, 0)
			l, err := k.TryAcquire(ctx, "orders")
			require.Nil(t, l, bad)
			require.ErrorContains(t, err, "FENCE what is kept as the latest fence is no integer below 9007199254740992", bad)
			require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, bad)
			var reply redis.Error
			require.ErrorAs(t, err, &reply, bad)
			require.Empty(t, w.get("orders"), bad)
			require.Equal(t, bad, w.get(ordersFence), "it is left as it is")
		}
		w.operator.Del(ctx, ordersFence)
		w.operator.LPush(ctx, ordersFence, "a list")
		_, err := k.TryAcquire(ctx, "orders")
		require.ErrorContains(t, err, "FENCE")
		require.Empty(t, w.get("orders"))
	})
}

func TestAFenceThatWasPutThereGoesOn(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		k := w.locker(redislease.WithFencing())
		fenceAfter := func(kept string) int64 {
			w.operator.Set(ctx, ordersFence, kept, 0)
			l := acquire(t, k, "orders")
			require.NoError(t, l.Release())
			require.Equal(t, l.Fence(), w.kept())
			return l.Fence()
		}
		for _, small := range []string{"0", "-5", "7", "-9007199254740993"} {
			require.Greater(t, fenceAfter(small), time.Now().Add(-time.Hour).UnixMicro(), small)
		}
		require.Equal(t, int64(9007199254740991), fenceAfter("9007199254740990"))
		_, err := k.TryAcquire(ctx, "orders")
		require.ErrorContains(t, err, "FENCE no fence is left below 9007199254740992")
		require.Empty(t, w.get("orders"))

		l := acquire(t, k, "invoices")
		require.Less(t, l.Fence(), time.Now().Add(time.Hour).UnixMicro(), "what was put under one key is no other's")
	})
}

// clocked is a miniredis whose clock a test sets.
func clocked(t *testing.T) (*miniredis.Miniredis, *world) {
	m := miniredis.RunT(t)
	return m, newWorld(t, m.Addr())
}

func TestAClockThatIsSetBackTakesNoFenceBack(t *testing.T) {
	m, w := clocked(t)
	now := time.Now()
	m.SetTime(now)
	k := w.locker(redislease.WithFencing())
	once := func(k *redislease.Locker) int64 {
		l := acquire(t, k, "orders")
		require.NoError(t, l.Release())
		return l.Fence()
	}
	first := once(k)
	require.Equal(t, now.UnixMicro(), first)
	m.SetTime(now.Add(-time.Hour))
	fresh := w.locker(redislease.WithFencing())
	require.Equal(t, first+1, once(fresh), "the number is kept")
	require.Equal(t, first+2, once(k))
	m.FlushAll()
	require.Equal(t, first+3, once(k), "this Locker has seen a greater one")
	m.SetTime(now.Add(time.Hour))
	require.Equal(t, now.Add(time.Hour).UnixMicro(), once(k))
	m.SetTime(now)
	require.Equal(t, now.Add(time.Hour).UnixMicro()+1, once(k))

	m.FlushAll()
	require.Equal(t, now.UnixMicro(), once(w.locker(redislease.WithFencing())),
		"the number is lost, the clock is behind, and nobody here has seen a greater one: it falls back, as documented")
}

func TestWhereTIMEIsRefusedTheCallersClockStandsIn(t *testing.T) {
	s := redistest.Start(t)
	_, err := s.Do("ACL", "SETUSER", "default", "-time")
	require.NoError(t, err)
	w := newWorld(t, s.Addr())
	last := time.Now().UnixMicro() - 1
	for range 3 {
		l := acquire(t, w.locker(redislease.WithFencing()), "orders")
		require.Greater(t, l.Fence(), last)
		require.LessOrEqual(t, l.Fence(), time.Now().UnixMicro())
		last = l.Fence()
		require.NoError(t, l.Release())
		w.operator.Del(context.Background(), ordersFence)
	}
}

func TestTheFenceOfASettledAcquisitionIsTheOneThatWasDrawn(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithFencing(), redislease.WithTTL(10*time.Second))
		for lost := range 4 {
			time.Sleep(time.Second)
			n := 0
			b.fault(func(what string, execute func() error) error {
				if what != "settle" || n == lost {
					return execute()
				}
				n++
				_ = execute()
				return errReset
			})
			begun := b.now()
			l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second))
			require.NoError(t, err)
			require.Len(t, b.sent("settle", begun), lost+1)
			require.Equal(t, b.get("orders"), l.Token())
			require.Equal(t, b.get(ordersFence), strconv.FormatInt(l.Fence(), 10), "one was drawn, and the lease has it")
			require.NoError(t, l.Release())
		}
	})
}

func TestALateReplyHasTheFenceOfItsOwnGrant(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithFencing(), redislease.WithTTL(10*time.Second))
		n := 0
		b.fault(func(what string, execute func() error) error {
			if what == "settle" {
				if n++; n == 1 {
					defer time.Sleep(2 * time.Second)
				} else {
					return errReset
				}
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(5*time.Second))
		require.NoError(t, err)
		require.Equal(t, b.get("orders"), l.Token())
		require.Equal(t, b.get(ordersFence), strconv.FormatInt(l.Fence(), 10))
		require.NoError(t, l.Release())
	})
}

func TestAGrantWhoseFenceIsGoneIsGivenBack(t *testing.T) {
	for name, spoil := range map[string]func(*redis.Client){
		"deleted":    func(c *redis.Client) { c.Del(context.Background(), ordersFence) },
		"no integer": func(c *redis.Client) { c.Set(context.Background(), ordersFence, "spoilt", 0) },
		"below 1":    func(c *redis.Client) { c.Set(context.Background(), ordersFence, "0", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.locker(redislease.WithFencing())
				lose := func() {
					n := 0
					b.fault(func(what string, execute func() error) error {
						if what != "settle" || n > 0 {
							return execute()
						}
						n++
						_ = execute()
						spoil(b.operator)
						return errReset
					})
				}
				lose()
				begun := b.now()
				_, err := k.TryAcquire(context.Background(), "orders")
				require.EqualError(t, err, `redislease: acquire "orders": granted, but its fence is gone or unreadable, and given back`)
				require.Len(t, b.sent("release", begun), 1)
				require.Empty(t, b.get("orders"))

				b.operator.Del(context.Background(), ordersFence)
				time.Sleep(time.Second)
				lose()
				begun = b.now()
				l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Minute))
				if name == "no integer" {
					require.ErrorContains(t, err, "FENCE")
					require.Empty(t, b.get("orders"))
					return
				}
				require.NoError(t, err)
				require.Len(t, b.sent("release", begun), 1)
				require.Equal(t, b.get(ordersFence), strconv.FormatInt(l.Fence(), 10), "it has drawn another")
				require.NoError(t, l.Release())
			})
		})
	}
}

func TestC70AKeyLeavesOneNumberBehindForAWeek(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		const keys = 200
		k := w.locker(redislease.WithFencing())
		for range 3 {
			for i := range keys {
				require.NoError(t, acquire(t, k, fmt.Sprint("job:", i)).Release())
			}
		}
		left, err := w.operator.Keys(context.Background(), "*").Result()
		require.NoError(t, err)
		require.Len(t, left, keys)
		for _, key := range left {
			require.Regexp(t, `^(job:\d+):fence\{job:\d+\}$`, key)
			require.InDelta(t, 7*24*time.Hour, w.pttl(key), float64(2*time.Minute))
		}
	})
}

func TestEventsCarryTheFence(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		var r record
		k := w.locker(redislease.WithObserver(r.observe))
		l := acquire(t, k, "orders", redislease.WithFencing())
		require.NoError(t, l.Renew(context.Background()))
		r.wait(t, renewed) // its event is not waited for by the call
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.NoError(t, l.Release())
		require.NoError(t, acquire(t, k, "orders").Release())
		var fences []int64
		for _, e := range r.all() {
			fences = append(fences, e.Fence)
		}
		require.Equal(t, []int64{l.Fence(), l.Fence(), -1, l.Fence(), -1, -1}, fences)
	})
}

func TestOnlyAKeyWhoseFenceIsInItsSlotCanHaveOne(t *testing.T) {
	s := redistest.Start(t, "--cluster-enabled", "yes")
	slot := func(key string) int64 {
		n, err := s.Do("CLUSTER", "KEYSLOT", key)
		require.NoError(t, err)
		return n.(int64)
	}
	for key, fence := range map[string]string{
		"job": "job:fence{job}", "{job}": "{job}:fence", "a{b}c": "a{b}c:fence", "a{b}{c}": "a{b}{c}:fence", "a{{b}": "a{{b}:fence",
		"a:fence{a}": "a:fence{a}:fence", "a{b}}": "a{b}}:fence", "\x00\r\n ü": "\x00\r\n ü:fence{\x00\r\n ü}",
		"{}x": "", "x}{y": "", "foo}": "", "a{b": "", "}": "", "{": "", "{}": "", "{}{a}": "", "a}{b}": "a}{b}:fence",
	} {
		c := &recorder{}
		_, err := newLocker(t, c).TryAcquire(context.Background(), key, redislease.WithFencing())
		if fence == "" {
			require.ErrorContains(t, err, fmt.Sprintf("a lease of %q can have no fence", key))
			require.Empty(t, c.keys)
			continue
		}
		require.ErrorIs(t, err, errRecorded)
		require.Equal(t, slot(key), slot(fence))
		require.Equal(t, slot(key), slotOf(key), "the test's own function is right, too")
		require.Contains(t, c.keys, []string{key, fence})
	}
}

var errRecorded = redisError("READONLY recorded")

// recorder is a client that refuses everything but the checks of the scripts, and keeps the keys of each script.
type recorder struct {
	mu   sync.Mutex
	keys [][]string
}

func (c *recorder) Process(_ context.Context, cmd redis.Cmder) error {
	for _, arg := range cmd.Args() {
		if m, ok := arg.(interface{ MarshalBinary() ([]byte, error) }); ok {
			_, _ = m.MarshalBinary() // as if it was written
		}
	}
	if what := nameOf(cmd); what == "renew" || what == "release" {
		reply(cmd, int64(0))
		return nil
	}
	var keys []string
	n, _ := strconv.Atoi(cmd.Args()[2].(string))
	for _, key := range cmd.Args()[3 : 3+n] {
		keys = append(keys, key.(string))
	}
	c.mu.Lock()
	c.keys = append(c.keys, keys)
	c.mu.Unlock()
	cmd.SetErr(errRecorded)
	return errRecorded
}

func reply(cmd redis.Cmder, v any) {
	cmd.(interface{ SetVal(any) }).SetVal(v)
}

// slotOf is the slot of a key in a cluster, by the specification.
func slotOf(key string) int64 {
	if i := strings.IndexByte(key, '{'); i >= 0 {
		if j := strings.IndexByte(key[i+1:], '}'); j > 0 {
			key = key[i+1 : i+1+j]
		}
	}
	crc := uint16(0)
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if carry := crc&0x8000 != 0; carry {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int64(crc % 16384)
}

// FuzzFenceKey: whatever the key, either it is refused and nothing is sent, or the fence's key begins with it, shares its
// slot, and is no other key's.
func FuzzFenceKey(f *testing.F) {
	for _, key := range []string{"job", "{job}", "a{b}c", "{}x", "x}{y", "foo}", "a{b", "a:fence{a}", "\x00"} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		c := &recorder{}
		_, err := newLocker(t, c).TryAcquire(context.Background(), key, redislease.WithFencing())
		if !errors.Is(err, errRecorded) {
			require.Empty(t, c.keys)
			return
		}
		for _, keys := range c.keys {
			require.Len(t, keys, 2)
			require.Equal(t, key, keys[0])
			fence := keys[1]
			require.True(t, strings.HasPrefix(fence, key))
			require.NotEqual(t, key, fence)
			require.Equal(t, slotOf(key), slotOf(fence))
			whose := strings.TrimSuffix(fence, ":fence")
			if whose == fence {
				whose, _, _ = strings.Cut(fence, ":fence{")
				require.Equal(t, fence, whose+":fence{"+whose+"}")
			}
			require.Equal(t, key, whose, "it can be told from the fence's key alone")
		}
	})
}
