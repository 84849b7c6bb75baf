package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// outcome is what came of one loop, or of the drains of one slot.
type outcome struct {
	turns    int
	handoffs int             // turns of another than the last
	gaps     []time.Duration // release called → the next acquire returned, if that is a handoff
	fairness []float64       // longest wait / median wait, of each drain or loop
	took     time.Duration
	commands float64
	client   float64 // CPU seconds
	server   float64 // CPU seconds
	drains   int
	unserved int // who never had the key
	late     int // handoffs that took longer than anything but a poll explains
	overlaps int // acquisitions that returned before the release of the one before was called
	failures int
	invalid  int
}

// lateAfter is far above what a busy machine delays a wake-up by.
const lateAfter = 500 * time.Millisecond

// fold adds the turns of a drain or a loop, and for how long others waited in vain. freed is when the key was let go;
// zero: nobody held it. It returns when the last was served.
func (o *outcome) fold(replies []reply, freed time.Time) (last time.Time) {
	var turns []turn
	var waits []float64
	for _, r := range replies {
		turns = append(turns, r.Turns...)
		o.failures += r.Failures
		o.invalid += r.Invalid
		for _, w := range r.Waiting {
			waits = append(waits, w.Seconds())
		}
	}
	slices.SortFunc(turns, func(a, b turn) int { return a.Acquired.Compare(b.Acquired) })
	previous, released := -1, freed
	for _, t := range turns {
		o.turns++
		if t.Acquired.Before(released) {
			o.overlaps++
		}
		if t.Waiter != previous && !released.IsZero() {
			gap := t.Acquired.Sub(latest(released, t.Called))
			o.handoffs++
			o.gaps = append(o.gaps, gap)
			if gap > lateAfter {
				o.late++
			}
		}
		waits = append(waits, t.Acquired.Sub(latest(t.Called, freed)).Seconds())
		previous, released, last = t.Waiter, t.Released, t.Acquired
	}
	if m := median(waits); m > 0 {
		o.fairness = append(o.fairness, slices.Max(waits)/m)
	}
	return last
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

const (
	columnHandoffs = "handoffs/s"
	columnGapP50   = "gap p50 µs"
	columnGapP99   = "gap p99 µs"
	columnGapMax   = "gap max ms"
	columnCommands = "cmds/handoff"
	columnIdle     = "idle cmds/s/process"
	columnClient   = "client µs/handoff"
	columnServer   = "server µs/handoff"
	columnFairness = "max/median wait"
	columnSelf     = "self %"
	columnDrains   = "drains"
	columnLate     = "late"
	columnUnserved = "unserved"
)

// values are those that a drain and a loop have in common.
func (o *outcome) values() map[string]float64 {
	n := float64(o.handoffs)
	perHandoff := func(v float64) float64 {
		if o.handoffs == 0 {
			return math.NaN()
		}
		return v / n
	}
	return map[string]float64{
		columnHandoffs: n / o.took.Seconds(),
		columnGapP50:   micros(quantile(o.gaps, 0.5)),
		columnGapP99:   micros(quantile(o.gaps, 0.99)),
		columnGapMax:   millis(quantile(o.gaps, 1)),
		columnCommands: perHandoff(o.commands),
		columnClient:   perHandoff(o.client * 1e6),
		columnServer:   perHandoff(o.server * 1e6),
		columnFairness: median(o.fairness),
	}
}

func (o *outcome) problem() string {
	if o.overlaps == 0 && o.failures == 0 && o.invalid == 0 {
		return ""
	}
	return fmt.Sprintf("%d overlaps, %d failed calls, %d leases lost before their release", o.overlaps, o.failures, o.invalid)
}
