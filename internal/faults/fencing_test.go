package faults_test

import (
	"bufio"
	"context"
	"encoding"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// Fences over whatever loses the number that Redis keeps, or moves the clock that stands in for it. Few of these tests
// are about time: a lease lives for a minute here, and is over when it is released.

const (
	fencedTTL = time.Minute

	orders      = "orders"
	ordersFence = "orders:fence{orders}" // where the latest fence of orders is kept
)

// fencing returns a Locker whose leases have fences.
func (r *round) fencing(client redislease.RedisClient, opts ...redislease.LockerOption) *redislease.Locker {
	r.Helper()
	k, err := redislease.New(client, append([]redislease.LockerOption{redislease.WithTTL(fencedTTL),
		redislease.WithAcquireTimeout(patience), redislease.WithFencing()}, opts...)...)
	require.NoError(r, err)
	return k
}

// do has a server execute a command, which must succeed.
func (r *round) do(s *redistest.Server, args ...string) any {
	r.Helper()
	reply, err := s.Do(args...)
	require.NoError(r, err, "%v", args)
	return reply
}

// refused checks that err is Redis' own error with the code, and none of the library's.
func (r *round) refused(err error, code string) {
	r.Helper()
	var reply redis.Error
	require.ErrorAs(r, err, &reply)
	require.Contains(r, reply.Error(), code)
	require.Equal(r, "other", reasonOf(err), "neither held by another nor unknown: %v", err)
}

// fences are those of one key, which have to grow whoever acquires it.
type fences struct {
	r      *round
	client redislease.RedisClient
	old    *redislease.Locker // has been there from the start
	last   int64
}

func (r *round) fences(client redislease.RedisClient) *fences {
	r.Helper()
	return &fences{r: r, client: client, old: r.fencing(client)}
}

// take acquires the key.
func (f *fences) take(k *redislease.Locker) *redislease.Lease {
	f.r.Helper()
	l, err := k.Acquire(context.Background(), orders)
	require.NoError(f.r, err)
	require.Greater(f.r, l.Fence(), f.last)
	f.last = l.Fence()
	return l
}

// pass acquires the key and releases it, in turns with a Locker that has seen nothing and with one that has seen all.
func (f *fences) pass(fresh bool) {
	f.r.Helper()
	for range 4 {
		k := f.old
		if fresh {
			k = f.r.fencing(f.client)
		}
		require.NoError(f.r, f.take(k).Release())
		fresh = !fresh
	}
}

// over has leases before and after a fault, and holds one while it happens.
func (f *fences) over(fresh bool, fault func()) {
	f.r.Helper()
	f.pass(fresh)
	held := f.take(f.old)
	fence := held.Fence()
	fault()
	if err := held.Release(); err != nil {
		require.ErrorIs(f.r, err, redislease.ErrLost)
	}
	f.pass(fresh)
	require.Equal(f.r, fence, held.Fence())
}

// eachFresh runs a test in which a fresh Locker is the first to acquire after the fault, and one in which the Locker is
// that has seen all fences before.
func eachFresh(t *testing.T, name string, fault func(r *round, fresh bool)) {
	for _, fresh := range []bool{true, false} {
		who := "then the same Locker"
		if fresh {
			who = "then a fresh Locker"
		}
		t.Run(name+", "+who, func(t *testing.T) {
			rounds(t, func(r *round) { fault(r, fresh) })
		})
	}
}

// A server that loses the last fence goes on with greater ones, since time has gone on.
func TestFencesGrowAlthoughTheLastOneIsLost(t *testing.T) {
	for _, loss := range []struct {
		name string
		args []string
		lose func(r *round, s *redistest.Server)
	}{
		{"restarted empty", nil, func(_ *round, s *redistest.Server) { s.Restart() }},
		{"flushed", nil, func(r *round, s *redistest.Server) { r.do(s, "FLUSHALL") }},
		{"deleted", nil, func(r *round, s *redistest.Server) { r.do(s, "DEL", ordersFence) }},
		{"evicted by allkeys-lru", []string{"--maxmemory-policy", "allkeys-lru"}, (*round).evict},
		{"evicted by volatile-ttl", []string{"--maxmemory-policy", "volatile-ttl"}, (*round).evict},
	} {
		eachFresh(t, loss.name, func(r *round, fresh bool) {
			s := redistest.Start(r, loss.args...)
			f := r.fences(r.operator(single(s.Addr())))
			f.over(fresh, func() {
				require.Equal(r, fmt.Sprint(f.last), s.Get(ordersFence))
				loss.lose(r, s)
				require.Empty(r, s.Get(ordersFence))
			})
		})
	}
}

// evict fills a server until the fence is gone.
func (r *round) evict(s *redistest.Server) {
	r.Helper()
	info, _ := r.do(s, "INFO", "memory").(string)
	_, rest, _ := strings.Cut(info, "used_memory:")
	text, _, _ := strings.Cut(rest, "\r")
	used, err := strconv.Atoi(text)
	require.NoError(r, err)
	r.do(s, "CONFIG", "SET", "maxmemory", fmt.Sprint(used+1<<20))
	text = strings.Repeat("x", 16<<10)
	n := 0
	for ; r.do(s, "EXISTS", ordersFence) == int64(1); n++ {
		require.Less(r, n, 100_000, "nothing is evicted")
		if _, err := s.Do("SET", fmt.Sprint("filler:", n), text); err != nil {
			require.Contains(r, err.Error(), "OOM")
		}
	}
	r.Logf("evicted after %d values of 16 kB on 1 MB", n)
	r.do(s, "CONFIG", "SET", "maxmemory", "0")
}

// following returns a client that connects to whoever is the master now.
func (r *round) following(master *atomic.Pointer[redistest.Server]) *redis.Client {
	client := redis.NewClient(&redis.Options{Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", master.Load().Addr())
	}})
	r.Cleanup(func() { _ = client.Close() })
	return client
}

