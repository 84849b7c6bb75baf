package faults_test

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// Faults of a master with a replica and three Sentinels, reached by go-redis' failover client. A failover takes the
// Sentinels some seconds, which is longer than most leases of these tests are trusted without a renewal.

// replicated starts it all, with an observer at the replica.
func (r *round) replicated(change ...func(*job)) (*redistest.Replicated, *child, *observer) {
	r.Helper()
	s := redistest.StartReplicated(r)
	c := r.hold(endpoint{Kind: "sentinel", Addrs: s.SentinelAddrs()}, change...)
	o := r.observe(c, single(s.Second.Addr()))
	c.steady()
	return s, c, o
}

// upToDate returns when the replica has got everything, and has the master accept no writes for a moment, so that it
// stays so: a renewal that the replica has not got would be lost in a failover.
func (r *round) upToDate(master, replica *redistest.Server) {
	r.Helper()
	_, err := master.Do("CLIENT", "PAUSE", "500", "WRITE")
	require.NoError(r, err)
	redistest.AwaitReplica(r, master, replica)
}

// A master is killed, or stands still, and its replica, which has got everything, is promoted. Either a lease is renewed
// there before its trust ends, or its trust ends before the key does.
func TestAMasterIsFailedOver(t *testing.T) {
	for name, fault := range map[string]func(*redistest.Server){"killed": (*redistest.Server).Kill, "stopped": (*redistest.Server).Pause} {
		t.Run(name, func(t *testing.T) {
			rounds(t, func(r *round) {
				s, c, o := r.replicated()
				r.upToDate(s.First, s.Second)
				fault(s.First)
				s.AwaitMaster(s.Second)
				if name == "stopped" {
					s.First.Resume() // it takes itself for the master until the Sentinels set it right
				}
				c.awaitRenewal() // or the end
				o.keptOrInTime(c)
				r.acquires(c.Server)
			})
		})
	}
}

// An operator has the Sentinels fail over a master that is well. For a second or two there are two masters, and what the
// old one confirms the new one does not know. Leases that live for longer than that are renewed there in time.
func TestAMasterIsFailedOverByAnOperator(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, o := r.replicated(func(j *job) { j.TTL = 4 * ttl })
		_, err := s.Sentinels[0].Do("SENTINEL", "FAILOVER", redistest.MasterName)
		require.NoError(r, err)
		s.AwaitMaster(s.Second)
		c.awaitRenewal() // or the end
		o.keptOrInTime(c)
		r.acquires(c.Server)
	})
}

// Replication is asynchronous: the replica that is promoted has not seen the keys, and no lease can promise exclusion
// then. The holder is told by the first renewal that the new master answers, and touches nothing of the next holder's.
func TestAFailoverLosesTheKeys(t *testing.T) {
	const ttl = 12 * time.Second // trust outlasts the failover
	rounds(t, func(r *round) {
		s := redistest.StartReplicated(r)
		// Until the Sentinels set it right, which takes them ten seconds.
		_, err := s.Second.Do("REPLICAOF", "127.0.0.1", "1")
		require.NoError(r, err)
		c := r.hold(endpoint{Kind: "sentinel", Addrs: s.SentinelAddrs()}, func(j *job) { j.TTL = ttl })
		o := r.observe(c, single(s.Second.Addr()))
		s.First.Kill()
		s.AwaitMaster(s.Second)
		switched := time.Now()
		c.await("ended", 1)
		o.awaitTaken(c)
		for _, key := range c.Keys {
			end := c.said("ended", key)[0]
			if end.At.Before(switched) {
				r.inconclusive(key, r.machine.worst(end.At.Add(-ttl), switched)) // the failover took longer than trust lasts
				continue
			}
			require.Contains(r, []string{"taken", "gone"}, end.Reason, end.Err)
			after := end.At.Sub(switched)
			require.Less(r, after, ttl/3+dialling, "%s: told too late", key)
			for _, seen := range o.seen(key) {
				if seen.value == next {
					total.add(func(t *totals) { t.told++; t.toldAfter = max(t.toldAfter, end.At.Sub(seen.got)) })
					r.Logf("%s: told %v after another had it, and %v after the failover was over", key, end.At.Sub(seen.got), after)
					break
				}
			}
		}
		o.undisturbed(c)
	})
}

// A master that has lost its replica to a failover goes on confirming, which no client can know. If it must have a
// replica to accept writes it refuses instead, and trust in it ends before the keys of the new master do.
func TestAnOldMasterThatMustHaveAReplicaConfirmsNothingWithoutIt(t *testing.T) {
	rounds(t, func(r *round) {
		first := redistest.Start(r, "--min-replicas-to-write", "1", "--repl-diskless-sync-delay", "0")
		_, port, err := net.SplitHostPort(first.Addr())
		require.NoError(r, err)
		second := redistest.Start(r, "--replicaof", "127.0.0.1 "+port)
		require.Eventually(r, func() bool {
			_, err := first.Do("SET", "probe", "x")
			return err == nil && second.Get("probe") == "x"
		}, patience, 10*time.Millisecond)
		c := r.hold(single(first.Addr()))
		o := r.observe(c, single(second.Addr()))
		c.steady()
		r.upToDate(first, second)
		_, err = second.Do("REPLICAOF", "NO", "ONE")
		require.NoError(r, err)
		c.await("ended", 1)
		c.refused("NOREPLICAS")
		o.inTime(c, "unconfirmed")
	})
}

// keptOrInTime checks the leases of a child of which some may have ended: these have in time, and the others' keys are
// theirs and can be released.
func (o *observer) keptOrInTime(c *child) {
	o.r.Helper()
	lost := c.lost()
	o.r.Logf("%d of %d leases ended", len(lost), len(c.Keys))
	o.inTime(c, "unconfirmed", "gone", "taken")
	for _, key := range c.Keys {
		if !slices.Contains(lost, key) {
			require.Equal(o.r, c.said("acquired", key)[0].Token, o.last(key))
			total.add(func(t *totals) { t.kept++ })
		}
	}
	c.tell("release")
	c.await("released", 1)
	for _, key := range c.Keys {
		if !slices.Contains(lost, key) {
			require.Empty(o.r, c.said("released", key)[0].Err)
		}
	}
}

// acquires checks that a new client acquires and releases.
func (r *round) acquires(e endpoint) {
	r.Helper()
	c := r.start(job{Does: "hold", Name: "new", Server: e, Keys: []string{"{orders}:new"}, TTL: ttl})
	c.await("acquired", 1)
	c.tell("release")
	c.await("released", 1)
	require.Empty(r, c.said("released", "")[0].Err)
}
