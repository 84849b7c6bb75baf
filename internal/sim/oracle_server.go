package sim

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// What is written to the server, and what the server does.

// written: a process has written a request.
func (o *oracle) written(p *process, r *request) {
	if r.what == whatOther || r.stamp == "0" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	g := o.grants[r.own()]
	if g == nil {
		return // a check of the scripts
	}
	a, now := g.a, r.at
	if r.what != whatRelease && r.ttl() != a.terms.ttl {
		o.violateLocked(a, wrongTTL, "%s: %s", r.what, r.stamp)
	}
	switch r.what {
	case whatSet, whatSettle:
		if !g.written.IsZero() && !a.hooked {
			o.violateLocked(a, twoTokens, "%s", r.what)
		}
		if g.written.IsZero() {
			g.written = now
		}
		a.tries++
		o.truthOf(a.key).tried[p] = now
		if a.over {
			o.violateLocked(a, writtenTooLate, "%s", r.what)
		}
	case whatRenew:
		o.renewalWritten(a, g, now)
	}
}

func (o *oracle) renewalWritten(a *acquisition, g *grant, now time.Time) {
	switch {
	case a.over && a.grant != g:
		o.violateLocked(a, renewedAfterEnd, "no lease has the token")
	case a.over && ended(a.lease):
		o.violateLocked(a, renewedAfterEnd, "%v", context.Cause(a.lease.Context()))
	case now.Sub(g.written) > a.terms.maxHold+slack:
		o.violateLocked(a, renewedBeyondCap, "held for %v of %v", now.Sub(g.written), a.terms.maxHold)
	}
}

// executed: the server has executed a request.
func (o *oracle) executed(p *process, r *request, before, after item, reply any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	g := o.grants[r.own()]
	var a *acquisition
	if g != nil {
		a = g.a
	}
	if code, ok := reply.(int64); ok && (r.what == whatRenew || r.what == whatRelease) {
		for _, token := range r.tokens {
			if g := o.grants[token]; g != nil {
				g.gone = g.gone || code == 0
				g.taken = g.taken || code == -1
				if r.what == whatRenew && code == 1 && r.at.After(g.yesSent) {
					g.yesSent = r.at
				}
			}
		}
	}
	o.askedLocked(a, g, r, before, reply)
	if r.what == whatRelease && before != after && a != nil && a.refused && g == a.grant {
		o.violateLocked(a, wrongRelease, "refused or not sent, and executed")
	}
	if before == after {
		if a != nil && r.what.mayTake() && before != (item{}) && r.stamp != "0" {
			a.noAt = time.Now()
		}
		return
	}
	if r.stamp == "0" {
		o.violateLocked(a, tookHeld, "a withdrawn command changed the key")
	}
	switch r.what {
	case whatSet, whatSettle:
		if before != (item{}) {
			o.violateLocked(a, tookHeld, "%s", r.what)
		}
		if g != nil {
			g.took = time.Now()
			a.foreign = a.foreign || g.took.Sub(g.written) >= a.terms.ttl // so late that it is not reckoned with
		}
	case whatRenew:
		if before == (item{}) || before.value != after.value || before.value != r.own() || after.expires.Before(before.expires) && !g.robbed {
			o.violateLocked(a, madeByRenewal, "%v to %v", before, after)
		}
	case whatRelease:
		mine := false
		for _, token := range r.tokens {
			if mine = mine || before.value == token; before.value == token {
				o.grants[token].freed = true
			}
		}
		if !mine || after != (item{}) {
			o.violateLocked(a, deletedAnothers, "")
			if robbed := o.grants[before.value]; robbed != nil {
				robbed.robbed = true
			}
		}
	}
	o.changedLocked(r.key, after)
}

