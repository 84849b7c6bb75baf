package sim

import (
	"time"
)

// weather is what goes wrong in a world, and how often. It follows from the seed: each kind of fault is there in some
// worlds and not in others, so that rare combinations are not drowned.
type weather struct {
	calm bool // nothing goes wrong

	// The network, for each message.
	latency             time.Duration // of most messages, up to
	slow                time.Duration // of all messages, in addition, up to
	cut, late, vanishes float64
	lateBy              time.Duration // up to

	// The network, for each process: from time to time everything in one direction, or in both, is held up or lost.
	partitions bool

	// The server, for each command.
	refuses float64 // an error reply that says that nothing was done
	garbles float64 // a reply of which nobody knows what it means

	// The server, from time to time.
	hangs, restarts, failovers, jumps, refusesAll bool

	// Whether it refuses to be listened to.
	deaf bool

	// Whether it refuses TIME, and how often it evicts a fence that was just drawn.
	noTime bool
	evicts float64

	// Operators.
	operators bool

	// Processes and their machines.
	pauses, suspends, steps bool

	// Hooks and wrappers of the client, for each command.
	hooks float64

	refusedDials float64
}

func weatherOf(seed uint64) (w weather) {
	c := from(seed, name("weather"))
	w.latency = []time.Duration{time.Millisecond, 5 * time.Millisecond, 50 * time.Millisecond}[c.below(3)]
	if w.calm = seed%16 == 0; w.calm {
		return w
	}
	rate := func(most float64) float64 {
		if c.hits(0.4) {
			return 0
		}
		return most * c.unit()
	}
	w.cut, w.late, w.vanishes = rate(0.1), rate(0.1), rate(0.05)
	w.lateBy = 2 * ttlMost
	if c.hits(0.5) {
		w.lateBy = ttlLeast
	}
	if c.hits(0.2) {
		w.slow = c.between(ttlLeast/20, ttlLeast/2)
	}
	w.refuses, w.garbles, w.hooks, w.refusedDials = rate(0.2), rate(0.05), rate(0.1), rate(0.2)
	for _, b := range []*bool{&w.partitions, &w.hangs, &w.refusesAll, &w.pauses, &w.suspends, &w.steps} {
		*b = c.hits(0.4)
	}
	for _, b := range []*bool{&w.restarts, &w.failovers, &w.jumps, &w.operators} {
		*b = c.hits(0.25)
	}
	w.noTime, w.evicts = c.hits(0.2), rate(0.2)
	w.deaf = c.hits(0.1)
	return w
}

// fate decides about a message.
func (t *weather) fate(w *world, p *process, direction int, c *chance, now time.Time) (f fate) {
	f.delay = c.between(t.latency/10, t.latency)
	if t.slow > 0 {
		f.delay += c.between(0, t.slow)
	}
	if w.healed(now) {
		return f
	}
	if until, lost := p.parted(direction, now); until.After(now) {
		if lost && c.hits(0.5) {
			w.count("message lost in a partition")
			return fate{kind: vanishes}
		}
		w.count("message held up in a partition")
		f.delay += until.Sub(now)
		return f
	}
	switch x := c.unit(); {
	case x < t.cut/2:
		f.kind = cutBefore
		w.count("connection reset before a message")
	case x < t.cut:
		f.kind = cutAfter
		w.count("connection reset after a message")
	case x < t.cut+t.late:
		f.delay += c.between(0, t.lateBy)
		w.count("message late")
	case x < t.cut+t.late+t.vanishes:
		f.kind = vanishes
		w.count("connection gone silent")
	}
	return f
}