// A promoted replica that has got nothing, or not the last writes, gives greater fences than the old master did.
func TestFencesGrowOverAFailover(t *testing.T) {
	for name, lagging := range map[string]bool{"to an empty replica": false, "to a lagging replica": true} {
		eachFresh(t, name, func(r *round, fresh bool) {
			first := redistest.Start(r, "--repl-diskless-sync-delay", "0")
			second := redistest.Start(r, "--replicaof", "127.0.0.1 1")
			var master atomic.Pointer[redistest.Server]
			master.Store(first)
			f := r.fences(r.following(&master))
			f.pass(fresh)
			if lagging {
				_, port, err := net.SplitHostPort(first.Addr())
				require.NoError(r, err)
				r.do(second, "REPLICAOF", "127.0.0.1", port)
				require.Eventually(r, func() bool { return second.Get(ordersFence) == fmt.Sprint(f.last) }, patience, time.Millisecond)
				r.do(second, toReplica...) // its link is cut
			}
			known := second.Get(ordersFence)
			require.Equal(r, lagging, known != "")
			f.over(fresh, func() {
				require.Equal(r, known, second.Get(ordersFence))
				require.NotEqual(r, known, first.Get(ordersFence))
				first.Kill()
				r.do(second, toMaster...)
				master.Store(second)
			})
		})
	}
}

// The same with Sentinels, which promote a replica that has not got the last writes.
func TestFencesGrowOverAFailoverBySentinels(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartReplicated(r)
		f := r.fences(r.operator(endpoint{Kind: "sentinel", Addrs: s.SentinelAddrs()}))
		f.pass(false)
		redistest.AwaitReplica(r, s.First, s.Second)
		known := s.Second.Get(ordersFence)
		require.Equal(r, fmt.Sprint(f.last), known)
		r.do(s.Second, toReplica...) // until the Sentinels set it right, which takes them ten seconds
		f.over(true, func() {
			if s.Second.Get(ordersFence) != known {
				r.spoiled++
				r.Log("inconclusive: the replica was set right too early")
			}
			s.First.Kill()
			s.AwaitMaster(s.Second)
		})
	})
}

// A clock that moves costs no growth: what is kept outlives a step back, and a step forward makes the next fence all the
// greater. What a step forward has expired is replaced by the time of day.
func TestFencesGrowWhereverTheServersClockGoes(t *testing.T) {
	const hour, day = time.Hour, 24 * time.Hour
	for name, offsets := range map[string][]time.Duration{
		"back":                            {-5 * hour},
		"back, and further back":          {-5 * hour, -500 * day},
		"back, then forward":              {-5 * hour, 0},
		"forward":                         {3 * hour},
		"forward by more than a week":     {30 * day},
		"forward, then back":              {3 * hour, 0},
		"forward by a month, then back":   {30 * day, 0},
		"back and forth by a few seconds": {-2 * time.Second, time.Second, -time.Second, 0},
	} {
		eachFresh(t, name, func(r *round, fresh bool) {
			s := redistest.StartWithClock(r)
			f := r.fences(r.operator(single(s.Addr())))
			for _, offset := range offsets {
				f.over(fresh, func() { s.SetClock(offset) })
			}
		})
	}
	eachFresh(t, "forward by more than a week and back while nobody acquires", func(r *round, fresh bool) {
		s := redistest.StartWithClock(r)
		f := r.fences(r.operator(single(s.Addr())))
		f.over(fresh, func() {
			s.SetClock(8 * day)
			require.Empty(r, s.Get(ordersFence), "expired")
			s.SetClock(0)
			require.Empty(r, s.Get(ordersFence), "expired for good")
		})
	})
}

