package redislease

import (
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// clock is what a Locker knows of time and chance. Tests replace its fields, for one Locker at a time.
//
// Go's monotonic clock stands still while a machine is suspended (a laptop, a VM), whereas Redis goes on counting.
// The wall clock is set right by the system when it wakes, but it can also be set at any other time. So both are
// read, the greater counts, and where they differ too much a clock that does run during a suspend decides, if the
// system has one.
type clock struct {
	// since says how long ago base was, by the monotonic and by the wall clock, and what time it is.
	since func(base *instant) (monotonic, wall time.Duration, now time.Time)
	// boot reads a clock that runs during a suspend, too; false where there is none.
	boot func() (time.Duration, bool)
	// afterFunc is time.AfterFunc.
	afterFunc func(d time.Duration, f func()) *time.Timer
	// random is uniform in [0, 1).
	random func() float64
}

// instant is a moment by all clocks. Other readings are relative to one that each acquisition makes for itself.
type instant struct {
	time      time.Time
	boot      time.Duration
	monotonic time.Duration // since the Locker's first one
}

var systemClock = clock{
	since: func(base *instant) (monotonic, wall time.Duration, now time.Time) {
		now = time.Now()
		return now.Sub(base.time), time.Duration(now.UnixNano() - base.time.UnixNano()), now
	},
	boot:      bootTime,
	afterFunc: time.AfterFunc,
	random:    rand.Float64,
}

// anchorDrift is by how much the wall clock may have moved away from the monotonic one since an anchor was made.
const anchorDrift = time.Millisecond

// now returns the present moment. The boot clock is dear to read, so it is reckoned from an earlier moment for as long as
// the other two have gone on together since: there was no suspend then, or it was hidden by a step of the wall clock, and
// the reading lags behind. Both make it look longer ago, never shorter.
func (c *clock) now(anchor *atomic.Pointer[instant]) instant {
	for {
		a := anchor.Load()
		if a != nil {
			monotonic, wall, now := c.since(a)
			if apart := wall - monotonic; apart <= anchorDrift && apart >= -anchorDrift {
				return instant{now, a.boot + monotonic, a.monotonic + monotonic}
			}
		}
		boot, _ := c.boot() // before the others, or it lagged behind
		made := instant{time.Now(), boot, 0}
		if a != nil {
			monotonic, _, now := c.since(a)
			made.time, made.monotonic = now, a.monotonic+monotonic
		}
		if anchor.CompareAndSwap(a, &made) {
			return made
		}
	}
}

// elapsed returns how long ago base was. The monotonic and the wall clock may differ by tolerance before a third clock
// is asked. ahead belongs to base: it keeps by how much the result has been ahead of the monotonic clock, which it
// stays, so that two readings can be compared whatever the other clocks did in between.
func (c *clock) elapsed(base *instant, tolerance time.Duration, ahead *atomic.Int64) time.Duration {
	monotonic, wall, _ := c.since(base)
	reading := max(monotonic, wall)
	if apart := wall - monotonic; apart > tolerance || apart < -tolerance {
		if boot, ok := c.boot(); ok {
			reading = max(monotonic, boot-base.boot)
		}
	}
	for {
		most := ahead.Load()
		if lead := int64(reading - monotonic); lead <= most || ahead.CompareAndSwap(most, lead) {
			return monotonic + time.Duration(max(lead, most))
		}
	}
}

// jitter returns d shortened at random by up to the given part of it.
func (c *clock) jitter(d time.Duration, part float64) time.Duration {
	return d - time.Duration(float64(d)*part*c.random())
}

const forever = time.Duration(math.MaxInt64)

// later adds a duration of at least zero to a reading, and stops at the greatest one.
func later(t, d time.Duration) time.Duration {
	if t > forever-d {
		return forever
	}
	return t + d
}
