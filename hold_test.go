package redislease_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
)

// The tests here are about the promise itself, on a real server and with go-redis' defaults: the context ends before
// the key can go to somebody else. They run one scenario with many leases at once: some on a client of their own each,
// or many of one Locker, whose renewals go out together.

const (
	holdTTL    = 3 * time.Second
	holdMargin = holdTTL / 10
	holdApart  = 20
	holdShared = 150
)

// lateness watches how late this machine's timers are.
type lateness struct {
	mu      sync.Mutex
	samples []sample
	stop    chan struct{}
	done    chan struct{}
}

type sample struct {
	due  time.Time
	late time.Duration
}

func watchLateness(t *testing.T) *lateness {
	l := &lateness{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		for {
			due := time.Now().Add(5 * time.Millisecond)
			select {
			case <-l.stop:
				return
			case <-time.After(time.Until(due)):
			}
			l.mu.Lock()
			l.samples = append(l.samples, sample{due, time.Since(due)})
			l.mu.Unlock()
		}
	}()
	t.Cleanup(func() { close(l.stop); <-l.done })
	return l
}

// worst returns how late a timer was that was due in the given time.
func (l *lateness) worst(from, to time.Time) (worst time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.samples {
		if s.due.Add(s.late).After(from) && s.due.Before(to) {
			worst = max(worst, s.late)
		}
	}
	return worst
}

// holder is one of the leases, and when its context ended.
type holder struct {
	key    string
	lease  *redislease.Lease
	doneAt time.Time
}

// holdMany has leases that are held, and in the middle of it makes the trouble. It returns when their contexts have
// ended.
func (f *faulty) holdMany(trouble func()) []*holder {
	holders := f.hold()
	var wg sync.WaitGroup
	for _, h := range holders {
		wg.Go(func() {
			<-h.lease.Context().Done()
			h.doneAt = time.Now()
		})
	}
	time.Sleep(holdTTL / 2) // with a renewal or two
	trouble()
	wg.Wait()
	return holders
}

func (f *faulty) hold() (holders []*holder) {
	n, locker := holdApart, func() *redislease.Locker { return f.locker(redislease.WithTTL(holdTTL)) }
	if f.shared {
		client := f.connect(func(o *redis.Options) { o.PoolSize = 4 * holdShared })
		f.warm(client)
		k := newLocker(f, client, redislease.WithTTL(holdTTL))
		n, locker = holdShared, func() *redislease.Locker { return k }
	}
	for i := range n {
		h := &holder{key: fmt.Sprintf("orders:%d", i)}
		h.lease = acquire(f, locker(), h.key)
		holders = append(holders, h)
	}
	return holders
}

// warm gives a client as many connections as f says that have their handshake behind them.
func (f *faulty) warm(client *redis.Client) {
	for range f.connections {
		conn := client.Conn()
		defer func() { _ = conn.Close() }()
		require.NoError(f, conn.Ping(context.Background()).Err())
	}
}

// checkInTime checks that each context ended before its key could expire, and that nothing was sent afterwards.
func (f *faulty) checkInTime(holders []*holder, machine *lateness) {
	log := f.proxy.Log()
	inconclusive := 0
	for _, h := range holders {
		until := h.lease.Until()
		if late := machine.worst(until, h.doneAt); late > holdMargin/2 {
			f.Logf("%s: inconclusive, this machine's timers were %v late", h.key, late)
			inconclusive++
			continue
		}
		canExpire := time.Time{}
		for _, r := range log {
			if (command("set", h.key)(r) || command("renew", h.key)(r)) && faultproxy.Replied(r) {
				canExpire = r.Forwarded.Add(holdTTL)
			}
			if h.doneAt.Add(holdMargin).Before(r.At) && r.Args[len(r.Args)-1] != "0" { // "0" is refused
				require.False(f, command("renew", h.key)(r) || command("set", h.key)(r), "sent after the end: %q", r.Args)
			}
		}
		require.False(f, until.Add(holdMargin).After(canExpire), "%s: trusted for longer than the key lives", h.key)
		require.True(f, h.doneAt.Before(canExpire), "%s: ended %v after the key could expire", h.key, h.doneAt.Sub(canExpire))
		require.ErrorIs(f, h.lease.Err(), redislease.ErrUnconfirmed)
	}
	require.LessOrEqual(f, inconclusive, len(holders)/20, "too many runs are inconclusive")
}

// takeOver has another holder take each key as soon as that is possible, and returns when all have it.
func (f *faulty) takeOver(holders []*holder) {
	for _, h := range holders {
		require.Eventually(f, func() bool {
			ok, err := f.operator.SetNX(context.Background(), h.key, "next", time.Minute).Result()
			return err == nil && ok
		}, holdTTL+patience, 5*time.Millisecond)
	}
}

// undisturbed checks that the next holders' keys are as they were.
func (f *faulty) undisturbed(holders []*holder) {
	for _, h := range holders {
		require.Equal(f, "next", f.get(h.key))
		require.Greater(f, f.pttl(h.key), 30*time.Second)
		require.ErrorIs(f, h.lease.Release(), redislease.ErrUnconfirmed)
		require.Equal(f, "next", f.get(h.key))
	}
}