// What else a clock does that is set: back, it keeps the key of a lease for longer than its TTL, and fences go on one by
// one; forward, it has the key expire under its holder, and fences follow the clock.
func TestAServersClockIsSetUnderALease(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartWithClock(r)
		f := r.fences(r.operator(single(s.Addr())))
		held := f.take(f.old)
		s.SetClock(-5 * time.Hour)
		require.Greater(r, s.PTTL(orders), 5*time.Hour-fencedTTL)
		require.NoError(r, held.Release())
		for _, k := range []*redislease.Locker{f.old, r.fencing(f.client)} {
			before := f.last
			require.NoError(r, f.take(k).Release())
			require.Equal(r, before+1, f.last)
		}

		held = f.take(f.old)
		before := time.Now()
		s.SetClock(3 * time.Hour)
		require.Equal(r, time.Duration(-2), s.PTTL(orders))
		next := f.take(r.fencing(f.client))
		require.GreaterOrEqual(r, next.Fence(), before.Add(3*time.Hour).UnixMicro())
		require.ErrorIs(r, held.Release(), redislease.ErrTaken)
		require.NoError(r, next.Release())
	})
}

// The combination that WithFencing names, and no other, gives a fence that is not greater: the number is lost, the clock
// is behind, and the Locker has not seen a greater one. One that has never falls back.
func TestAFenceFallsBackOnlyWithNumberClockAndLockerBehind(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartWithClock(r)
		client := r.operator(single(s.Addr()))
		for combination := range 8 {
			lost, back, fresh := combination&1 != 0, combination&2 != 0, combination&4 != 0
			s.SetClock(0)
			r.do(s.Server, "FLUSHALL")
			f := r.fences(client)
			f.pass(true) // the last one is of the Locker that is to have seen all
			if lost {
				r.do(s.Server, "DEL", ordersFence)
			}
			if back {
				s.SetClock(-5 * time.Hour)
			}
			if !lost || !back || !fresh {
				f.pass(fresh)
				continue
			}
			l, err := r.fencing(client).TryAcquire(context.Background(), orders)
			require.NoError(r, err)
			require.Less(r, l.Fence(), f.last, "documented")
			require.NoError(r, l.Release())
			require.NoError(r, f.take(f.old).Release())
			r.do(s.Server, "DEL", ordersFence)
			require.NoError(r, f.take(f.old).Release())
			f.pass(true) // the number is there again
		}
	})
}

// Where TIME is refused the caller's clock stands in: fences grow from one to the other and back.
func TestTheCallersClockStandsInWhereTIMEIsRefused(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartWithClock(r)
		s.SetClock(-time.Hour)
		f := r.fences(r.operator(single(s.Addr())))
		f.pass(true)
		require.Less(r, f.last, time.Now().Add(-time.Minute).UnixMicro(), "the server's time")

		r.do(s.Server, "ACL", "SETUSER", "default", "-time")
		for _, k := range []*redislease.Locker{f.old, r.fencing(f.client)} {
			r.do(s.Server, "DEL", ordersFence)
			before := time.Now()
			require.NoError(r, f.take(k).Release())
			require.GreaterOrEqual(r, f.last, before.UnixMicro())
			require.LessOrEqual(r, f.last, time.Now().UnixMicro())
		}
		f.pass(true)

		r.do(s.Server, "ACL", "SETUSER", "default", "+time")
		before := f.last
		require.NoError(r, f.take(r.fencing(f.client)).Release())
		require.Equal(r, before+1, f.last)
		f.pass(true)
	})
}

// Six rights, with or without that to TIME, on the keys with the prefix are enough for a whole life with a fence.
func TestAUserWithTheLeastRightsHoldsFencedLeases(t *testing.T) {
	for _, right := range []string{"+time", "-time"} {
		t.Run(right, func(t *testing.T) {
			rounds(t, func(r *round) {
				s := redistest.Start(r)
				r.do(s, append(slices.Clone(least), right, "+publish", "&app:*")...) // or each release is in the log
				e := single(s.Addr())
				e.Username, e.Password = "least", "secret"
				client := r.operator(e)
				prefix := redislease.WithPrefix("app:")
				last := int64(0)
				for range 3 {
					k := r.fencing(client, prefix)
					l, err := k.Acquire(context.Background(), orders)
					require.NoError(r, err)
					require.Greater(r, l.Fence(), last)
					last = l.Fence()
					require.Equal(r, fmt.Sprint(last), s.Get("app:orders:fence{app:orders}"))
					_, err = r.fencing(client, prefix).TryAcquire(context.Background(), orders)
					require.ErrorIs(r, err, redislease.ErrNotAcquired)
					require.NoError(r, l.Renew(context.Background()))
					require.Equal(r, last, l.Fence())
					require.NoError(r, l.Release())
					require.Equal(r, time.Duration(-2), s.PTTL("app:orders"))
				}
				denied, _ := r.do(s, "ACL", "LOG").([]any)
				require.Equal(r, right == "-time", len(denied) > 0)
				for _, entry := range denied {
					require.Contains(r, fmt.Sprint(entry), "object time")
				}
			})
		})
	}
}