// askedLocked checks that no settling script says "another's" of a key that a token of the same acquisition holds, one
// that was called for before.
func (o *oracle) askedLocked(a *acquisition, g *grant, r *request, before item, reply any) {
	holder := o.grants[before.value]
	said, _ := reply.([]any)
	if r.what != whatSettle || len(said) != 2 || said[0] != int64(0) || holder == nil || holder.a != a || holder.robbed {
		return
	}
	old := holder.took.Sub(holder.written) >= a.terms.ttl || a.p.noBoot && o.w.weather.steps
	// A process that stood still may call for them in another order than they were made in.
	stood := a.p.stood(holder.called.Add(-2*time.Millisecond), 0)
	if !old && !a.hooked && len(r.tokens) < 17 && g.called.Sub(holder.called) > slack && !stood {
		o.violateLocked(a, notAskedAbout, "it was written %v before", r.at.Sub(holder.written))
	}
}

// overruled: somebody else than the library has changed what a key holds.
func (o *oracle) overruled(key string, before, after item) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, value := range []string{before.value, after.value} {
		if g := o.grants[value]; g != nil {
			if !g.robbed {
				o.tally.Robbed++
			}
			g.robbed, g.a.foreign = true, true
		}
	}
	o.w.record(fmt.Sprintf("overruled %s", key))
	o.changedLocked(key, after)
}

func (o *oracle) changedLocked(key string, after item) {
	t := o.truthOf(key)
	t.item, t.at = after, time.Now()
	g := o.grants[after.value]
	for _, a := range t.open {
		if after != (item{}) && (g == nil || g.a != a) {
			a.foreign = true
			if a.lease != nil {
				o.believesLocked(a, after.expires)
			}
		}
	}
	if g == nil || after.expires.IsZero() {
		return
	}
	time.AfterFunc(time.Until(after.expires)-g.a.terms.margin+slack, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if i := t.item; g.a.grant == g && (i.value != after.value || !i.expires.After(after.expires)) {
			o.believesLocked(g.a, after.expires)
		}
	})
}

// believesLocked reports a lease whose context goes on though the key is about to go to somebody else, or has.
func (o *oracle) believesLocked(a *acquisition, expires time.Time) {
	if a.grant.robbed || a.lease.Context().Err() != nil || a.p.stood(time.Now().Add(-time.Millisecond), a.terms.interval) {
		return
	}
	o.violateLocked(a, beliefOutlivesTrust, "%v before the key expires", time.Until(expires))
}

// fenced: the server has executed a script that may draw a fence, for which it kept one before, and keeps one now.
func (o *oracle) fenced(r *request, took bool, before, after item, reply any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	t, g := o.truthOf(r.key), o.grants[r.own()]
	if g == nil || before == after {
		return
	}
	said, _ := reply.([]any)
	if !took || len(said) != 3 {
		o.violateLocked(g.a, drawnForNobody, "%v", reply)
		return
	}
	t.drawn++
	d := draw{fence: said[2].(int64), order: t.drawn}
	if after.value != strconv.FormatInt(d.fence, 10) {
		o.violateLocked(g.a, wrongFence, "%v is kept for %d", after, d.fence)
	}
	if d.fence <= t.greatest {
		// It may, if the latest is not kept any more, the clock is behind, and nobody in the process has seen it.
		if before.value == strconv.FormatInt(t.greatest, 10) || r.now() > t.greatest || g.a.seen >= d.fence {
			o.violateLocked(g.a, fellBack, "%d after %d; kept: %q, clock: %d, seen: %d", d.fence, t.greatest, before.value, r.now(), g.a.seen)
		}
		o.tally.FellBack++
		t.era++
	}
	d.era, t.greatest = t.era, d.fence
	g.draws = append(g.draws, d)
}

// landed: a write under a lease has come to the place that checks fences.
func (o *oracle) landed(a *acquisition) {
	o.mu.Lock()
	defer o.mu.Unlock()
	t, own := o.truthOf(a.key), a.draw
	if !a.terms.fencing {
		return
	}
	last := t.accepted
	comparable := last.era == own.era
	if own.fence < last.fence {
		o.tally.Refused++
		if comparable && own.order > last.order {
			o.violateLocked(a, holderRefused, "%v after %v", own, last)
		}
		return
	}
	o.tally.Landed++
	if comparable && own.order < last.order {
		o.violateLocked(a, staleAccepted, "%v after %v", own, last)
	}
	t.accepted = own
}
