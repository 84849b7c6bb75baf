package sim

import (
	"context"
	"fmt"
	"time"
)

// What the client is asked for, and answers.

// call is a command on its way through the client.
type call struct {
	a      *acquisition
	n      uint64 // of the calls of a
	what   what
	tokens []*grant
	at     time.Time
	manual bool // for a call of Renew
	held   bool // there was a lease already
	flies  bool
}

// calling: the library has handed a command to the client.
func (o *oracle) calling(a *acquisition, w what, tokens []string, manual bool) *call {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.calls++
	c := &call{a: a, n: a.calls, what: w, at: time.Now(), manual: manual, held: len(a.ends) > 0}
	o.w.record(fmt.Sprintf("%s call %d of %d: %s", a.p.name, c.n, a.id, w))
	a.pending++
	if w == whatRelease && len(tokens) > 0 && o.grants[tokens[0]] != nil {
		a.ending = true // or the token of an unlucky grant is given back
	}
	if len(a.ends) == 0 && !a.ending {
		a.failing++
	}
	if o.unbounded(a) && !a.over && a.failing > 40 && !a.yes {
		o.violateLocked(a, neverGaveUp, "%d", a.failing)
	}
	for i, token := range tokens {
		g := o.grants[token]
		last := i == len(tokens)-1
		if last && w.mayTake() && g != nil && !g.early {
			o.violateLocked(a, twoTokens, "%s", w)
		}
		if w.mayTake() && (g == nil || last && !g.early) {
			g = &grant{a: a, token: token, called: c.at, unclear: true, early: true}
			o.grants[token] = g
			a.grants = append(a.grants, g)
		}
		if last && w.mayTake() {
			g.early, g.called = false, c.at
			o.flyLocked(c)
		}
		if g == nil {
			continue // a check of the scripts
		}
		c.tokens = append(c.tokens, g)
		if g.a != a || w == whatSettle && !g.extended && !a.p.stood(c.at.Add(-time.Millisecond), 0) && !g.written.IsZero() && c.at.Sub(g.written) > 2*a.terms.ttl+slack {
			o.violateLocked(a, listsTooMuch, "%s: a token of %d, written %v ago", w, g.a.id, c.at.Sub(g.written))
		}
	}
	if len(tokens) > 17 {
		o.violateLocked(a, listsTooMuch, "%d", len(tokens))
	}
	if len(c.tokens) == 0 {
		return c // a check of the scripts
	}
	g := c.tokens[len(c.tokens)-1]
	switch {
	case w == whatRenew && c.held:
		g.flights = append(g.flights, c)
		if !manual {
			o.besideLocked(g, c.at)
		}
		justNow := !a.ctxEnd.IsZero() && c.at.Sub(a.ctxEnd) < slack // it was sent off before
		if a.ctx.Err() != nil && !manual && !justNow && !a.p.stood(c.at.Add(-time.Millisecond), 0) {
			o.violateLocked(a, renewedForNobody, "%v", context.Cause(a.ctx))
		}
		if n := a.terms.maxRenewals; n >= 0 && g.confirmed >= n && !manual {
			o.violateLocked(a, renewedBeyondCap, "%d confirmed of %d", g.confirmed, n)
		}
	case w == whatRenew:
		g.extended = true
	case w == whatRelease:
		g.deletions++
		if g == a.grant {
			o.deletingLocked(g, c)
		}
		if g == a.grant && g.deletions > a.releases {
			o.violateLocked(a, secondRelease, "%d for %d calls", g.deletions, a.releases)
		}
	}
	return c
}

// flyLocked counts the commands of an acquisition that may take the key.
func (o *oracle) flyLocked(c *call) {
	a := c.a
	if a.flying++; a.flying > 3 && !o.w.weather.steps && !a.p.stood(a.start, 0) {
		o.violateLocked(a, tooManyInFlight, "%d", a.flying)
	}
	c.flies = true
	time.AfterFunc(a.terms.ttl-time.Millisecond, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.landedLocked(c)
	})
}

func (o *oracle) landedLocked(c *call) {
	if c.flies {
		c.flies = false
		c.a.flying--
	}
}

// besideLocked: a renewal of the watchdog sets out. If it is silent for a tenth of the TTL another goes out beside it.
func (o *oracle) besideLocked(g *grant, now time.Time) {
	young := 0
	for _, other := range g.flights {
		if !other.manual && now.Sub(other.at) < g.a.terms.ttl-time.Millisecond {
			young++
		}
	}
	if young > 3 && !o.w.weather.steps && !g.a.p.stood(g.a.start, 0) {
		o.violateLocked(g.a, tooManyInFlight, "%d renewals", young)
	}
	by := now.Add(g.a.terms.silence())
	if n := len(g.yeses); n > 0 && now.Sub(g.yeses[n-1].had) < slack { // it set out before
		if due := g.last(now.Add(time.Nanosecond)).Add(g.a.terms.interval + 2*time.Millisecond); due.After(by) {
			by = due
		}
	}
	o.followByLocked(g, now, by)
}