// A fenced acquisition that Redis refuses, for whatever reason, is Redis' own error at once and certainly not executed:
// no lock is left, and no number drawn. When the reason is gone all is as before.
func TestAFencedAcquisitionThatIsRefusedLeavesNothing(t *testing.T) {
	kept := func(args ...string) []string { return slices.Insert(args, 1, ordersFence) }
	for _, tt := range []struct {
		name, code string
		begin, end []string
	}{
		{"no memory", "OOM", []string{"CONFIG", "SET", "maxmemory", "1"}, []string{"CONFIG", "SET", "maxmemory", "0"}},
		{"not this key's companion", "NOPERM", []string{"ACL", "SETUSER", "default", "resetkeys", "~orders"}, []string{"ACL", "SETUSER", "default", "~*"}},
		{"a replica", "READONLY", toReplica, toMaster},
		{"no replica", "NOREPLICAS", []string{"CONFIG", "SET", "min-replicas-to-write", "1"}, []string{"CONFIG", "SET", "min-replicas-to-write", "0"}},
		{"kept as text", "FENCE", kept("SET", "text"), kept("DEL")},
		{"kept as a fraction", "FENCE", kept("SET", "1.5"), kept("DEL")},
		{"kept as what tostring makes of it", "FENCE", kept("SET", "1.7959689640001e+15"), kept("DEL")},
		{"kept as a great number", "FENCE", kept("SET", "9007199254740992"), kept("DEL")},
		{"kept as the greatest number", "FENCE", kept("SET", "9007199254740991"), kept("DEL")},
		{"kept in a list", "FENCE", kept("RPUSH", "1"), kept("DEL")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rounds(t, func(r *round) {
				s := redistest.Start(r)
				r.do(s, "ACL", "SETUSER", "operator", "on", "nopass", "~*", "+@all")
				r.do(s, "AUTH", "operator", "any")
				client := &recorder{RedisClient: r.operator(single(s.Addr()))}
				f := r.fences(client)
				f.pass(true)
				other, err := f.old.TryAcquire(context.Background(), "other")
				require.NoError(r, err)

				if tt.code == "FENCE" {
					r.do(s, "DEL", ordersFence)
				}
				r.do(s, tt.begin...)
				dump := r.do(s, "DUMP", ordersFence)
				for _, k := range []*redislease.Locker{f.old, r.fencing(client)} {
					sent := client.count()
					_, err := k.TryAcquire(context.Background(), orders)
					r.refused(err, tt.code)
					require.LessOrEqual(r, client.count(), sent+1, "sent once, or not at all if the scripts are refused")
					require.Equal(r, time.Duration(-2), s.PTTL(orders))
					require.Equal(r, dump, r.do(s, "DUMP", ordersFence))
				}
				_, err = f.old.TryAcquire(context.Background(), "other")
				require.Error(r, err)
				require.NotErrorIs(r, err, redislease.ErrOutcomeUnknown)

				r.do(s, tt.end...)
				f.pass(true)
				require.NoError(r, other.Release())
			})
		})
	}
}

// A user who may touch a key and nothing else can have a lease of it, and none with a fence.
func TestAUserWhoMayNotTouchTheCompanionGetsNoFencedLease(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		r.do(s, append(slices.Clone(least), "resetkeys", "~app:orders", "+time")...)
		e := single(s.Addr())
		e.Username, e.Password = "least", "secret"
		client := &recorder{RedisClient: r.operator(e)}
		_, err := r.fencing(client, redislease.WithPrefix("app:")).TryAcquire(context.Background(), orders)
		r.refused(err, "NOPERM")
		require.Equal(r, 1, client.count(), "sent once")
		require.Equal(r, int64(0), r.do(s, "DBSIZE"))

		k, err := redislease.New(client, redislease.WithPrefix("app:"))
		require.NoError(r, err)
		l, err := k.TryAcquire(context.Background(), orders)
		require.NoError(r, err)
		require.Equal(r, int64(-1), l.Fence())
		require.NoError(r, l.Release())
	})
}

// recorder is a client that notes what fenced acquisitions send.
type recorder struct {
	redislease.RedisClient
	mu     sync.Mutex
	sent   [][]any
	errors []string
	answer error // to them, instead of sending them
}

func (c *recorder) Process(ctx context.Context, cmd redis.Cmder) error {
	args := cmd.Args()
	if len(args) < 5 || args[0] != "eval" || args[2] != "2" {
		return c.RedisClient.Process(ctx, cmd)
	}
	c.mu.Lock()
	c.sent = append(c.sent, args)
	err := c.answer
	c.mu.Unlock()
	if err != nil {
		cmd.SetErr(err)
		return err
	}
	if err = c.RedisClient.Process(ctx, cmd); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.errors = append(c.errors, err.Error())
	}
	return err
}

// ReloadState is what tells that the client sends commands on to other nodes.
func (c *recorder) ReloadState(ctx context.Context) {
	if cluster, ok := c.RedisClient.(*redis.ClusterClient); ok {
		cluster.ReloadState(ctx)
	}
}

// fenced returns the arguments of what was sent, but for the first n.
func (c *recorder) fenced(n int) [][]any {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.sent[n:])
}

// count counts it.
func (c *recorder) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.sent)
}

// answered counts the error replies with the code.
func (c *recorder) answered(code string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, text := range c.errors {
		if strings.HasPrefix(text, code) {
			n++
		}
	}
	return n
}

