package sim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redislease/redislease"
)

// The invariants, as a violation names them.
const (
	beliefOutlivesTrust = "a lease's context is not done one margin before its key can expire"
	writeWithoutKey     = "Err is nil though the key is not the lease's"
	twoTokens           = "a command that may take the key carries a token that was sent before"
	wrongTTL            = "a command carries another TTL than the options say"
	writtenTooLate      = "a command that may take the key was written after its acquisition had ended"
	listsTooMuch        = "the settling script is asked about too many, too old, or other people's tokens"
	renewedAfterEnd     = "a renewal was written for a lease that has ended, or that nobody has"
	renewedForNobody    = "a renewal was asked for although the caller's context had ended"
	renewedBeyondCap    = "a renewal was written beyond a cap"
	deletedAnothers     = "a release deleted another's key"
	tookHeld            = "a command took a key that another held"
	madeByRenewal       = "a renewal created, changed or shortened a key"
	secondRelease       = "a release was sent more than once for one call"
	wrongHeld           = "ErrNotAcquired though nobody else held the key"
	ownKeyHeld          = "an acquisition that took nothing left the key with a token of its own"
	wrongToken          = "a lease has a token that its acquisition never sent"
	littleTrust         = "a lease was handed out with less than a third of its trust"
	boundExceeded       = "a call took longer than its bound"
	wrongError          = "an error matches what it must not, or not what it must"
	wrongReason         = "a loss has a reason that is not so"
	wrongRenew          = "Renew returned nil without a confirmation sent after the call"
	wrongRelease        = "Release returned what is not so"
	notFollowedUp       = "a renewal did not follow when it was due"
	notGivenBack        = "a late grant was not given back"
	wrongEvents         = "the events of an acquisition or a lease are not what happened"
	leftBehind          = "a key was left behind"
	calmTroubled        = "something failed in a world without faults"
	beliefBeyondCap     = "a lease was held beyond its longest hold"
	wrongDo             = "Do told something else than what happened"
)

// slack is for what happens within one virtual instant, give or take the salts.
const slack = 5 * time.Microsecond

// oracle knows what the server holds, and hears what the library does and says. It sees what no client can.
type oracle struct {
	w *world

	mu         sync.Mutex
	truths     map[string]*truth
	grants     map[string]*grant
	all        []*acquisition
	violations []string
	violated   map[string]int
	tally      Tally
}

// truth is what the server holds under a key.
type truth struct {
	item item
	open []*acquisition // under way, or with a lease that has not ended
}

// now is what the key holds now.
func (t *truth) now() item {
	if i := t.item; i.expires.IsZero() || time.Now().Before(i.expires) {
		return i
	}
	return item{}
}

// grant is one token.
type grant struct {
	a         *acquisition
	token     string
	written   time.Time // when a command that may take the key with it was first written
	robbed    bool      // the server was made to forget it, or to remember it: no promise holds
	freed     bool      // a release deleted it
	gone      bool      // the server has said so
	taken     bool      // the server has said so
	yesSent   time.Time // when the latest renewal was written that the server confirmed
	yeses     []yes     // the confirmations that the library has
	confirmed int       // renewals of the watchdog that the library knows to be confirmed
	flights   []*call   // renewals under way
	followBy  time.Time // when the next renewal is to follow at the latest; zero: none is due
	deletions int       // releases called for
}

// yes is a confirmation: when its command was called for, which is no later than when it was written, and when the
// library had it.
type yes struct{ called, had time.Time }

// known is when the latest command was called for whose confirmation the library had at a time.
func (g *grant) known(at time.Time) time.Time {
	latest := g.written
	for _, y := range g.yeses {
		if y.had.Before(at) && y.called.After(latest) {
			latest = y.called
		}
	}
	return latest
}

// terms are the options of an acquisition, as the documentation says what they mean.
type terms struct {
	ttl, margin, interval, maxHold time.Duration
	maxRenewals                    int // -1: no limit
	timeout                        time.Duration
}

func (t *terms) useful() time.Duration { return t.ttl - t.margin }

