package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

// traffic is a hook that takes note of what a client sends by itself and in pipelines.
type traffic struct {
	mu        sync.Mutex
	alone     []string // keys whose renewals went by themselves
	pipelines [][]string
	fault     func(execute func() error) error // of pipelines, if set
}

func (w *traffic) DialHook(next redis.DialHook) redis.DialHook { return next }

func (w *traffic) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if nameOf(cmd) == "renew" {
			w.mu.Lock()
			w.alone = append(w.alone, keyOf(cmd))
			w.mu.Unlock()
		}
		return next(ctx, cmd)
	}
}

func (w *traffic) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if nameOf(cmds[0]) != "renew" { // a handshake
			return next(ctx, cmds)
		}
		var keys []string
		for _, cmd := range cmds {
			keys = append(keys, keyOf(cmd))
		}
		w.mu.Lock()
		w.pipelines = append(w.pipelines, keys)
		fault := w.fault
		w.mu.Unlock()
		if fault == nil {
			return next(ctx, cmds)
		}
		return fault(func() error { return next(ctx, cmds) })
	}
}

func keyOf(cmd redis.Cmder) string { return cmd.Args()[3].(string) }

// meets has pipelines meet a fault from now on.
func (w *traffic) meets(fault func(execute func() error) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fault = fault
}

// forget returns what was sent since the last call.
func (w *traffic) forget() (alone []string, pipelines [][]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.alone, w.pipelines = nil, nil }()
	return w.alone, w.pipelines
}

// many is a bubble in which the renewals of one Locker's leases are due at the same moment, a second after they were
// acquired.
type many struct {
	*bubbled
	wire   *traffic
	locker *redislease.Locker
	events record
	leases []*redislease.Lease
	due    time.Duration
}

const (
	manyTTL    = 3 * time.Second
	manyLeases = 10
)

func withMany(t *testing.T, test func(t *testing.T, m *many)) {
	bubble(t, func(t *testing.T, b *bubbled) {
		m := &many{bubbled: b, wire: new(traffic)}
		b.redis.AddHook(m.wire)
		m.locker = newLocker(t, b.redis, redislease.WithTTL(manyTTL), redislease.WithObserver(m.events.observe))
		require.NoError(t, acquire(t, m.locker, "check").Release())
		m.wire.forget()
		redislease.SetRandom(m.locker, func() float64 { return 0 })
		for i := range manyLeases {
			m.leases = append(m.leases, acquire(t, m.locker, fmt.Sprint("orders:", i)))
		}
		m.due = b.now() + manyTTL/3
		test(t, m)
		for _, l := range m.leases {
			_ = l.Release()
		}
	})
}

// until lets the time pass, from the start.
func (m *many) until(at time.Duration) {
	time.Sleep(at - m.now())
	synctest.Wait()
}

func TestRenewalsThatAreDueTogetherAreSentTogether(t *testing.T) {
	withMany(t, func(t *testing.T, m *many) {
		m.until(m.due - 1)
		alone, pipelines := m.wire.forget()
		require.Empty(t, alone)
		require.Empty(t, pipelines)
		m.until(m.due)
		alone, pipelines = m.wire.forget()
		require.Empty(t, alone)
		require.Len(t, pipelines, 1)
		require.Len(t, pipelines[0], manyLeases)
		for i, l := range m.leases {
			require.NoError(t, l.Err())
			require.Greater(t, m.redis.PTTL(context.Background(), l.Key()).Val(), manyTTL*9/10, i)
			require.Equal(t, manyTTL*9/10, time.Until(l.Until()), "trust counts from the write")
		}
		time.Sleep(time.Hour / 2)
		require.NotContains(t, m.events.kinds(), redislease.EventLost)
	})
}