// deletingLocked: Release asks Redis.
func (o *oracle) deletingLocked(g *grant, c *call) {
	a := g.a
	bound := min(a.terms.ttl/2, 2*time.Second) - time.Millisecond
	switch {
	case a.lease.Context().Err() == nil:
		o.violateLocked(a, releasedAlive, "")
	case a.deleted:
		o.violateLocked(a, secondRelease, "after a definite result")
	case g.deleting != nil && c.at.Sub(g.deleting.at) < bound && !a.p.stood(g.deleting.at, a.terms.ttl) && !o.w.weather.steps:
		o.violateLocked(a, secondRelease, "while another is under way")
	}
	g.deleting = c
}

// answered: the client has returned what became of a command: whether it was a Yes, and the code of a script's answer.
func (o *oracle) answered(c *call, confirmed, refused bool, index int64, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.w.record(fmt.Sprintf("%s call %d of %d: yes: %v, error: %v", c.a.p.name, c.n, c.a.id, confirmed, err != nil))
	no := refused && err == nil
	if c.a.pending--; !confirmed && !no {
		c.a.p.failed[c.a.key] = time.Now()
	}
	if (confirmed || no) && len(c.a.ends) == 0 && !c.a.ending && (c.what != whatRelease || len(c.tokens) == 0) {
		c.a.failing = c.a.pending
	}
	if len(c.tokens) == 0 {
		return
	}
	now := time.Now()
	g := c.tokens[len(c.tokens)-1]
	if c.what.mayTake() {
		o.landedLocked(c)
		o.clearLocked(c, g, confirmed, no, refused, now)
	}
	if c.what == whatRelease && g.deleting == c {
		g.deleting = nil
	}
	if c.what == whatRenew && no && c.held {
		time.AfterFunc(time.Millisecond, func() {
			o.mu.Lock()
			defer o.mu.Unlock()
			if a := c.a; a.grant == g && a.ctx.Err() == nil && a.lease.Context().Err() == nil && !a.p.stood(now, 0) {
				o.violateLocked(a, notLost, "")
			}
		})
	}
	if c.what == whatSettle && confirmed && index > 0 && int(index) <= len(c.tokens) {
		g = c.tokens[index-1]
	}
	switch {
	case c.what == whatRenew:
		for i, other := range g.flights {
			if other == c {
				g.flights = append(g.flights[:i], g.flights[i+1:]...)
				break
			}
		}
		if confirmed {
			g.yeses = append(g.yeses, yes{c.at, now})
			if !c.manual && c.held {
				g.confirmed++
			}
		}
		if !c.manual {
			g.followBy = time.Time{}
		}
		if g == c.a.grant && (confirmed || err != nil && !c.manual) {
			o.followLocked(g, now.Add(time.Nanosecond), confirmed)
		}
	case c.what.mayTake() && confirmed:
		if !c.a.over || g == c.a.grant || g.deletions > 0 {
			return
		}
		time.AfterFunc(time.Millisecond, func() {
			o.mu.Lock()
			defer o.mu.Unlock()
			if g.deletions == 0 && c.a.grant != g && !c.a.p.stood(now, 0) {
				o.violateLocked(c.a, notGivenBack, "%s", c.what)
			}
		})
	}
}

// clearLocked takes note of what an answer says about who has the key.
func (o *oracle) clearLocked(c *call, g *grant, yes, no, refused bool, now time.Time) {
	a := c.a
	if g.answered = now; len(a.ends) > 0 {
		return // it has been decided
	}
	own := c.tokens[len(c.tokens)-1]
	own.told = own.told || !a.hooked && (yes || no || refused)
	switch {
	case yes:
		a.yes, a.last = true, ""
	case no:
		a.last = "held"
		g.unclear = a.hooked
		for _, other := range c.tokens {
			if other != g && !other.answered.IsZero() && other.answered.Before(c.at) {
				other.unclear = a.hooked
			}
		}
	case g.written.IsZero(): // perhaps it was marshalled all the same
		a.last = ""
	case refused:
		g.unclear = a.hooked
		if a.last = "refused"; a.hooked {
			a.last = ""
		}
	default:
		a.last = ""
	}
}

// followLocked has it checked that a renewal follows when it has to: one interval after the last confirmed one, or a
// twentieth of the TTL after one that failed. Beside one that is on its way when another is confirmed, another follows as
// beside a silent one.
func (o *oracle) followLocked(g *grant, now time.Time, confirmed bool) {
	t := g.a.terms
	last := g.last(now)
	by := last.Add(t.interval)
	if at := now.Add(t.ttl / 20); by.Before(at) {
		by = at
	}
	for _, other := range g.flights {
		if at := other.at.Add(t.silence()); confirmed && !other.manual && by.Before(at) {
			by = at
		}
	}
	o.followByLocked(g, now, by)
}

func (o *oracle) followByLocked(g *grant, now, by time.Time) {
	t := g.a.terms
	last := g.last(now)
	by = by.Add(2 * time.Millisecond)
	g.followBy = time.Time{}
	if !by.Before(last.Add(t.useful() - t.ttl/20)) {
		return // it may do without, so shortly before the end
	}
	g.followBy = by
	time.AfterFunc(time.Until(by), func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		a := g.a
		due := g.followBy == by && a.grant == g && a.lease.Context().Err() == nil && len(g.flights) < 3
		if due && !(t.maxRenewals >= 0 && g.confirmed >= t.maxRenewals) && !a.p.stood(now.Add(-time.Millisecond), t.interval) {
			o.violateLocked(a, notFollowedUp, "%v after the last confirmed one, with %d in flight", time.Since(last), len(g.flights))
		}
	})
}
