package sim

import (
	"context"
	"errors"
	"time"

	"github.com/redislease/redislease"
)

// How acquisitions end, and how they wait.

// begin takes note of a call of a verb.
func (o *oracle) begin(a *acquisition) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.start = time.Now()
	a.id = uint64(len(o.all) + 1)
	o.all = append(o.all, a)
	o.tally.Acquisitions++
	a.seen = a.p.seen
	t := o.truthOf(a.key)
	a.foreign = t.now() != item{}
	t.open = append(t.open, a)
}

// finish takes note of what a verb has returned, and checks it.
func (o *oracle) finish(a *acquisition, l *redislease.Lease, err error) {
	o.mu.Lock()
	a.over, a.err, a.lease = true, err, l
	now := time.Now()
	o.boundedLocked(a, now)
	o.sparingLocked(a, now)
	t := o.truthOf(a.key)
	if l == nil {
		if o.refusedLocked(a); len(a.ends) > 0 {
			o.ownLocked(a, a.left, a.endedAt)
		}
		o.closeLocked(t, a)
		o.mu.Unlock()
		return
	}
	o.tally.Leases++
	for _, g := range a.grants {
		if g.token == l.Token() {
			a.grant = g
		}
	}
	if a.grant == nil {
		o.violateLocked(a, wrongToken, "")
		a.grant = &grant{a: a, robbed: true}
	}
	o.inTurnLocked(t, a, now)
	o.hasFenceLocked(a)
	if a.terms.fencing {
		o.tally.Fenced++
		a.p.seen = max(a.p.seen, a.draw.fence)
	}
	left := time.Until(l.Until())
	capped := a.grant.written.Add(a.terms.maxHold).Before(now.Add(a.terms.useful() / 3))
	exact := !a.slow && !a.p.stood(a.start, a.terms.interval)
	switch {
	case exact && (left < -slack || !a.ctxEnd.IsZero() && now.After(a.ctxEnd.Add(slack))):
		o.violateLocked(a, handedOutEnded, "%v", left)
	case exact && !o.w.weather.steps && !a.p.stood(time.Time{}, 0):
		end := a.grant.written.Add(a.terms.maxHold)
		if at, ok := a.ctx.Deadline(); ok && at.Before(end) {
			end = at
		}
		early := a.grant.written.Sub(a.grant.called) // it may have been marshalled before for a connection that was broken
		if at, ok := l.Context().Deadline(); !ok || at.Sub(end) > slack || end.Sub(at) > early+slack {
			o.violateLocked(a, wrongUntil, "a deadline off by %v", at.Sub(end))
		}
	}
	if left < a.terms.useful()/3-slack && !capped && !a.slow && !a.p.stood(a.start, a.terms.interval) {
		o.violateLocked(a, littleTrust, "%v", left)
	}
	if !a.slow { // else its watchdog has been at it for a while
		o.followLocked(a.grant, now.Add(time.Nanosecond), false)
	}
	o.mu.Unlock()
	o.write(a)
}

// inTurnLocked checks that nobody in the process who waits for the key, and came earlier, could still have been served.
func (o *oracle) inTurnLocked(t *truth, a *acquisition, now time.Time) {
	if !a.waiting || a.slow || a.p.stood(a.start, 0) {
		return
	}
	for _, other := range t.open {
		if other.p != a.p || !other.waiting || !other.start.Before(a.start) || other.over || len(other.ends) > 0 || other.ending || other.failing >= 2 {
			continue
		}
		bounded := other.terms.timeout > 0 && !now.Before(other.start.Add(other.terms.timeout-slack))
		if !bounded && other.ctx.Err() == nil && (other.ctxEnd.IsZero() || now.Before(other.ctxEnd)) && !o.w.weather.steps {
			o.violateLocked(a, outOfTurn, "acquisition %d", other.id)
		}
	}
}

// heard: a process is being told that a key was released, or that it will be told of that from now on. Somebody who waits
// has to try then. In a calm world that can be seen.
func (o *oracle) heard(p *process, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.w.weather.calm {
		return
	}
	t, now := o.truthOf(key), time.Now()
	var waiters []*acquisition
	for _, a := range t.open {
		if a.p == p && a.waiting && !a.over {
			a.signals++
			waiters = append(waiters, a)
		}
	}
	if len(waiters) == 0 {
		return
	}
	within := soon
	if now.Sub(waiters[0].start) < soon { // it may have to connect, and to check the scripts
		within = 3 * soon
	}
	time.AfterFunc(within, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		for _, a := range waiters {
			bounded := a.terms.timeout > 0 && time.Since(a.start) >= a.terms.timeout
			if a.over || len(a.ends) > 0 || bounded || a.ctx.Err() != nil {
				return // who has the key, or leaves, need not try
			}
		}
		if t.tried[p].Before(now) {
			o.violateLocked(waiters[0], unheeded, "%v after it", time.Since(now))
		}
	})
}

// sparingLocked checks that a waiter in a calm world has sent no more than one command for each signal, some while its
// polls were growing rarer, and then about one a second, or two if a key lives no longer. A command may be repeated once
// where an answer takes longer than a tenth of the TTL.
func (o *oracle) sparingLocked(a *acquisition, now time.Time) {
	most := 2 * (10 + a.signals + 2*int(now.Sub(a.start)/time.Second))
	if o.w.weather.calm && a.waiting && !a.terms.backoff && a.tries > most {
		o.violateLocked(a, tooManyTries, "%d in %v with %d signals", a.tries, now.Sub(a.start), a.signals)
	}
}