func TestTheContextEndsBeforeTheKeyCanExpire(t *testing.T) {
	scenarios := map[string]func(f *faulty, machine *lateness){
		"Redis stands still":             whileRedisStandsStill,
		"requests are held back":         whileRequestsAreHeldBack,
		"requests and replies get lost":  whileTheNetworkIsABlackHole,
		"replies get lost":               whileRepliesGetLost,
		"replies are late by 0.2-0.5":    whileRepliesAreLate(0.2, 0.5),
		"replies are late by 0.2-0.9":    whileRepliesAreLate(0.2, 0.9),
		"open connections fall silent":   whileOpenConnectionsAreSilent,
		"Redis refuses for half a TTL":   whileRedisRefusesForAWhile,
		"connections are reset all over": whileConnectionsAreReset,
	}
	run := func(name string, shared bool, scenario func(f *faulty, machine *lateness)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t)
			f.shared = shared
			scenario(f, watchLateness(t))
		})
	}
	for name, scenario := range scenarios {
		run(name, false, scenario)
	}
	for _, name := range []string{"Redis stands still", "requests and replies get lost", "replies are late by 0.2-0.5", "connections are reset all over"} {
		run(name+", for leases of one Locker", true, scenarios[name])
	}
}

func whileRedisStandsStill(f *faulty, machine *lateness) {
	f.Cleanup(f.server.Resume)
	holders := f.holdMany(f.server.Pause)
	f.server.Resume()
	f.takeOver(holders)
	f.checkInTime(holders, machine)
	f.undisturbed(holders)
}

func whileRequestsAreHeldBack(f *faulty, machine *lateness) {
	holders := f.holdMany(func() { f.proxy.SetRequests(faultproxy.Hold) })
	f.takeOver(holders)
	f.proxy.Clear()
	// What was held back arrives under the next holder.
	for _, h := range holders {
		n := f.proxy.Count(command("renew", h.key))
		f.proxy.WaitForN(f, command("renew", h.key).And(faultproxy.Forwarded), n, patience)
	}
	f.checkInTime(holders, machine)
	f.undisturbed(holders)
}

func whileTheNetworkIsABlackHole(f *faulty, machine *lateness) {
	holders := f.holdMany(f.proxy.BlackHole)
	release(holders, func(h *holder, err error) {
		assert.ErrorIs(f, err, redislease.ErrUnconfirmed)
	})
	f.takeOver(holders)
	f.checkInTime(holders, machine)
	f.proxy.Clear()
	f.undisturbed(holders)
}

func whileRepliesGetLost(f *faulty, machine *lateness) {
	holders := f.holdMany(func() { f.proxy.SetReplies(faultproxy.Drop) })
	f.takeOver(holders)
	f.checkInTime(holders, machine)
	f.proxy.Clear()
	f.undisturbed(holders)
}

// whileRepliesAreLate delays every reply by a random part of the TTL. Up to half of it no lease is lost.
func whileRepliesAreLate(least, most float64) func(f *faulty, machine *lateness) {
	return func(f *faulty, machine *lateness) {
		f.connections = 3 * holdShared // a late reply keeps its connection busy, and the handshake of a new one is late, too
		delay := func() time.Duration {
			return time.Duration((least + (most-least)*rand.Float64()) * float64(holdTTL))
		}
		holders := f.hold()
		f.proxy.DelayReplies(delay)
		var wg sync.WaitGroup
		over, cancel := context.WithTimeout(context.Background(), 4*holdTTL)
		defer cancel()
		for _, h := range holders {
			wg.Go(func() {
				select {
				case <-h.lease.Context().Done():
					h.doneAt = time.Now()
				case <-over.Done():
				}
			})
		}
		wg.Wait()
		f.proxy.Clear()
		var lost []*holder
		for _, h := range holders {
			if !h.doneAt.IsZero() {
				lost = append(lost, h)
			}
		}
		f.Logf("%d of %d lost", len(lost), len(holders))
		if most <= 0.5 {
			require.Empty(f, lost)
			release(holders, func(_ *holder, err error) { assert.NoError(f, err) })
			return
		}
		f.takeOver(lost)
		f.checkInTime(lost, machine)
		f.undisturbed(lost)
	}
}

// held keeps leases over two TTLs of trouble and checks that none is lost.
func (f *faulty) held(trouble func(over <-chan time.Time)) {
	holders := f.hold()
	trouble(time.After(2 * holdTTL))
	for _, h := range holders {
		require.NoError(f, h.lease.Err())
	}
	f.proxy.Clear()
	release(holders, func(*holder, error) {}) // its connection may have been reset
}

// release releases all leases at once.
func release(holders []*holder, check func(h *holder, err error)) {
	var wg sync.WaitGroup
	for _, h := range holders {
		wg.Go(func() { check(h, h.lease.Release()) })
	}
	wg.Wait()
}

func whileOpenConnectionsAreSilent(f *faulty, _ *lateness) {
	f.held(func(over <-chan time.Time) {
		f.proxy.Silence()
		<-over
	})
}

func whileRedisRefusesForAWhile(f *faulty, _ *lateness) {
	f.held(func(over <-chan time.Time) {
		rule := f.proxy.On(faultproxy.Command("EVAL")).Do(faultproxy.AnswerError("LOADING Redis is loading the dataset in memory"))
		time.Sleep(holdTTL / 2)
		require.Positive(f, rule.Hits())
		f.proxy.Clear()
		<-over
	})
}

func whileConnectionsAreReset(f *faulty, _ *lateness) {
	f.held(func(over <-chan time.Time) {
		for {
			select {
			case <-over:
				return
			case <-time.After(20*time.Millisecond + rand.N(130*time.Millisecond)):
				f.proxy.ResetConns()
			}
		}
	})
}
