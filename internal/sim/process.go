package sim

import (
	"context"
	"sync"
	"time"
)

// process is one client's process and machine. It can be paused (SIGSTOP, a frozen container), suspended together with
// its machine (a laptop), and have its wall clock set.
//
// A bubble's time cannot do that: all its goroutines run on. So while a process stands still nothing reaches it, its
// timers and deadlines fire after it, and its own code passes a gate whenever it has slept.
type process struct {
	w      *world
	name   string
	place  uint64
	noBoot bool // its system has no clock that runs during a suspend

	mu      sync.Mutex
	until   time.Time // when it goes on, if that is to come
	suspend time.Time // when the suspend that until ends began; zero: it is but paused
	still   []span    // when it stood still, oldest first
	skews   []skew    // oldest first
	dials   uint64
	seen    int64                // the greatest fence of its leases; guarded by the oracle
	failed  map[string]time.Time // when a command about a key last failed; guarded by the oracle

	partedUntil [2]time.Time // nothing gets through until then, by direction
	partLoses   bool
}

type span struct {
	from, to  time.Time
	suspended bool
}

// skew is by how much the clocks have been off from a time on.
type skew struct {
	from            time.Time
	monotonic, wall time.Duration
}

// Clock is what a Locker knows of time and chance, for those who can replace it.
type Clock struct {
	// Since says how long ago base was, by the monotonic and by the wall clock.
	Since func(base time.Time) (monotonic, wall time.Duration)
	// Boot reads a clock that runs during a suspend, too.
	Boot      func() (time.Duration, bool)
	AfterFunc func(time.Duration, func()) *time.Timer
	Random    func() float64
}

func (p *process) clock() Clock {
	return Clock{
		Since: func(base time.Time) (monotonic, wall time.Duration) {
			p.w.Yield()
			defer p.w.Yield()
			p.mu.Lock()
			defer p.mu.Unlock()
			now, then := p.skewLocked(time.Now()), p.skewLocked(base)
			d := time.Since(base)
			return d + now.monotonic - then.monotonic, d + now.wall - then.wall
		},
		Boot:      func() (time.Duration, bool) { return time.Duration(time.Now().UnixNano()), !p.noBoot },
		AfterFunc: p.afterFunc,
		Random:    func() float64 { return from(p.place, uint64(time.Now().UnixNano())).unit() },
	}
}

func (p *process) skewLocked(t time.Time) skew {
	for i := len(p.skews) - 1; i >= 0; i-- {
		if !t.Before(p.skews[i].from) {
			return p.skews[i]
		}
	}
	return skew{}
}

// stop makes the process stand still for d.
func (p *process) stop(d time.Duration, suspended bool) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.until, p.suspend = now.Add(d), time.Time{}
	p.still = append(p.still, span{now, p.until, suspended})
	if suspended {
		p.suspend = now
		last := p.skewLocked(now)
		p.skews = append(p.skews, skew{p.until, last.monotonic - d, last.wall})
	}
}

// step sets the wall clock.
func (p *process) step(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := p.skewLocked(time.Now())
	p.skews = append(p.skews, skew{time.Now(), last.monotonic, last.wall + d})
}

// left says for how long the process still stands still.
func (p *process) left() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, time.Until(p.until))
}

// stood says whether the process stood still for a moment since from, or was suspended so recently that it need not have
// noticed: it looks at the clock once a second, and when else it has to.
func (p *process) stood(from time.Time, look time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.still {
		to := s.to
		if s.suspended {
			to = to.Add(min(look, time.Second))
		}
		if to.Add(time.Millisecond).After(from) { // the gates open within a millisecond
			return true
		}
	}
	return false
}

// gate waits until the process runs.
func (p *process) gate() {
	for d := p.left(); d > 0; d = p.left() {
		time.Sleep(d + from(p.place, uint64(time.Now().UnixNano())).between(1, time.Millisecond))
	}
}

// sleep is time.Sleep of code that runs in the process.
func (p *process) sleep(d time.Duration) {
	time.Sleep(d)
	p.gate()
}

// afterFunc is time.AfterFunc of code that runs in the process. A suspended machine's timers fire as much later as the
// suspend took.
func (p *process) afterFunc(d time.Duration, f func()) *time.Timer {
	// A little later, or one that is due already fires at the instant of what the worker does next, in any order. It
	// depends on the moment alone: timers for the same one that are set one after the other are as good as one.
	d = max(0, d)
	d += from(p.place, uint64(time.Now().Add(d).UnixNano())).between(1, time.Microsecond)
	return time.AfterFunc(d, func() {
		p.mu.Lock()
		var late time.Duration
		if !p.suspend.IsZero() && time.Now().Before(p.until) {
			late = p.until.Sub(p.suspend)
		}
		p.mu.Unlock()
		time.Sleep(late)
		p.gate()
		f()
	})
}

// ending returns a context that ends after d, by a timer of the process; with 0 it has ended.
func (p *process) ending(parent context.Context, d time.Duration, cause error) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	if d == 0 {
		cancel(cause)
	}
	timer := p.afterFunc(d, func() { cancel(cause) })
	stop := func() { timer.Stop(); cancel(context.Canceled) }
	if cause != context.DeadlineExceeded {
		return ctx, stop
	}
	return &deadline{ctx, time.Now().Add(d)}, stop
}

// deadline is a context that says when it will end.
type deadline struct {
	context.Context
	at time.Time
}

func (d *deadline) Deadline() (time.Time, bool) { return d.at, true }

func (d *deadline) Err() error {
	if err := d.Context.Err(); err == nil || context.Cause(d.Context) != context.DeadlineExceeded {
		return err
	}
	return context.DeadlineExceeded
}
