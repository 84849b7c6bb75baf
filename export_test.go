package redislease

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Skew moves the clocks that a Locker reads, as a suspended machine or an operator does.
type Skew struct {
	Monotonic, Wall, Boot atomic.Int64 // nanoseconds
	NoBoot                atomic.Bool  // as on a system without such a clock
}

// Suspend lets d pass on the clocks that run while a machine is suspended.
func (s *Skew) Suspend(d time.Duration) {
	s.Wall.Add(int64(d))
	s.Boot.Add(int64(d))
}

// SetSkew makes k, which has no leases, read its clocks through s.
func SetSkew(k *Locker, s *Skew) {
	for watching := true; watching; { // that reads them, too
		time.Sleep(clockLook)
		k.alarms.watch.mu.Lock()
		watching = k.alarms.watch.watches
		k.alarms.watch.mu.Unlock()
	}
	k.anchor.Store(nil) // it was made by another clock
	since := k.clock.since
	k.clock.since = func(base *instant) (monotonic, wall time.Duration, now time.Time) {
		monotonic, wall, now = since(base)
		return monotonic + time.Duration(s.Monotonic.Load()), wall + time.Duration(s.Wall.Load()), now
	}
	k.clock.boot = func() (time.Duration, bool) {
		// In a bubble the system's own is not faked, so this one follows the bubble's time.
		return time.Duration(time.Now().UnixNano() + s.Boot.Load()), !s.NoBoot.Load()
	}
}

// SetClock makes k read its clocks, set its timers and draw its jitter through the given functions. since takes a base by
// when it was, so that clocks can be off by more or less from then on.
func SetClock(k *Locker, since func(base time.Time) (monotonic, wall time.Duration), boot func() (time.Duration, bool),
	afterFunc func(time.Duration, func()) *time.Timer, random func() float64) {
	k.anchor.Store(nil) // it was made by another clock
	k.clock.since = func(base *instant) (monotonic, wall time.Duration, now time.Time) {
		monotonic, wall = since(base.time)
		return monotonic, wall, time.Now()
	}
	k.clock.boot, k.clock.afterFunc, k.clock.random = boot, afterFunc, random
}

// SetRandom makes k draw its jitter from f.
func SetRandom(k *Locker, f func() float64) { k.clock.random = f }

// SetAlarms has what k does be moved together by up to a part of the interval, and several renewals sent by f.
func SetAlarms(k *Locker, part int, f func(cmds []redis.Cmder) error) {
	k.config.ticks, k.alarms.pipeline = part, f
	_ = k.config.resolve()
}

// InFlight returns how many renewals of l are in flight.
func InFlight(l *Lease) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.flights)
}

// AwaitListening waits until Redis has confirmed that k listens to releases of the key, and has been asked once more.
func AwaitListening(t testing.TB, k *Locker, key string) {
	t.Helper()
	awaitLine(t, k, key, "nobody listens", func(l *line) bool { return l.listening && !l.heard })
}

// AwaitHeld waits until whoever waits for the key through k has been told that another holds it.
func AwaitHeld(t testing.TB, k *Locker, key string) {
	t.Helper()
	awaitLine(t, k, key, "nobody was told", func(l *line) bool { return l.last == answerHeld })
}

func awaitLine(t testing.TB, k *Locker, key, otherwise string, ok func(l *line) bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		k.queues.mu.Lock()
		l := k.queues.lines[key]
		done := l != nil && ok(l)
		k.queues.mu.Unlock()
		if done {
			return
		}
	}
	t.Fatal(otherwise)
}