// tokens returns the tokens among the arguments: those that were unanswered, and a new one at the end.
func tokens(args []any) (found []string) {
	for _, arg := range args[5 : len(args)-4] {
		text, err := arg.(encoding.BinaryMarshaler).MarshalBinary()
		if err != nil {
			panic(err)
		}
		found = append(found, string(text))
	}
	return found
}

// bracedKeys are keys whose slot is easily got wrong.
var bracedKeys = []string{"foo", "{u}x", "x{u}", "{u}", "foo}", "}foo", "{}foo", "{}", "}{", "}{a}", "{", "}", "a{b", "a}b", "a}b{c", "a}b{c}",
	"a{b}c{d}", "{}{a}", "a{}{b}", "{{b}}", "{{b}", "{b}}", "{a}{b}", "{{}}", "foo:fence", "foo:fence{foo}", " ", "a b\r\n", "\x00", "\xff{\xfe}",
	"Schlüssel", "{鍵}", strings.Repeat("a", 5000), strings.Repeat("a", 5000) + "{b}"}

// Where a fence is kept begins with the lock's key, for the patterns of users, and is in its slot, for clusters. A key of
// which that cannot be said is refused before anything is sent: one with braces that are no hash tag.
func TestAFenceIsKeptInTheSlotOfItsKey(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartCluster(r, patient...)
		ctx := context.Background()
		client := &recorder{RedisClient: r.operator(endpoint{Kind: "cluster", Addrs: s.Addrs()})}
		k := r.fencing(client)
		first, err := k.TryAcquire(ctx, "first") // it checks the scripts
		require.NoError(r, err)
		require.NoError(r, first.Release())

		keys := map[string]bool{}
		for _, key := range bracedKeys {
			keys[key] = true
		}
		for len(keys) < len(bracedKeys)+5000 {
			key := make([]byte, 1+rand.N(12))
			for i := range key {
				key[i] = "{}abc:"[rand.N(6)]
			}
			keys[string(key)] = true
		}

		tagged := regexp.MustCompile(`(?s)^[^{]*\{[^}]+\}`)
		client.answer = errors.New("not sent")
		var accepted []string
		companions := map[string]string{}
		for key := range keys {
			before := client.count()
			_, err := k.TryAcquire(ctx, key)
			require.Error(r, err)
			sent := client.fenced(before)
			good := tagged.MatchString(key) || !strings.ContainsAny(key, "{}")
			require.Equal(r, good, errors.Is(err, client.answer), "%q: %v", key, err)
			if !good {
				require.Empty(r, sent, "%q", key)
				continue
			}
			require.Len(r, sent, 1)
			require.Equal(r, key, sent[0][3])
			companion := sent[0][4].(string)
			require.True(r, strings.HasPrefix(companion, key) && companion != key, "%q: %q", key, companion)
			require.NotContains(r, companions, companion, "%q", key)
			companions[companion] = key
			accepted = append(accepted, key)
		}
		r.Logf("%d keys, of which %d can have a fence", len(keys), len(accepted))

		node := r.operator(single(s.Nodes[0].Addr()))
		slots := map[string]int64{}
		for part := range slices.Chunk(slices.Collect(func(yield func(string) bool) {
			for companion, key := range companions {
				if !yield(key) || !yield(companion) {
					return
				}
			}
		}), 1000) {
			replies, err := node.Pipelined(ctx, func(p redis.Pipeliner) error {
				for _, key := range part {
					p.ClusterKeySlot(ctx, key)
				}
				return nil
			})
			require.NoError(r, err)
			for i, reply := range replies {
				slots[part[i]] = reply.(*redis.IntCmd).Val()
			}
		}
		for companion, key := range companions {
			require.Equal(r, slots[key], slots[companion], "%q: %q", key, companion)
		}

		// Some of them live, on each master.
		client.answer = nil
		rand.Shuffle(len(accepted), func(i, j int) { accepted[i], accepted[j] = accepted[j], accepted[i] })
		lived := map[*redistest.Server]int{}
		for _, key := range accepted {
			master := s.Nodes[slices.IndexFunc([]int64{5461, 10922, 16384}, func(end int64) bool { return slots[key] < end })]
			if lived[master] == 20 {
				continue
			}
			lived[master]++
			last := int64(0)
			for range 2 {
				l, err := k.TryAcquire(ctx, key)
				require.NoError(r, err, "%q", key)
				require.Greater(r, l.Fence(), last)
				last = l.Fence()
				sent := client.fenced(client.count() - 1)
				require.Equal(r, fmt.Sprint(last), master.Get(sent[0][4].(string)))
				require.NoError(r, l.Renew(ctx))
				require.Equal(r, last, l.Fence())
				require.NoError(r, l.Release())
			}
		}
		require.Len(r, lived, 3)
	})
}

