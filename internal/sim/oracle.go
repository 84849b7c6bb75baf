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