func TestRenewalsThatAreDueWithinATickAreSentTogether(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		w := new(traffic)
		b.redis.AddHook(w)
		k := newLocker(t, b.redis, redislease.WithTTL(manyTTL)) // a tick is 10 ms
		redislease.SetRandom(k, func() float64 { return 0 })
		keys := []string{"a", "b", "c", "d", "e", "f"}
		for _, key := range keys {
			l := acquire(t, k, key)
			defer func() { require.NoError(t, l.Release()) }()
			time.Sleep(2 * time.Millisecond)
		}
		w.forget() // the check of the scripts
		time.Sleep(manyTTL/3 - 12*time.Millisecond)
		synctest.Wait()
		alone, pipelines := w.forget()
		require.Equal(t, [][]string{keys[:5]}, pipelines, "in the order in which they were set")
		require.Empty(t, alone)
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		alone, pipelines = w.forget()
		require.Empty(t, pipelines)
		require.Equal(t, keys[5:], alone, "a single one needs no pipeline")
	})
}

func TestRenewalsOfAFewLeasesAreSentOneByOne(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		w := new(traffic)
		b.redis.AddHook(w)
		k := newLocker(t, b.redis)
		redislease.SetRandom(k, func() float64 { return 0 })
		var want int
		for i := range 3 {
			interval := time.Duration(5-i) * time.Second
			l := acquire(t, k, fmt.Sprint("orders:", i), redislease.WithRenewInterval(interval))
			defer func() { require.NoError(t, l.Release()) }()
			want += int(30 * time.Minute / interval)
			time.Sleep(100 * time.Millisecond) // no two are ever due together
		}
		time.Sleep(30 * time.Minute)
		alone, pipelines := w.forget()
		require.Empty(t, pipelines)
		require.InDelta(t, want, len(alone), 3)
	})
}

func TestRenewalsThatFollowEachOtherCloselyDoNotWait(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(200*time.Millisecond), redislease.WithRenewInterval(time.Millisecond))
		redislease.SetRandom(k, func() float64 { return 0 })
		begun := b.now()
		l := b.acquire(k)
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, l.Release())
		for i, at := range b.sent("renew", begun) {
			require.Equal(t, begun+time.Duration(i+1)*time.Millisecond, at)
		}
	})
}

func TestALeaseThatEndsBeforeAPipelineIsWrittenIsNotRenewed(t *testing.T) {
	withMany(t, func(t *testing.T, m *many) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		cancelled, err := m.locker.TryAcquire(ctx, "orders:cancelled")
		require.NoError(t, err)
		defer func() { require.NoError(t, cancelled.Release()) }()
		written := make(chan struct{})
		m.wire.meets(func(execute func() error) error {
			<-written
			return execute()
		})
		m.until(m.due + 10*time.Millisecond)
		released := m.leases[4]
		require.NoError(t, released.Release())
		cancel()
		close(written)
		synctest.Wait()
		_, pipelines := m.wire.forget()
		require.Len(t, pipelines, 1)
		require.Len(t, pipelines[0], manyLeases+1)
		for _, l := range m.leases {
			if l != released {
				require.Equal(t, manyTTL*9/10, time.Until(l.Until()))
			}
		}
		require.Equal(t, manyTTL*9/10-m.now()+m.due-manyTTL/3, time.Until(cancelled.Until()), "as it was")
		require.LessOrEqual(t, m.redis.PTTL(context.Background(), cancelled.Key()).Val(), manyTTL*2/3)
		require.Zero(t, redislease.InFlight(cancelled))
		require.Zero(t, m.redis.Exists(context.Background(), released.Key()).Val())
		require.NotContains(t, m.events.kinds(), redislease.EventRenewFailed)
	})
}

func TestOneLossInAPipelineIsTheLossOfOneLease(t *testing.T) {
	withMany(t, func(t *testing.T, m *many) {
		require.NoError(t, m.redis.Del(context.Background(), "orders:3").Err())
		require.NoError(t, m.redis.Set(context.Background(), "orders:4", "other", 0).Err())
		m.until(m.due)
		for i, l := range m.leases {
			switch i {
			case 3:
				require.ErrorIs(t, l.Err(), redislease.ErrGone)
			case 4:
				require.ErrorIs(t, l.Err(), redislease.ErrTaken)
			default:
				require.NoError(t, l.Err())
			}
		}
	})
}

