package faults_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// Waiters whose backoff is an hour: only a release that is heard of brings them their key.

// waiter is one acquisition that waits.
type waiter struct {
	r     *round
	key   string
	held  *redislease.Lease
	lease chan *redislease.Lease
}

// wait has somebody hold a key, and somebody else, on another client, wait for it.
func (r *round) wait(e endpoint, key string, nodes []*redistest.Server) *waiter {
	r.Helper()
	ctx := context.Background()
	holder, err := redislease.New(r.operator(e), redislease.WithTTL(time.Minute))
	require.NoError(r, err)
	other, err := redislease.New(r.operator(e), redislease.WithTTL(time.Minute),
		redislease.WithBackoff(func(int) time.Duration { return time.Hour }))
	require.NoError(r, err)
	w := &waiter{r: r, key: key, lease: make(chan *redislease.Lease, 1)}
	w.held, err = holder.TryAcquire(ctx, key)
	require.NoError(r, err)
	waiting, cancel := context.WithTimeout(ctx, patience)
	done := make(chan struct{})
	r.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		if l, err := other.Acquire(waiting, key); err == nil {
			w.lease <- l
		} else {
			r.Errorf("%s: %v", key, err)
		}
	}()
	w.listened(nodes)
	return w
}

// listened waits until one of the nodes has a subscriber of the key's channel.
func (w *waiter) listened(nodes []*redistest.Server) {
	w.r.Helper()
	require.Eventually(w.r, func() bool {
		for _, n := range nodes {
			reply, err := n.Do("PUBSUB", "NUMSUB", w.key+":released")
			if list, ok := reply.([]any); err == nil && ok && len(list) == 2 && fmt.Sprint(list[1]) != "0" {
				return true
			}
		}
		return false
	}, patience, 10*time.Millisecond, "nobody listens to %s", w.key)
	time.Sleep(100 * time.Millisecond) // the try that follows the confirmation is in vain: later it would take the key, unwoken
}

// served releases the key and waits until the waiter has it.
func (w *waiter) served() {
	w.r.Helper()
	// A client that has not learned of the failover yet is refused the connection: that was not executed.
	require.Eventually(w.r, func() bool { return w.held.Release() == nil }, patience, 100*time.Millisecond)
	select {
	case l := <-w.lease:
		require.NoError(w.r, l.Release())
	case <-time.After(patience):
		require.FailNow(w.r, "nobody was woken", w.key)
	}
}

// On a Cluster a release is heard of whichever node the subscription is with, and whichever the key.
func TestWaitersOfAClusterAreWoken(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartCluster(r, patient...)
		e := endpoint{Kind: "cluster", Addrs: s.Addrs()}
		var waiters []*waiter
		for i := range 6 {
			waiters = append(waiters, r.wait(e, fmt.Sprint("orders:", i), s.Nodes))
		}
		for _, w := range waiters {
			w.served()
		}
	})
}

// The node that a subscription is with is killed. Another one is subscribed to, and releases are heard of again.
func TestWaitersOfAClusterOutliveTheNodeThatTheyListenTo(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartCluster(r)
		e := endpoint{Kind: "cluster", Addrs: s.Addrs()}
		w := r.wait(e, slotKey, s.Nodes)
		slot := s.Slot(slotKey)
		old := s.Master(slot)
		r.upToDate(old, s.Replica(old))
		old.Kill()
		s.Master(slot)
		w.listened(s.Nodes)
		w.served()
	})
}

// A master is failed over: its successor is subscribed to.
func TestWaitersAreWokenByTheNewMaster(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.StartReplicated(r)
		w := r.wait(endpoint{Kind: "sentinel", Addrs: s.SentinelAddrs()}, "orders", []*redistest.Server{s.First})
		r.upToDate(s.First, s.Second)
		s.First.Kill()
		s.AwaitMaster(s.Second)
		w.listened([]*redistest.Server{s.Second})
		w.served()
	})
}