// acquisition is one call of a verb, and the lease that came of it.
type acquisition struct {
	id      uint64
	p       *process
	key     string // in Redis
	terms   terms
	waiting bool // Acquire, Do
	start   time.Time
	ctx     context.Context
	ctxEnd  time.Time // its deadline or when it will be cancelled; zero: never

	grants  []*grant
	calls   uint64
	over    bool
	foreign bool // another held the key at some moment
	hooked  bool // a hook made something else of a command
	slow    bool // the observer took its time, which is outside of every bound

	lease    *redislease.Lease
	grant    *grant
	releases int // calls of Release
	err      error
	ends     []redislease.Event // of the acquisition
	finals   []redislease.Event // of the lease
}

func (o *oracle) violate(a *acquisition, what, format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.violateLocked(a, what, format, args...)
}

func (o *oracle) violateLocked(a *acquisition, what, format string, args ...any) {
	detail := fmt.Sprintf(format, args...)
	if a != nil {
		detail = fmt.Sprintf("%s, acquisition %d of %s: %s", a.p.name, a.id, a.key, detail)
	}
	v := fmt.Sprintf("%s (at %v, %s)", what, o.w.since(), detail)
	o.w.record("VIOLATION " + v)
	if n := o.violated[what]; n == 0 { // the first of each kind is enough
		o.violations = append(o.violations, v)
	}
	o.violated[what]++
}

func (o *oracle) truthOf(key string) *truth {
	t := o.truths[key]
	if t == nil {
		t = &truth{}
		o.truths[key] = t
	}
	return t
}

// begin takes note of a call of a verb.
func (o *oracle) begin(a *acquisition) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.start = time.Now()
	a.id = uint64(len(o.all) + 1)
	o.all = append(o.all, a)
	o.tally.Acquisitions++
	t := o.truthOf(a.key)
	a.foreign = t.now() != item{}
	t.open = append(t.open, a)
}

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