// While a slot moves no fence can be drawn in it, since that takes two keys: TRYAGAIN, which is Redis' own error to a Try,
// and which a wait rides out. Leases that are held are renewed and released as ever, and are not given to others.
func TestASlotMovesUnderFencedLeases(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartCluster(r, patient...)
		e := endpoint{Kind: "cluster", Addrs: s.Addrs()}
		ctx := context.Background()
		client := &recorder{RedisClient: r.operator(e)}
		k := r.fencing(client)
		acquire := func(key string) *redislease.Lease {
			r.Helper()
			l, err := k.Acquire(ctx, key)
			require.NoError(r, err)
			return l
		}
		held, free := acquire("{orders}:held"), acquire("{orders}:free")
		var others []*redislease.Lease
		for i := range 3 {
			others = append(others, acquire(fmt.Sprint("{orders}:", i)))
		}
		require.NoError(r, free.Release())
		fence := held.Fence()

		slot := s.Slot(slotKey)
		from, to := s.Master(slot), s.Master((slot+16384/3)%16384)
		require.NotEqual(r, from, to)
		var asked []error
		try := func(key string, ask bool) { // ask: the old node has neither of the keys, and sends us to the new one
			r.Helper()
			_, err := k.TryAcquire(ctx, key, redislease.WithAcquireTimeout(5*time.Second))
			if ask {
				asked = append(asked, err)
				return
			}
			r.refused(err, "TRYAGAIN")
		}
		s.BeginMigration(slot, from, to)
		for i, other := range others {
			apart := i == 1
			switch i {
			case 1: // the lock's keys alone
				_, port, err := net.SplitHostPort(to.Addr())
				require.NoError(r, err)
				for _, key := range []string{"{orders}:held", other.Key()} {
					require.Equal(r, "OK", r.do(from, "MIGRATE", "127.0.0.1", port, key, "0", "5000"))
				}
			case 2:
				require.Positive(r, s.MoveKeys(slot, from, to))
			}
			try("{orders}:free", i == 2)
			try("{orders}:new", true)
			_, err := k.TryAcquire(ctx, "{orders}:held")
			if apart {
				r.refused(err, "TRYAGAIN")
			} else {
				require.ErrorIs(r, err, redislease.ErrNotAcquired)
			}
			require.NoError(r, held.Renew(ctx))
			require.Equal(r, fence, held.Fence())
			require.NoError(r, other.Renew(ctx))
			require.NoError(r, other.Release())
		}
		got := make(chan *redislease.Lease)
		go func() {
			l, err := k.Acquire(ctx, "{orders}:free")
			if err != nil {
				r.Errorf("a wait: %v", err)
			}
			got <- l
		}()
		before := client.answered("TRYAGAIN")
		require.Eventually(r, func() bool { return client.answered("TRYAGAIN") > before+2 }, patience, time.Millisecond)
		s.EndMigration(slot, from, to)
		next := <-got
		require.NotNil(r, next)
		require.Greater(r, next.Fence(), free.Fence())
		require.NoError(r, next.Release())
		require.NoError(r, held.Release())
		first, err := k.TryAcquire(ctx, "{orders}:new")
		require.NoError(r, err, "nothing was left")
		require.NoError(r, first.Release())

		r.compete(s, slot, to, from)
		r.Run("a Try that was sent on by ASK", func(t *testing.T) {
			r := &round{T: t}
			for _, err := range asked {
				r.refused(err, "TRYAGAIN")
			}
		})
	})
}

// compete has two clients acquire, renew and release keys while their slot goes back and forth.
func (r *round) compete(s *redistest.Cluster, slot int, from, to *redistest.Server) {
	r.Helper()
	type held struct {
		by     atomic.Int32
		fences []int64 // guarded by the lease
	}
	keys := make([]held, 3)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var clients []*recorder
	for range 2 {
		client := &recorder{RedisClient: r.operator(endpoint{Kind: "cluster", Addrs: s.Addrs()})}
		clients = append(clients, client)
		k := r.fencing(client, redislease.WithBackoff(func(int) time.Duration { return 5 * time.Millisecond }))
		for i := range keys {
			wg.Go(func() {
				key := &keys[i]
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					l, err := k.Acquire(context.Background(), fmt.Sprint("{orders}:compete:", i))
					if err != nil {
						r.Errorf("acquire: %v", err)
						return
					}
					if key.by.Add(1) != 1 {
						r.Errorf("two holders of %s", l.Key())
					}
					key.fences = append(key.fences, l.Fence())
					if err := l.Renew(context.Background()); err != nil {
						r.Errorf("renew: %v", err)
					}
					time.Sleep(rand.N(2 * time.Millisecond))
					key.by.Add(-1)
					if err := l.Release(); err != nil {
						r.Errorf("release: %v", err)
					}
				}
			})
		}
	}
	refused := func() int { return clients[0].answered("TRYAGAIN") + clients[1].answered("TRYAGAIN") }
	end := time.Now().Add(patience)
	moves := 0
	for ; time.Now().Before(end) && (moves < 6 || refused() == 0); from, to = to, from {
		s.BeginMigration(slot, from, to)
		time.Sleep(30 * time.Millisecond) // keys are asked for at both
		for s.MoveKeys(slot, from, to) > 0 {
		}
		time.Sleep(30 * time.Millisecond) // all are asked for at the new node
		s.EndMigration(slot, from, to)
		time.Sleep(60 * time.Millisecond)
		moves++
	}
	close(stop)
	wg.Wait()
	require.Positive(r, refused())
	for i := range keys {
		fences := keys[i].fences
		require.Greater(r, len(fences), 2)
		for j := 1; j < len(fences); j++ {
			require.Greater(r, fences[j], fences[j-1])
		}
		r.Logf("key %d: %d leases over %d moves; %d acquisitions were answered TRYAGAIN", i, len(fences), moves, refused())
	}
}