func TestAPipelineThatFailsIsMadeUpForByRenewalsOneByOne(t *testing.T) {
	reset := errors.New("connection reset by peer")
	for name, around := range map[string]func(execute func() error, over <-chan struct{}) error{
		"it is not sent":            func(func() error, <-chan struct{}) error { return reset },
		"a hook panics":             func(func() error, <-chan struct{}) error { panic("of a hook") },
		"a hook ends its goroutine": func(func() error, <-chan struct{}) error { runtime.Goexit(); return nil },
		"a hook pretends":           func(func() error, <-chan struct{}) error { return nil },
		"it is never answered":      func(_ func() error, over <-chan struct{}) error { <-over; return reset },
	} {
		t.Run(name, func(t *testing.T) {
			withMany(t, func(t *testing.T, m *many) {
				over := make(chan struct{})
				defer close(over)
				m.wire.meets(func(execute func() error) error { return around(execute, over) })
				m.until(m.due)
				_, pipelines := m.wire.forget()
				require.Len(t, pipelines, 1)
				require.Len(t, pipelines[0], manyLeases)
				m.until(m.due + manyTTL/10)
				alone, _ := m.wire.forget()
				for _, key := range pipelines[0] {
					require.Contains(t, alone, key, "it is renewed by itself")
				}
				for range 600 { // some renewals meet the fault again
					time.Sleep(100 * time.Millisecond)
					for _, l := range m.leases {
						require.NoError(t, l.Err())
						require.Positive(t, time.Until(l.Until()))
					}
				}
			})
		})
	}
}

func TestAnErrorOfAPipelineIsNotThatOfACommandThatWasAnswered(t *testing.T) {
	withMany(t, func(t *testing.T, m *many) {
		m.wire.meets(func(execute func() error) error {
			_ = execute()
			return errors.New("of a hook, afterwards")
		})
		m.until(m.due)
		require.NotContains(t, m.events.kinds(), redislease.EventRenewFailed)
		for _, l := range m.leases {
			require.Equal(t, manyTTL*9/10, time.Until(l.Until()))
		}
	})
}

func TestAnObserverThatBlocksHoldsUpNoOtherLeaseOfAPipeline(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		blocked := make(chan struct{})
		var mu sync.Mutex
		renewed := map[string]int{}
		k := newLocker(t, b.redis, redislease.WithTTL(manyTTL), redislease.WithObserver(func(_ context.Context, e redislease.Event) {
			if e.Kind != redislease.EventRenewed {
				return
			}
			mu.Lock()
			renewed[e.Key]++
			mu.Unlock()
			<-blocked
		}))
		redislease.SetRandom(k, func() float64 { return 0 })
		for i := range manyLeases {
			l := acquire(t, k, fmt.Sprint("orders:", i))
			defer func() { require.NoError(t, l.Release()) }()
		}
		defer close(blocked)
		time.Sleep(manyTTL / 3)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		for i := range manyLeases {
			require.Equal(t, 1, renewed[fmt.Sprint("orders:", i)], i)
		}
	})
}

// embedding is a wrapper that has the methods of its client, but wants to see each command.
type embedding struct {
	*redis.Client
	wrapper redislease.RedisClient
}

func (e embedding) Process(ctx context.Context, cmd redis.Cmder) error {
	return e.wrapper.Process(ctx, cmd)
}

func TestAWrapperSeesEachRenewalByItself(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		w := new(traffic)
		b.redis.AddHook(w)
		b.client = embedding{b.redis, b.client}
		k := b.locker(redislease.WithTTL(manyTTL))
		redislease.SetRandom(k, func() float64 { return 0 })
		for i := range manyLeases {
			l := acquire(t, k, fmt.Sprint("orders:", i))
			defer func() { require.NoError(t, l.Release()) }()
		}
		begun := b.now()
		time.Sleep(manyTTL / 3)
		synctest.Wait()
		sent := b.sent("renew", 0)
		require.Len(t, sent, manyLeases)
		for _, at := range sent {
			require.Equal(t, begun+manyTTL/3, at, "all at one moment")
		}
		_, pipelines := w.forget()
		require.Empty(t, pipelines)
	})
}
