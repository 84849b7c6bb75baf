package sim

import (
	"context"
	"errors"
	"time"

	"github.com/redislease/redislease"
)

// What holders do with their leases.

// ended says whether a lease has ended. It asks the context, since Err would look at the clock for the library.
func ended(l *redislease.Lease) bool {
	cause := context.Cause(l.Context())
	return errors.Is(cause, redislease.ErrLost) || errors.Is(cause, redislease.ErrReleased)
}

// hasFenceLocked checks that a lease has the fence that was drawn for it.
func (o *oracle) hasFenceLocked(a *acquisition) {
	got := a.lease.Fence()
	if a.draw.fence == 0 {
		for _, d := range a.grant.draws {
			if d.fence == got {
				a.draw = d
			}
		}
	}
	if a.terms.fencing && got != a.draw.fence || !a.terms.fencing && got != -1 {
		o.violateLocked(a, wrongFence, "%d of %v", got, a.grant.draws)
	}
}

// write is a write of the holder: it asks Err, and then the key had better be its own.
func (o *oracle) write(a *acquisition) bool {
	err, until := a.lease.Err(), a.lease.Until()
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		var lost *redislease.LostError
		switch cause := context.Cause(a.lease.Context()); {
		case !errors.As(err, &lost) && (!errors.Is(err, redislease.ErrReleased) || a.releases == 0):
			o.violateLocked(a, wrongCause, "Err: %v", err)
		case cause != context.Cause(a.ctx) && !errors.Is(cause, err):
			o.violateLocked(a, wrongCause, "%v instead of %v", cause, err)
		case lost != nil:
			o.reasonLocked(a, lost)
		}
		return false
	}
	o.tally.Writes++
	if o.hasFenceLocked(a); a.grant.robbed {
		return true
	}
	held := o.truthOf(a.key).now()
	allowed := slack
	if o.w.weather.suspends && o.w.weather.steps {
		allowed += a.terms.margin / 4 // by that much clocks may differ without being asked about
	}
	switch left := time.Until(held.expires); {
	case held.value != a.grant.token:
		o.violateLocked(a, writeWithoutKey, "it holds %q", held.value)
	case left < a.terms.margin-allowed:
		o.violateLocked(a, writeWithoutKey, "%v before it expires, with a margin of %v", left, a.terms.margin)
	case until.After(held.expires.Add(allowed - a.terms.margin)), until.After(a.grant.written.Add(a.terms.maxHold + allowed)):
		o.violateLocked(a, wrongUntil, "it is in %v, and the key expires in %v", time.Until(until), left)
	case time.Since(a.grant.written) > a.terms.maxHold+allowed:
		o.violateLocked(a, beliefBeyondCap, "%v of %v", time.Since(a.grant.written), a.terms.maxHold)
	}
	return true
}

// renewed checks what Renew returned.
func (o *oracle) renewed(a *acquisition, ctx context.Context, start time.Time, until time.Time, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	switch {
	case err == nil && a.grant.yesSent.Before(start):
		o.violateLocked(a, wrongRenew, "")
	case err != nil && errors.Is(err, redislease.ErrNotAcquired):
		o.violateLocked(a, wrongError, "%v", err)
	case err != nil && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		o.violateLocked(a, wrongError, "%v", err)
	case now.After(until.Add(slack)) && now.After(start.Add(slack)) && !a.slow && !a.p.stood(start, a.terms.ttl):
		o.violateLocked(a, boundExceeded, "Renew by %v", now.Sub(until))
	}
}

// releasing takes note of a call of Release.
func (o *oracle) releasing(a *acquisition) (first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.releases++
	a.refused = false
	return a.releases == 1
}

// released checks what Release returned.
func (o *oracle) released(a *acquisition, first bool, start time.Time, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	g := a.grant
	bound := min(a.terms.ttl/2, 2*time.Second) + slack
	if took := time.Since(start); took > bound && !a.slow && !a.p.stood(start, a.terms.ttl) {
		o.violateLocked(a, boundExceeded, "Release took %v", took)
	}
	held := o.truthOf(a.key).now().value == g.token && !g.robbed && !a.hooked
	var lost *redislease.LostError
	told, definite := err.(*redislease.LostError)
	if definite = definite || err == nil; definite {
		a.deleted = true
	}
	unknown := errors.Is(err, redislease.ErrOutcomeUnknown)
	if a.refused = !definite && !unknown && a.releases == 1; a.refused && g.freed {
		o.violateLocked(a, wrongRelease, "executed, and %v", err)
	}
	if !definite && o.w.weather.calm {
		o.violateLocked(a, calmTroubled, "%v", err)
	}
	if told != nil && first && g.deletions == 0 && told.Reason != redislease.ErrTaken && told.Reason != redislease.ErrGone {
		o.violateLocked(a, notAskedToRelease, "%v", err)
	}
	if told != nil && len(a.finals) > 0 && a.finals[0].Kind == redislease.EventReleased {
		o.violateLocked(a, wrongRelease, "%v, after an unknown outcome", err)
	}
	switch {
	case err == nil && (held || first && !g.freed && !g.robbed):
		o.violateLocked(a, wrongRelease, "nil")
	case errors.Is(err, redislease.ErrOutcomeUnknown):
		o.tally.ReleaseUnknown++
		if o.w.weather.calm {
			o.violateLocked(a, calmTroubled, "%v", err)
		}
	case errors.As(err, &lost):
		o.reasonLocked(a, lost)
	}
	contextual := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	if errors.Is(err, redislease.ErrNotAcquired) || contextual && a.ctx.Err() == nil {
		o.violateLocked(a, wrongError, "%v", err)
	}
}

// reasonLocked checks that a loss has happened as it says.
func (o *oracle) reasonLocked(a *acquisition, lost *redislease.LostError) {
	g := a.grant
	early := time.Duration(0)
	if o.w.weather.steps {
		early = a.terms.margin / 4
		if a.p.noBoot {
			early = a.terms.ttl
		}
	}
	ok := false
	switch lost.Reason {
	case redislease.ErrTaken:
		ok = g.taken
	case redislease.ErrGone:
		ok = g.gone
	case redislease.ErrUnconfirmed:
		ok = !lost.At.Before(g.known(lost.At).Add(a.terms.useful() - early - slack))
	case redislease.ErrMaxHold:
		ok = !lost.At.Before(g.called.Add(a.terms.maxHold-early-slack)) ||
			a.terms.maxRenewals >= 0 && g.confirmed >= a.terms.maxRenewals
	}
	if !ok && !g.robbed {
		o.violateLocked(a, wrongReason, "%v", lost)
	}
}

// distanceLocked measures how long before the earliest possible next holder a belief ended by itself.
func (o *oracle) distanceLocked(a *acquisition, lost *redislease.LostError) {
	i := o.truthOf(a.key).item
	byItself := lost.Reason == redislease.ErrUnconfirmed || lost.Reason == redislease.ErrMaxHold
	if !byItself || a.grant.robbed || i.value != a.grant.token || a.p.stood(a.start, a.terms.ttl) {
		return
	}
	if d := i.expires.Sub(lost.At); o.tally.Closest == 0 || d < o.tally.Closest {
		o.tally.Closest = d
	}
}