// A process that is stopped until another holds the key finds its fence as it was when it goes on, and the other's is
// greater: whatever it writes then is refused by who has seen the other's.
func TestAStoppedHoldersFenceIsSmallerThanTheNextHolders(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		change := func(j *job) { j.TTL, j.Fencing, j.Keys = time.Second, true, j.Keys[:3] }
		first := r.hold(single(s.Addr()), change)
		first.awaitRenewal()
		first.Pause()
		second := r.hold(single(s.Addr()), change)
		second.awaitRenewal()
		first.Resume()
		first.await("ended", 1)
		second.awaitRenewal()
		for _, c := range []*child{first, second} {
			c.tell("release")
			c.await("released", 1)
		}
		for _, key := range first.Keys {
			old, young := first.fence(key), second.fence(key)
			require.Greater(r, young, old)
			r.Logf("%s: %d, then %d", key, old, young)
		}
	})
}

// fence returns the fence of a child's lease, which is the same whenever it is asked for.
func (c *child) fence(key string) int64 {
	c.r.Helper()
	fence := c.said("acquired", key)[0].Fence
	require.Positive(c.r, fence)
	for _, what := range []string{"renewed", "ended", "released"} {
		for _, rec := range c.said(what, key) {
			require.Equal(c.r, fence, rec.Fence, "%s: %s", key, what)
		}
	}
	return fence
}

// A thousand acquisitions by eight clients whose connections are killed all the time: each fence is drawn for one token,
// each is greater than all before, an acquisition that is refused draws none, and each lease has the one that was drawn
// for its token.
func TestFencesOfManyClientsGrowAlthoughTheirConnectionsAreKilled(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		killed := 0
		r.contend(s, s.Addr(), 1000, 2*time.Millisecond, func() {
			list, _ := r.do(s, "CLIENT", "LIST", "TYPE", "normal").(string)
			var ids []string
			for line := range strings.Lines(list) {
				if id, rest, _ := strings.Cut(strings.TrimPrefix(line, "id="), " "); strings.Contains(rest, "name="+contender+" ") {
					ids = append(ids, id)
				}
			}
			if len(ids) > 0 {
				if n, err := s.Do("CLIENT", "KILL", "ID", ids[rand.N(len(ids))]); err == nil {
					killed += int(n.(int64))
				}
			}
		})
		require.Positive(r, killed)
		r.Logf("%d connections were killed", killed)
	})
}

// The same while all keys are flushed all the time, which breaks the exclusion and not the growth.
func TestFencesOfManyClientsGrowAlthoughAllKeysAreFlushed(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		flushed := 0
		r.contend(s, s.Addr(), 500, 5*time.Millisecond, func() {
			r.do(s, "FLUSHALL")
			flushed++
		})
		require.Positive(r, flushed)
		r.Logf("flushed %d times", flushed)
	})
}

// The same while every fourth reply to an acquisition is lost: its fence is found beside its token.
func TestFencesOfManyClientsGrowAlthoughRepliesAreLost(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		p := faultproxy.Start(r, s.Addr())
		n := 0 // guarded by the proxy
		p.On(faultproxy.Command("EVAL").And(faultproxy.ArgContains(ordersFence), func(faultproxy.Request) bool {
			n++
			return n%4 == 0
		})).Do(faultproxy.ResetAfter())
		c := r.contend(s, p.Addr(), 200, 2*time.Millisecond, func() {})
		require.Positive(r, c.settled)
	})
}

const (
	contenders = 8
	contender  = "contender" // the name of their connections

	// contendTTL bounds how long the key of a lost release is in the way.
	contendTTL = 10 * time.Second
)

// contention is what contenders have met.
type contention struct {
	*round
	n int // leases that there are to be

	// calm is held by releases, and by what disturbs: a release that is lost is not repeated.
	calm sync.RWMutex

	mu      sync.Mutex
	leases  []draw
	refused map[string]bool // the tokens of acquisitions that another's lease was in the way of
	settled int             // leases whose token was not the last that was sent
	unknown int
	failed  int
}

// draw is a fence and the token that it was drawn for.
type draw struct {
	fence int64
	token string
}

