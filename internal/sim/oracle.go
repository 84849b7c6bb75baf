package sim

import (
	"context"
	"errors"
	"fmt"
	"strconv"
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
	notAskedAbout       = "the settling script was not asked about a token that holds the key"
	needlessUnknown     = "ErrOutcomeUnknown although every answer was definite"
	notTheLastAnswer    = "an acquisition told another thing than its last answer"
	gaveUpEarly         = "an acquisition without a bound gave up before it had failed more than once"
	neverGaveUp         = "an acquisition without a bound went on after many failures in a row"
	leftAlone           = "a waiter left a free key alone"
	tooManyInFlight     = "more than three commands are in flight"
	handedOutEnded      = "a lease was handed out that had ended, or to a context that had"
	releasedAlive       = "a release was sent while the lease's context goes on"
	notAskedToRelease   = "Release sent nothing although Redis had not said No"
	notLost             = "Redis said No to a renewal, and the lease goes on"
	wrongCause          = "a context or a lease ended with a cause that is not so"
	wrongUntil          = "Until or the deadline is not when the lease ends"
	outOfTurn           = "a waiter was served before one that had come earlier"
	unheeded            = "a signal was not followed by a try"
	tooManyTries        = "a waiter sent more commands than its budget"
	fellBack            = "a fence is not greater than one before"
	wrongFence          = "a lease has another fence than was drawn for it"
	drawnForNobody      = "a fence was drawn, and the key not taken"
	staleAccepted       = "a stale write was accepted after a newer one"
	holderRefused       = "a holder's write was refused as stale"
)

// soon is within what time a signal is followed by a try in a calm world: what is in flight is answered before.
const soon = 250 * time.Millisecond

// slack is for what happens within one virtual instant, give or take the salts.
const slack = 20 * time.Microsecond

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
	at   time.Time      // when it changed
	open []*acquisition // under way, or with a lease that has not ended

	tried map[*process]time.Time // when a process last wrote a command that may take the key

	greatest int64 // of the fences that were drawn
	era      int   // counts the times that it fell back as documented
	drawn    int   // fences, for the order of their grants
	accepted draw  // that of the write which the place that checks fences has accepted last
}

// draw is a fence that was drawn. Those of one era are to grow in the order of the draws.
type draw struct {
	fence      int64
	era, order int
}

// free is since when a key that is free has been.
func (t *truth) free() time.Time {
	if t.item == (item{}) {
		return t.at
	}
	return t.item.expires
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
	called    time.Time // when a command that may take the key with it was called for
	written   time.Time // when it was first written
	took      time.Time // when it took the key
	extended  bool      // it was tried to have it confirmed before it was handed out
	told      bool      // its own command has been answered, one way or the other
	unclear   bool      // nobody can know from the answers whether it has taken the key
	answered  time.Time // when the client returned from that command; zero: it has not
	early     bool      // a settling script has asked about it, and its own command is yet to be called for
	draws     []draw    // more than one if a hook sends its command twice, and the key is free again by then
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
	deleting  *call     // a release under way
}

// yes is a confirmation: when its command was called for, which is no later than when it was written, and when the
// library had it.
type yes struct{ called, had time.Time }

// known is when the latest command was called for whose confirmation the library had at a time.
func (g *grant) known(at time.Time) time.Time {
	latest := g.called
	for _, y := range g.yeses {
		if y.had.Before(at) && y.called.After(latest) {
			latest = y.called
		}
	}
	return latest
}

// last is when the latest command set out whose confirmation the library had at a time: when it was written, which may be
// long after it was called for.
func (g *grant) last(at time.Time) time.Time {
	latest := g.known(at)
	for _, written := range []time.Time{g.written, g.yesSent} {
		if written.After(latest) {
			latest = written
		}
	}
	return latest
}

// terms are the options of an acquisition, as the documentation says what they mean.
type terms struct {
	ttl, margin, interval, maxHold time.Duration
	maxRenewals                    int // -1: no limit
	timeout                        time.Duration
	fencing, backoff               bool // backoff: the caller's own
}

func (t *terms) useful() time.Duration { return t.ttl - t.margin }

// silence is after how long without an answer another renewal goes out.
func (t *terms) silence() time.Duration { return max(t.ttl/10, 50*time.Millisecond) }

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
	tries   int    // commands written that may take the key
	signals int    // that its process got while it waited
	flying  int    // commands that may take the key, called for less than a TTL ago and unanswered
	pending int    // commands without an answer
	ending  bool   // it cleans up
	failing int    // commands that failed, or are unanswered, since the last answer that says something
	last    string // what the last definite answer was: held, refused, or nothing that one could tell
	yes     bool   // there was a Yes
	deleted bool   // Release has told a definite result
	refused bool   // Release has told that its command was not executed
	over    bool
	noAt    time.Time // when it last found the key held
	foreign bool      // another held the key at some moment
	hooked  bool      // a hook made something else of a command
	slow    bool      // the observer took its time, which is outside of every bound

	seen     int64 // the greatest fence of its process before it began
	lease    *redislease.Lease
	grant    *grant
	draw     draw // that the lease has the fence of
	releases int  // calls of Release
	err      error
	ends     []redislease.Event // of the acquisition
	endedAt  time.Time          // when it was told of, which is before the caller is
	left     item               // what the key held then
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
		t = &truth{tried: map[*process]time.Time{}}
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
	a.seen = a.p.seen
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

// polling: a Locker says that its waiters are not woken.
func (o *oracle) polling(e redislease.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tally.Polling++
	if o.w.weather.calm || e.Err == nil || e.Key != "" {
		o.violateLocked(nil, wrongEvents, "%+v", e)
	}
}

// event is told by an observer.
func (o *oracle) event(a *acquisition, e redislease.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e.Kind {
	case redislease.EventAcquired, redislease.EventNotAcquired, redislease.EventAcquireFailed:
		a.ends = append(a.ends, e)
		a.endedAt, a.left = time.Now(), o.truthOf(a.key).now()
	case redislease.EventLost, redislease.EventReleased:
		a.finals = append(a.finals, e)
		o.closeLocked(o.truthOf(a.key), a)
		if e.Kind == redislease.EventReleased {
			o.tally.Released++
			if errors.Is(e.Err, redislease.ErrLost) || e.Err == nil && a.grant != nil && !a.grant.freed && !a.grant.robbed {
				o.violateLocked(a, wrongEvents, "released: %v", e.Err)
			}
			if e.Err != nil && o.w.weather.calm {
				o.violateLocked(a, calmTroubled, "%v", e.Err)
			}
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
	byItself := lost.Reason == redislease.ErrUnconfirmed || lost.Reason == redislease.ErrMaxHold
	if !byItself || a.grant.robbed || i.value != a.grant.token || a.p.stood(a.start, a.terms.ttl) {
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

// isLost: the observer was told of a loss.
func (o *oracle) isLost(a *acquisition) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(a.finals) > 0 && a.finals[0].Kind == redislease.EventLost
}

// hooked: a hook sends a command of a twice.
func (o *oracle) hooked(a *acquisition) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.hooked = true
}

// gathered: several renewals go out as one pipeline.
func (o *oracle) gathered(n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tally.Gathered += n
}

// owner returns the acquisition that a token is of.
func (o *oracle) owner(token string) *acquisition {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.grants[token].a
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
