package faults_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// Faults of a Redis Cluster.

// slotKey is in the slot of all keys of these tests.
const slotKey = "{orders}:0"

// patient nodes fail nobody over only because this machine stood still for a second.
var patient = []string{"--cluster-node-timeout", "15000"}

func (r *round) cluster(args []string, change ...func(*job)) (*redistest.Cluster, *child, *observer) {
	r.Helper()
	s := redistest.StartCluster(r, args...)
	e := endpoint{Kind: "cluster", Addrs: s.Addrs()}
	c := r.hold(e, change...)
	o := r.observe(c, e)
	c.steady()
	return s, c, o
}

// While a slot moves to another node and back, the keys one by one, leases in it are acquired, renewed and released as
// ever: no error, nothing lost, and never two holders. Each command is about one key, so that none has to be tried again.
func TestC44ASlotMovesUnderItsLeases(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartCluster(r, patient...)
		e := endpoint{Kind: "cluster", Addrs: s.Addrs()}
		holder := r.hold(e)
		o := r.observe(holder, e)
		j := job{Does: "churn", Server: e, TTL: 10 * time.Second, Journal: r.journal()}
		for i := range 3 {
			j.Keys = append(j.Keys, fmt.Sprintf("{orders}:churn:%d", i))
		}
		var churning []*child
		for _, name := range []string{"first", "second"} {
			j.Name = name
			churning = append(churning, r.start(j))
		}
		for _, c := range churning {
			c.await("acquired", 1)
		}

		slot := s.Slot(slotKey)
		from, to := s.Master(slot), s.Master((s.Slot(slotKey)+16384/3)%16384)
		require.NotEqual(r, from, to)
		moved := 0
		for end := time.Now().Add(2 * ttl); time.Now().Before(end); from, to = to, from {
			s.BeginMigration(slot, from, to)
			time.Sleep(50 * time.Millisecond) // keys are asked for at both
			for n := 1; n > 0; moved += n {
				n = s.MoveKeys(slot, from, to)
			}
			time.Sleep(50 * time.Millisecond) // all are asked for at the new node
			s.EndMigration(slot, from, to)
			time.Sleep(50 * time.Millisecond)
		}
		for _, c := range churning {
			c.tell("release")
			c.await("churned", 1)
			for _, what := range []string{"failed", "unrenewed", "unreleased"} {
				require.Empty(r, c.said(what, ""))
			}
		}
		asked := 0
		for _, n := range s.Nodes {
			reply, err := n.Do("INFO", "commandstats")
			require.NoError(r, err)
			if strings.Contains(reply.(string), "cmdstat_asking:") {
				asked++
			}
		}
		require.GreaterOrEqual(r, asked, 2, "both nodes were asked for keys of a slot that was not theirs yet")
		r.Logf("%d keys were moved", moved)
		r.exclusive(j.Journal, j.Keys)
		require.Empty(r, holder.said("unrenewed", ""))
		for _, key := range holder.Keys {
			require.Equal(r, holder.said("acquired", key)[0].Token, o.last(key))
		}
		holder.kept()
	})
}

// A command that one node has sent on to another was not executed by the first: what the other answers is believed.
func TestAnAnswerIsBelievedThoughTheCommandWasSentOn(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartCluster(r, patient...)
		ctx := context.Background()
		k, err := redislease.New(r.operator(endpoint{Kind: "cluster", Addrs: s.Addrs()}), redislease.WithTTL(time.Minute))
		require.NoError(r, err)
		gone, err := k.TryAcquire(ctx, "{orders}:gone")
		require.NoError(r, err)
		held, err := k.TryAcquire(ctx, slotKey)
		require.NoError(r, err)
		slot := s.Slot(slotKey)
		from, to := s.Master(slot), s.Master((slot+16384/3)%16384)
		s.BeginMigration(slot, from, to)
		_, err = from.Do("DEL", "{orders}:gone")
		require.NoError(r, err)
		require.ErrorIs(r, gone.Release(), redislease.ErrGone, "by ASK")
		s.MoveKeys(slot, from, to)
		_, err = k.TryAcquire(ctx, slotKey)
		require.ErrorIs(r, err, redislease.ErrNotAcquired, "by ASK")
		_, err = to.Do("CONFIG", "SET", "maxmemory", "1")
		require.NoError(r, err)
		for _, by := range []string{"ASK", "MOVED", "neither"} {
			if by == "MOVED" {
				s.EndMigration(slot, from, to)
			}
			_, err = k.TryAcquire(ctx, "{orders}:new")
			require.ErrorContains(r, err, "OOM", by)
			require.NotErrorIs(r, err, redislease.ErrOutcomeUnknown, by)
		}
		require.NoError(r, held.Release())
	})
}

// exclusive checks that no two believed that they held a key at the same time.
func (r *round) exclusive(journal string, keys []string) {
	r.Helper()
	lines := r.lines(journal)
	for _, key := range keys {
		var held []line
		by := map[string]int{}
		for _, l := range lines {
			if l.key == key {
				held = append(held, l)
				by[l.name]++
			}
		}
		slices.SortFunc(held, func(a, b line) int { return a.before.Compare(b.before) })
		var last line // the one that ends last
		for _, l := range held {
			require.False(r, l.before.Before(last.after), "%s: held by %s and by %s at the same time", key, last.name, l.name)
			if l.after.After(last.after) {
				last = l
			}
		}
		require.Len(r, by, 2, "%s: both must have had it", key)
		r.Logf("%s: held %v times, never twice at once", key, by)
	}
}

// A master is killed, or stands still, and its replica, which has got everything, is promoted. Either a lease is renewed
// there before its trust ends, or its trust ends before the key does. Longer leases outlast the failover if they are told
// of the new master in time.
func TestAClustersMasterIsFailedOver(t *testing.T) {
	for name, fault := range map[string]func(*redistest.Server){"killed": (*redistest.Server).Kill, "stopped": (*redistest.Server).Pause} {
		for _, ttl := range []time.Duration{ttl, 4 * ttl} {
			t.Run(fmt.Sprint(name, " under leases of ", ttl), func(t *testing.T) {
				rounds(t, func(r *round) {
					s, c, o := r.cluster(nil, func(j *job) { j.TTL = ttl })
					slot := s.Slot(slotKey)
					old := s.Master(slot)
					r.upToDate(old, s.Replica(old))
					fault(old)
					s.Master(slot)
					if name == "stopped" {
						old.Resume()
					}
					c.awaitRenewal() // or the end
					o.keptOrInTime(c)
					r.acquires(c.Server)
				})
			})
		}
	}
}

// An operator has a replica take over from its master, which waits until the replica has seen everything: nothing is
// lost.
func TestAClustersMasterHandsOverToItsReplica(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.cluster(patient)
		slot := s.Slot(slotKey)
		old := s.Master(slot)
		_, err := s.Replica(old).Do("CLUSTER", "FAILOVER")
		require.NoError(r, err)
		require.Eventually(r, func() bool { return s.Master(slot) != old }, patience, 10*time.Millisecond)
		c.awaitRenewal()
		c.outlast()
		c.kept()
		r.acquires(c.Server)
	})
}