// contend has clients compete for a key until they have had n leases of it, and compares what they have got with what the
// server did.
func (r *round) contend(s *redistest.Server, addr string, n int, pause time.Duration, disturb func()) *contention {
	r.Helper()
	drawn := r.monitor(s)
	c := &contention{round: r, n: n, refused: map[string]bool{}}
	var wg sync.WaitGroup
	for range contenders {
		client := redis.NewClient(&redis.Options{Addr: addr, ClientName: contender})
		r.Cleanup(func() { _ = client.Close() })
		wg.Go(func() { c.contend(&recorder{RedisClient: client}) })
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for over := false; !over; {
		c.calm.Lock()
		disturb()
		c.calm.Unlock()
		select {
		case <-done:
			over = true
		case <-time.After(rand.N(pause)):
		}
	}

	draws := drawn()
	byToken := map[string]int64{}
	last := int64(0)
	for _, d := range draws {
		require.Greater(r, d.fence, last)
		require.NotContains(r, byToken, d.token)
		require.NotContains(r, c.refused, d.token, "a refused acquisition has drawn a fence")
		last, byToken[d.token] = d.fence, d.fence
	}
	for _, l := range c.leases {
		require.Equal(r, byToken[l.token], l.fence, "a lease has the fence that was drawn for it")
	}
	require.GreaterOrEqual(r, len(c.leases), n)
	require.GreaterOrEqual(r, len(draws), len(c.leases))
	r.Logf("%d leases, %d of them settled, and %d fences; %d tokens of refused acquisitions, %d acquisitions unknown, %d failed",
		len(c.leases), c.settled, len(draws), len(c.refused), c.unknown, c.failed)
	return c
}

func (c *contention) contend(client *recorder) {
	var k *redislease.Locker
	for i := 0; c.goesOn(); i++ {
		if i%20 == 0 { // one that has seen nothing
			var err error
			if k, err = redislease.New(client, redislease.WithTTL(contendTTL), redislease.WithAcquireTimeout(patience), redislease.WithFencing(),
				redislease.WithBackoff(func(int) time.Duration { return time.Millisecond })); err != nil {
				c.Error(err)
				return
			}
		}
		verb := k.TryAcquire
		if i%4 == 0 {
			verb = k.Acquire
		}
		before := client.count()
		l, err := verb(context.Background(), orders)
		c.note(client.fenced(before), l, err)
		if err != nil {
			time.Sleep(rand.N(time.Millisecond))
			continue
		}
		fence := l.Fence()
		if i%3 == 0 {
			_ = l.Renew(context.Background()) // it may be gone
		}
		c.calm.RLock()
		_ = l.Release()
		c.calm.RUnlock()
		if l.Fence() != fence {
			c.Errorf("the fence of a lease was %d and is %d", fence, l.Fence())
		}
	}
}

func (c *contention) goesOn() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.leases) < c.n && c.failed+c.unknown < c.n
}

// note takes note of how an acquisition ended that has sent these commands.
func (c *contention) note(sent [][]any, l *redislease.Lease, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		c.leases = append(c.leases, draw{l.Fence(), l.Token()})
		all := tokens(sent[len(sent)-1])
		if all[len(all)-1] != l.Token() {
			c.settled++
		}
	case errors.Is(err, redislease.ErrNotAcquired):
		for _, args := range sent {
			for _, token := range tokens(args) {
				c.refused[token] = true
			}
		}
	case errors.Is(err, redislease.ErrOutcomeUnknown):
		c.unknown++
	default:
		c.failed++
	}
}

// monitor has the server tell of all that it does. The result returns, in their order, the fences that it has drawn for
// leases of orders by then, and checks that after each the key was taken.
func (r *round) monitor(s *redistest.Server) (drawn func() []draw) {
	r.Helper()
	conn, err := net.Dial("tcp", s.Addr())
	require.NoError(r, err)
	r.Cleanup(func() { _ = conn.Close() })
	lines := bufio.NewScanner(conn)
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(r, err)
	require.True(r, lines.Scan())
	require.Equal(r, "+OK", lines.Text())

	var sets [][]string // what scripts did: key and value
	done := make(chan error, 1)
	go func() {
		for lines.Scan() { // +1780000000.000000 [0 lua] "SET" "orders" "…" "PX" "60000"
			switch f := strings.Fields(lines.Text()); {
			case len(f) > 5 && f[2] == "lua]" && f[3] == `"SET"`:
				sets = append(sets, []string{strings.Trim(f[4], `"`), strings.Trim(f[5], `"`)})
			case len(f) > 4 && f[4] == `"the-end"`:
				done <- nil
				return
			}
		}
		done <- fmt.Errorf("the end of what the server did: %w", lines.Err())
	}()
	return func() (draws []draw) {
		r.Helper()
		r.do(s, "ECHO", "the-end")
		require.NoError(r, <-done)
		for pair := range slices.Chunk(sets, 2) {
			require.Len(r, pair, 2)
			require.Equal(r, []string{ordersFence, orders}, []string{pair[0][0], pair[1][0]})
			fence, err := strconv.ParseInt(pair[0][1], 10, 64)
			require.NoError(r, err)
			draws = append(draws, draw{fence, pair[1][1]})
		}
		return draws
	}
}