// ended says whether a lease has ended. It asks the context, since Err would look at the clock for the library.
func ended(l *redislease.Lease) bool {
	cause := context.Cause(l.Context())
	return errors.Is(cause, redislease.ErrLost) || errors.Is(cause, redislease.ErrReleased)
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
	if before == after {
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

// overruled: somebody else than the library has changed what a key holds.
func (o *oracle) overruled(key string, before, after item) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, value := range []string{before.value, after.value} {
		if g := o.grants[value]; g != nil {
			if !g.robbed {
				o.tally.Robbed++
			}
			g.robbed = true
		}
	}
	o.w.record(fmt.Sprintf("overruled %s", key))
	o.changedLocked(key, after)
}

func (o *oracle) changedLocked(key string, after item) {
	t := o.truthOf(key)
	t.item = after
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

// finish takes note of what a verb has returned, and checks it.
func (o *oracle) finish(a *acquisition, l *redislease.Lease, err error) {
	o.mu.Lock()
	a.over, a.err, a.lease = true, err, l
	now := time.Now()
	o.boundedLocked(a, now)
	t := o.truthOf(a.key)
	if l == nil {
		o.refusedLocked(a, t.now(), now)
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
	left := time.Until(l.Until())
	capped := a.grant.written.Add(a.terms.maxHold).Before(now.Add(a.terms.useful() / 3))
	if left < a.terms.useful()/3-slack && !capped && !a.slow && !a.p.stood(a.start, a.terms.interval) {
		o.violateLocked(a, littleTrust, "%v", left)
	}
	if !a.slow { // else its watchdog has been at it for a while
		o.followLocked(a.grant, now.Add(time.Nanosecond))
	}
	o.mu.Unlock()
	o.write(a)
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
	if !end.IsZero() && now.Sub(end) > grace && !a.slow && !a.p.stood(a.start, 2*a.terms.ttl) {
		o.violateLocked(a, boundExceeded, "an acquisition by %v", now.Sub(end))
	}
}

// refusedLocked checks an acquisition that ended without a lease.
func (o *oracle) refusedLocked(a *acquisition, held item, now time.Time) {
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
	switch {
	case errors.Is(err, redislease.ErrOutcomeUnknown):
		o.tally.Unknown++
		if o.w.weather.calm && a.waiting && a.terms.timeout == 0 && a.ctxEnd.IsZero() {
			o.violateLocked(a, calmTroubled, "%v", err)
		}
		return
	case errors.Is(err, redislease.ErrNotAcquired):
		o.tally.Held++
		if !a.foreign {
			o.violateLocked(a, wrongHeld, "%v", err)
		}
	default:
		o.tally.Failed++
		if o.w.weather.calm && a.ctx.Err() == nil {
			o.violateLocked(a, calmTroubled, "%v", err)
		}
	}
	// One that was written longer than a TTL ago is not waited for, and without a third clock it may seem that old.
	if g := o.grants[held.value]; g != nil && g.a == a && !g.robbed && now.Sub(g.written) < a.terms.ttl && !(a.p.noBoot && o.w.weather.steps) {
		o.violateLocked(a, ownKeyHeld, "%v", err)
	}
}

// write is a write of the holder: it asks Err, and then the key had better be its own.
func (o *oracle) write(a *acquisition) bool {
	if err := a.lease.Err(); err != nil {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tally.Writes++
	if a.grant.robbed {
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
	held := o.truthOf(a.key).now().value == g.token && !g.robbed
	var lost *redislease.LostError
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
		ok = !lost.At.Before(g.written.Add(a.terms.maxHold-early-slack)) ||
			a.terms.maxRenewals >= 0 && g.confirmed >= a.terms.maxRenewals
	}
	if !ok && !g.robbed {
		o.violateLocked(a, wrongReason, "%v", lost)
	}
}

// event is told by an observer.
func (o *oracle) event(a *acquisition, e redislease.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e.Kind {
	case redislease.EventAcquired, redislease.EventNotAcquired, redislease.EventAcquireFailed:
		a.ends = append(a.ends, e)
	case redislease.EventLost, redislease.EventReleased:
		a.finals = append(a.finals, e)
		o.closeLocked(o.truthOf(a.key), a)
		if e.Kind == redislease.EventReleased {
			o.tally.Released++
			break
		}
		var lost *redislease.LostError
		if !errors.As(e.Err, &lost) {
			o.violateLocked(a, wrongEvents, "lost without a LostError: %v", e.Err)
			break
		}
		o.tally.lost(lost.Reason)
		if a.grant != nil {
			o.reasonLocked(a, lost)
			o.distanceLocked(a, lost)
		}
		if o.w.weather.calm && lost.Reason != redislease.ErrMaxHold && a.ctx.Err() == nil {
			o.violateLocked(a, calmTroubled, "%v", lost)
		}
	case redislease.EventRenewed, redislease.EventRenewFailed:
		o.tally.Renewals++
		if len(a.finals) > 0 {
			o.violateLocked(a, wrongEvents, "%v after the end", e.Kind)
		}
		if o.w.weather.calm && e.Kind == redislease.EventRenewFailed {
			o.violateLocked(a, calmTroubled, "%v", e.Err)
		}
	}
}

// distanceLocked measures how long before the earliest possible next holder a belief ended by itself.
func (o *oracle) distanceLocked(a *acquisition, lost *redislease.LostError) {
	i := o.truthOf(a.key).item
	if a.grant.robbed || i.value != a.grant.token || a.p.stood(a.start, a.terms.ttl) {
		return
	}
	if d := i.expires.Sub(lost.At); o.tally.Closest == 0 || d < o.tally.Closest {
		o.tally.Closest = d
	}
}

// call is a command on its way through the client.
type call struct {
	a      *acquisition
	n      uint64 // of the calls of a
	what   what
	tokens []*grant
	at     time.Time
	manual bool // for a call of Renew
	held   bool // there was a lease already
}

// calling: the library has handed a command to the client.
func (o *oracle) calling(a *acquisition, w what, tokens []string, manual bool) *call {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.calls++
	c := &call{a: a, n: a.calls, what: w, at: time.Now(), manual: manual, held: len(a.ends) > 0}
	o.w.record(fmt.Sprintf("%s call %d of %d: %s", a.p.name, c.n, a.id, w))
	for i, token := range tokens {
		g := o.grants[token]
		if last := i == len(tokens)-1; last && w.mayTake() {
			if g != nil {
				o.violateLocked(a, twoTokens, "%s", w)
			}
			g = &grant{a: a, token: token}
			o.grants[token] = g
			a.grants = append(a.grants, g)
		}
		if g == nil {
			continue // a check of the scripts
		}
		c.tokens = append(c.tokens, g)
		if g.a != a || w == whatSettle && !a.p.stood(c.at.Add(-time.Millisecond), 0) && !g.written.IsZero() && c.at.Sub(g.written) > 2*a.terms.ttl+slack {
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
		g.followBy = time.Time{}
		if a.ctx.Err() != nil && !manual && !a.p.stood(c.at.Add(-time.Millisecond), 0) {
			o.violateLocked(a, renewedForNobody, "%v", context.Cause(a.ctx))
		}
		if n := a.terms.maxRenewals; n >= 0 && g.confirmed >= n && !manual {
			o.violateLocked(a, renewedBeyondCap, "%d confirmed of %d", g.confirmed, n)
		}
	case w == whatRelease:
		g.deletions++
		if g == a.grant && g.deletions > a.releases {
			o.violateLocked(a, secondRelease, "%d for %d calls", g.deletions, a.releases)
		}
	}
	return c
}

// answered: the client has returned what became of a command: whether it was a Yes, and the code of a script's answer.
func (o *oracle) answered(c *call, confirmed bool, index int64, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.w.record(fmt.Sprintf("%s call %d of %d: yes: %v, error: %v", c.a.p.name, c.n, c.a.id, confirmed, err != nil))
	if len(c.tokens) == 0 {
		return
	}
	now := time.Now()
	g := c.tokens[len(c.tokens)-1]
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
		if g == c.a.grant && (confirmed || err != nil && !c.manual) {
			o.followLocked(g, now.Add(time.Nanosecond))
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

// followLocked has it checked that a renewal follows when it has to: one interval after the last confirmed one, or a
// twentieth of the TTL after one that failed.
func (o *oracle) followLocked(g *grant, now time.Time) {
	t := g.a.terms
	last := g.known(now)
	if g.yesSent.After(last) { // it was called for earlier than written
		last = g.yesSent
	}
	by := last.Add(t.interval)
	if at := now.Add(t.ttl / 20); by.Before(at) {
		by = at
	}
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

// hooked: a hook sends a command of a twice.
func (o *oracle) hooked(a *acquisition) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.hooked = true
}

// observing: the observer of a takes its time from now on.
func (o *oracle) observing(a *acquisition) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.slow = true
}

// close checks what must be true when everything is over.
func (o *oracle) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, key := range o.w.keys {
		if i := o.truthOf(key).now(); o.grants[i.value] != nil {
			o.violateLocked(o.grants[i.value].a, leftBehind, "it expires in %v", time.Until(i.expires))
		}
	}
	for _, a := range o.all {
		o.accountLocked(a)
	}
}

// accountLocked checks that an acquisition and its lease are accounted for exactly once, and rightly.
func (o *oracle) accountLocked(a *acquisition) {
	want := redislease.EventAcquireFailed
	switch {
	case !a.over:
		o.violateLocked(a, boundExceeded, "it never ended")
		return
	case a.lease != nil:
		want = redislease.EventAcquired
	case errors.Is(a.err, redislease.ErrNotAcquired):
		want = redislease.EventNotAcquired
	}
	if len(a.ends) != 1 || a.ends[0].Kind != want {
		o.violateLocked(a, wrongEvents, "%v instead of one %v", kinds(a.ends), want)
	}
	if finals := len(a.finals); a.lease != nil && finals != 1 || a.lease == nil && finals != 0 {
		o.violateLocked(a, wrongEvents, "%v at the end of a lease", kinds(a.finals))
	}
}

func kinds(events []redislease.Event) (k []redislease.EventKind) {
	for _, e := range events {
		k = append(k, e.Kind)
	}
	return k
}
