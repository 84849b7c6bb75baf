package faults_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// Faults of a single server.

// begin starts a server, a child that holds leases, and an observer of them, and returns after a renewal or two.
func (r *round) begin(args ...string) (*redistest.Server, *child, *observer) {
	r.Helper()
	s := redistest.Start(r, args...)
	c := r.hold(single(s.Addr()))
	o := r.observe(c, single(s.Addr()))
	c.steady()
	return s, c, o
}

// outlast lets one and a half TTLs go by, in which leases that nobody renews would end.
func (c *child) outlast() {
	select {
	case <-time.After(c.TTL * 3 / 2):
	case <-c.Exited():
		require.FailNow(c.r, "the child is gone")
	}
}

// While Redis stands still nobody can take the key, but when it goes on it may find that the TTL has passed. The
// context has ended by then. If it has not passed yet, renewals that were under way give the key a longer life, which
// keeps others away and makes nobody believe in the lease again.
func TestAServerIsStoppedForLongerThanTrustLasts(t *testing.T) {
	for name, longer := range map[string]time.Duration{"but not until the keys expire": 0, "and until the keys have expired": 2 * margin} {
		t.Run(name, func(t *testing.T) {
			rounds(t, func(r *round) {
				s, c, o := r.begin()
				s.Pause()
				c.await("ended", 1)
				time.Sleep(longer)
				s.Resume()
				o.inTime(c, "unconfirmed")
			})
		})
	}
}

// Renewals that a server executes late count from when they were sent, so a stop that ends while trust lasts costs
// nothing.
func TestAServerIsStoppedForAQuarterOfATTL(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.begin()
		s.Pause()
		time.Sleep(ttl / 4)
		s.Resume()
		c.awaitRenewal()
		c.outlast()
		c.kept()
	})
}

// A server that is gone confirms nothing: trust runs out, and not before its time.
func TestAServerIsKilled(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, o := r.begin()
		s.Kill()
		c.await("ended", 1)
		s.Restart()
		o.inTime(c, "unconfirmed")
	})
}

// A server that comes back empty has given the key to nobody, or to anybody: no lease can promise exclusion here. The
// holder is told by the next renewal, or by its end of trust, and touches nothing of the next holder's.
func TestAServerIsKilledAndRestartedEmpty(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, o := r.begin()
		s.Kill()
		s.Restart()
		c.await("ended", 1)
		o.told(c, interval+dialling, "taken", "gone", "unconfirmed")
	})
}

// dialling is how long go-redis tries to connect, with the pauses in between, before it returns an error.
const dialling = 500 * time.Millisecond

// A connection that an operator kills costs the command on it, which another follows.
func TestConnectionsAreKilledByTheServer(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.begin()
		killed := int64(0)
		for end := time.Now().Add(2 * ttl); time.Now().Before(end); {
			n, err := s.Do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			require.NoError(r, err)
			killed += n.(int64)
			time.Sleep(20*time.Millisecond + rand.N(130*time.Millisecond))
		}
		require.Positive(r, killed)
		c.kept()
	})
}

// Clients that are paused for half a TTL are answered in time, since an answer counts from when its command was sent.
func TestClientsArePausedForHalfATTL(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.begin()
		_, err := s.Do("CLIENT", "PAUSE", fmt.Sprint((ttl / 2).Milliseconds()), "ALL")
		require.NoError(r, err)
		c.outlast()
		c.kept()
	})
}

// Clients that are paused for longer than trust lasts are answered when the keys have expired.
func TestClientsArePausedForTwoTTLs(t *testing.T) {
	for _, mode := range []string{"ALL", "WRITE"} {
		t.Run(mode, func(t *testing.T) {
			rounds(t, func(r *round) {
				s, c, o := r.begin()
				_, err := s.Do("CLIENT", "PAUSE", fmt.Sprint((2 * ttl).Milliseconds()), mode)
				require.NoError(r, err)
				c.await("ended", 1)
				o.inTime(c, "unconfirmed")
			})
		})
	}
}

// Scripts are sent with their text, so that there is nothing for a flush to take away.
func TestScriptsAreFlushedAllTheTime(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.begin()
		for end := time.Now().Add(2 * ttl); time.Now().Before(end); time.Sleep(time.Millisecond) {
			_, err := s.Do("SCRIPT", "FLUSH")
			require.NoError(r, err)
		}
		require.Empty(r, c.said("unrenewed", ""))
		c.kept()
	})
}

// A server that is out of memory refuses what takes memory: an acquisition gets Redis' error, and a lease is renewed and
// released as ever.
func TestAServerWithoutMemoryRefusesAcquisitionsAndKeepsLeases(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.begin()
		r.run(r.operator(single(s.Addr())), "CONFIG", "SET", "maxmemory", "1")
		late := r.start(job{Does: "hold", Server: single(s.Addr()), Keys: []string{"late"}, TTL: ttl})
		late.await("failed", 1)
		refused := late.said("failed", "")[0]
		require.Equal(r, "other", refused.Reason, "neither held by another nor unknown")
		require.Contains(r, refused.Err, "OOM")
		c.outlast()
		require.Empty(r, c.said("unrenewed", ""))
		c.kept()
	})
}

// A server that evicts a lock's key gives it away: no lease can promise exclusion here. The holder is told by the next
// renewal.
func TestALocksKeyIsEvicted(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, o := r.begin()
		client := r.operator(single(s.Addr()))
		r.run(client, "CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
		r.run(client, "CONFIG", "SET", "maxmemory", "1")
		// Any write has Redis look for something to evict: the keys that expire next.
		require.Eventually(r, func() bool {
			err := client.Set(context.Background(), "other", "x", 0).Err()
			return redis.HasErrorPrefix(err, "OOM")
		}, patience, time.Millisecond)
		r.run(client, "CONFIG", "SET", "maxmemory", "0")
		c.await("ended", 1)
		o.told(c, interval+dialling, "taken", "gone")
	})
}