func (o *oracle) closeLocked(t *truth, a *acquisition) {
	for i, other := range t.open {
		if other == a {
			t.open = append(t.open[:i], t.open[i+1:]...)
			return
		}
	}
}

// boundedLocked checks that an acquisition ended when it had to.
func (o *oracle) boundedLocked(a *acquisition, now time.Time) {
	bound := a.terms.timeout
	if bound == 0 && !a.waiting {
		bound = min(a.terms.useful(), 5*time.Second)
	}
	grace := min(a.terms.ttl/10, 100*time.Millisecond) + slack
	end := a.ctxEnd
	if at := a.start.Add(bound); bound > 0 && (end.IsZero() || at.Before(end)) {
		end = at
	}
	for _, g := range a.grants {
		if at := g.written.Add(a.terms.useful()); !a.waiting && !a.hooked && g.unclear && !g.written.IsZero() && (end.IsZero() || at.Before(end)) {
			end = at
		}
	}
	if !end.IsZero() && now.Sub(end) > grace && !a.slow && !a.p.stood(a.start, 2*a.terms.ttl) {
		o.violateLocked(a, boundExceeded, "an acquisition by %v", now.Sub(end))
	}
}

// refusedLocked checks an acquisition that ended without a lease.
func (o *oracle) refusedLocked(a *acquisition) {
	err := a.err
	contextual := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	switch {
	case err == nil:
		o.violateLocked(a, wrongError, "neither a lease nor an error")
	case contextual && a.ctx.Err() == nil:
		o.violateLocked(a, wrongError, "%v, and the context goes on", err)
	case errors.Is(err, redislease.ErrNotAcquired) && errors.Is(err, redislease.ErrOutcomeUnknown):
		o.violateLocked(a, wrongError, "%v", err)
	case errors.Is(err, redislease.ErrLost) || errors.Is(err, redislease.ErrReleased):
		o.violateLocked(a, wrongError, "%v", err)
	}
	if o.unbounded(a) && !contextual && a.ctx.Err() == nil && !a.yes && a.failing < 2 && !o.behindFailure(a) {
		o.violateLocked(a, gaveUpEarly, "after %d: %v", a.failing, err)
	}
	untold, unclear := a.yes || a.hooked, false // tokens without an answer of their own, and without any
	asked := false
	for _, g := range a.grants {
		untold, unclear = untold || !g.told, unclear || g.unclear
		asked = asked || !g.written.IsZero()
	}
	switch {
	case errors.Is(err, redislease.ErrOutcomeUnknown):
		o.tally.Unknown++
		if !untold && !unclear {
			o.violateLocked(a, needlessUnknown, "%v", err)
		}
		if o.w.weather.calm && a.waiting && a.terms.timeout == 0 && a.ctxEnd.IsZero() {
			o.violateLocked(a, calmTroubled, "%v", err)
		}
		return
	case errors.Is(err, redislease.ErrNotAcquired):
		o.tally.Held++
		if !a.foreign && asked && !(a.p.noBoot && o.w.weather.steps) { // without a third clock a command may seem forgotten
			o.violateLocked(a, wrongHeld, "%v", err)
		}
		if a.last == "refused" {
			o.violateLocked(a, notTheLastAnswer, "%v", err)
		}
	default:
		if a.last == "held" && !a.yes && !unclear && a.ctx.Err() == nil {
			o.violateLocked(a, notTheLastAnswer, "%v", err)
		}
		o.tally.Failed++
		if o.w.weather.calm && a.ctx.Err() == nil && a.terms.timeout == 0 {
			o.violateLocked(a, calmTroubled, "%v", err)
		}
	}
}

// behindFailure: a has stood behind one of its process whose commands failed, or were not answered.
func (o *oracle) behindFailure(a *acquisition) bool {
	if a.calls > 0 {
		return false
	}
	if a.p.failed[a.key].After(a.start.Add(-4 * ttlMost)) {
		return true
	}
	for _, other := range o.all {
		if other.p == a.p && other.key == a.key && other.waiting && other.pending > 0 && other.start.Before(a.start) {
			return true
		}
	}
	return false
}

// ownLocked checks that the key did not hold a token of an acquisition that says that it took nothing.
func (o *oracle) ownLocked(a *acquisition, held item, now time.Time) {
	err := a.err
	if errors.Is(err, redislease.ErrOutcomeUnknown) {
		return
	}
	g := o.grants[held.value]
	if g == nil || g.a != a || g.robbed || g.took.Sub(g.written) >= a.terms.ttl || a.p.noBoot && o.w.weather.steps {
		return // without a third clock a command may seem so old that it is not reckoned with any more
	}
	if errors.Is(err, redislease.ErrNotAcquired) && g.took.After(a.noAt) {
		return // a command that came late, after another had been found to hold the key
	}
	if now.Sub(g.written) < 2*a.terms.ttl {
		o.violateLocked(a, ownKeyHeld, "%v", err)
	}
}

// unbounded: nothing but failures ends it.
func (o *oracle) unbounded(a *acquisition) bool {
	_, deadline := a.ctx.Deadline()
	return a.waiting && a.terms.timeout == 0 && !deadline
}

// starved checks, in a world that has long been well, that nobody waits for a key that is free.
func (o *oracle) starved() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, a := range o.all {
		t := o.truthOf(a.key)
		if !a.over && t.now() == (item{}) && time.Since(t.free()) > ttlMost {
			o.violateLocked(a, leftAlone, "for %v", time.Since(t.free()))
		}
	}
}
