package redislease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// An acquisition asks until it has an answer that can be relied on:
//
//	check scripts ─▶ SET NX ─┬─ Yes ───────────────────────────────▶ granted
//	(once a Locker)          ├─ No ────────────────────────────────▶ held by another: done (Try), or poll
//	                         ├─ certainly not executed ────────────▶ Redis' error: done (Try), or again later
//	                         └─ silence, or an unknown outcome
//	                                 │
//	                              settle ─┬─ one of our tokens holds it, or it was free ▶ granted
//	                                      └─ another's ▶ as No, once all that was written has been answered
//
// Each command that may take the key has a token of its own, so that whatever executes unseen, however late, can be
// told from everything else: the settling script recognises it, a late Yes gives it back, and otherwise it lapses
// within a TTL, since only granted tokens are renewed.
//
// Commands are sent from goroutines of their own; their answers queue up for the caller's goroutine, which alone
// decides: that is an asking. (While it sleeps in line the hub may send the next command for it: see wait.go.) After the
// decision an answer looks after itself.
type asking struct {
	*acquisition
	place    *place        // in line; nil: in none
	waiting  bool          // for a holder or for Redis: Acquire and Do
	inFlight []*command    // sent, and their answer not yet taken
	taking   []*command    // may have taken the key, or may yet; oldest first
	checked  [2]bool       // the renew and the release script have been answered
	asked    bool          // a command that may take the key has been sent
	held     bool          // the last answer was that another holds the key, and nothing has been sent since
	polling  bool          // then: nothing is waited for, and sendAt is the time of the next poll
	last     lastAnswer    // what the last answer said
	lastErr  error         // the last error
	pttl     time.Duration // how long the other's key will live; below 0: it is not known
	sendAt   time.Duration // when the next command is due
	quiet    time.Duration // since when there has been no answer
	attempt  int           // pauses so far
	failures int           // in a row; commands that were in flight together fail together
	failedAt time.Duration // the last of them
	heldAt   time.Duration // when another was first found to hold the key; forever: not yet
	winner   *command      // its token holds the key
	ready    *command      // the next one that may take the key, if it has been made; nobody has sent it
	fence    int64         // of winner; below 1: there is none, or it is not to be had
	strays   []*command    // give back tokens that the key has held beside winner's
}

// acquisition is what the caller's goroutine and those of the commands share.
type acquisition struct {
	*target
	bound time.Duration // when the acquisition ends at the latest
	first command       // usually the only one
	token token         // of first

	mu      sync.Mutex
	answers *command    // not yet taken by the caller's goroutine; newest first
	over    atomic.Bool // the acquisition has ended; changed under mu
	kept    *command    // whose token the lease has, if there is one; fixed then
	room    [1]*command // for the list of those in flight: usually there is one
}

// lastAnswer is what the last answer said.
type lastAnswer uint8

const (
	answerNone lastAnswer = iota
	answerHeld
	answerError
)

const (
	mostListed   = 16 // tokens that the settling script is asked about
	mostFailures = 3  // in a row end an acquisition that has no bound

	pollFirst = 25 * time.Millisecond
	pollMost  = 2 * time.Second // less up to half
)

var (
	errNilContext = errors.New("the context is nil")
	errTooLate    = errors.New("granted too late, and given back")
	errNotKept    = errors.New("granted, but not confirmed, and given back")
	errNoFence    = errors.New("granted, but its fence is gone or unreadable, and given back")
)

// acquire runs an acquisition of a valid key with valid options.
func (k *Locker) acquire(ctx context.Context, key string, c *config, waiting bool) (*Lease, error) {
	t := &target{locker: k, config: c, ctx: ctx, key: c.prefix + key, base: k.clock.now(&k.anchor)}
	a := asking{acquisition: &acquisition{target: t, bound: forever}, waiting: waiting, heldAt: forever, pttl: -1}
	switch {
	case c.set&setAcquireTimeout != 0:
		a.bound = c.acquireTimeout
	case !waiting:
		a.bound = c.patience()
	}
	lease, err := a.run()
	if err != nil {
		err = &opError{"acquire", key, err}
	}
	if c.observer == nil {
		if lease != nil {
			lease.begin(Event{})
		}
		return lease, err
	}
	now := a.now()
	e := Event{Kind: EventAcquireFailed, Key: key, Fence: noFence, Err: err, Took: now, Waited: max(0, now-a.heldAt)}
	switch {
	case lease != nil:
		e.Kind = EventAcquired
		lease.begin(e)
		return lease, nil
	case errors.Is(err, ErrNotAcquired):
		e.Kind = EventNotAcquired
	}
	observe(c.observer, context.WithoutCancel(ctx), e)
	return nil, err
}

// run is the loop of the caller's goroutine: take what has been answered, decide, send, wait.
func (a *asking) run() (lease *Lease, err error) {
	if a.ctx.Err() != nil {
		return nil, ofCaller(context.Cause(a.ctx))
	}
	a.signal = make(chan struct{}, 1)
	a.inFlight = a.room[:0]
	defer a.end()
	now := time.Duration(0)
	if a.waiting {
		defer func() { a.locker.queues.leave(a, lease != nil) }()
		if err := a.attend(); err != nil {
			return nil, err
		}
		now = a.now()
	}
	for ; ; now = a.now() {
		if len(a.inFlight) > 0 || len(a.strays) > 0 {
			a.take(now)
		}
		a.forget(now)
		switch {
		case a.ctx.Err() != nil:
			return nil, a.giveUp(ofCaller(context.Cause(a.ctx)))
		case now >= a.limit():
			return nil, a.giveUp(nil)
		case a.winner != nil:
			if lease, err := a.grant(now); lease != nil || err != nil {
				return lease, err
			}
			continue
		}
		if err := a.decided(now); err != nil {
			return nil, err
		}
		if a.maySend(now) {
			due := now >= a.sendAt
			if a.waiting && (due || a.polling) && a.news() {
				due = true
			}
			if due && !a.send(now) {
				continue
			}
		}
		a.sleep(now)
	}
}

// sleep waits until there may be something to do. Meanwhile the hub may try.
func (a *asking) sleep(now time.Duration) {
	at := a.next(now)
	soon := min(at, later(now, pollMost)) // a try of the hub that stays silent wakes nobody
	offered := a.offer(soon)
	if offered {
		at = soon
	}
	if len(a.inFlight) > 0 { // most answers come before, so that it need not be exact
		at = a.about(now, at)
	}
	a.wakeAt(at)
	wait(a.signal, a.ctx.Done())
	if offered {
		a.retract()
	}
}

// limit is when the acquisition ends at the latest. A Try ends with the useful life of what it may have taken.
func (a *asking) limit() time.Duration {
	at := a.bound
	if !a.waiting {
		for _, c := range a.taking {
			if sent, ok := c.sentAt(); ok {
				at = min(at, later(sent, a.config.useful()))
			}
		}
	}
	return at
}

// decided returns how the acquisition ends now without a lease, or nil if it goes on.
func (a *asking) decided(now time.Duration) error {
	if a.held {
		a.withdraw()
	}
	if !a.held && len(a.inFlight) > 0 && now-a.quiet >= a.config.patience() {
		a.quiet = now
		a.countFailure(now, now)
	}
	if a.waiting {
		a.share()
	}
	switch open, doubt := a.outstanding(now), a.inDoubt(now) || a.astray(); {
	case a.unbounded() && a.failures >= mostFailures:
		return a.giveUp(nil)
	case open:
		return nil
	case a.held && !doubt && !a.waiting:
		return ErrNotAcquired
	case a.held && !a.polling:
		a.polling, a.sendAt = true, later(now, a.pause())
		a.listen()
	case a.last == answerError && !doubt && !a.waiting:
		if a.withdraw(); !a.outstanding(now) { // something may have been written just now
			return a.lastErr
		}
	}
	return nil
}

// unbounded: nothing but an answer ends the acquisition.
func (a *asking) unbounded() bool {
	_, ok := a.ctx.Deadline()
	return a.waiting && !ok && a.bound == forever
}

// outstanding: a command that may take the key was written, and its answer may still come. One that was written longer
// than a TTL ago is not waited for.
func (a *asking) outstanding(now time.Duration) bool {
	for _, c := range a.taking {
		if at, sent := c.sentAt(); sent && !c.taken && now-at < a.config.ttl {
			return true
		}
	}
	return false
}

// inDoubt: a command was written that may have taken the key, its own answer will not come or is not waited for any
// more, and no later one has told.
func (a *asking) inDoubt(now time.Duration) bool {
	for _, c := range a.taking {
		at, sent := c.sentAt()
		if !c.settled && (c.taken || sent && now-at >= a.config.ttl) {
			return true
		}
	}
	return false
}

// mayYet: a command that may take the key was written, and it may yet be executed, whatever Redis has said since.
func (a *asking) mayYet() bool {
	for _, c := range a.taking {
		if _, sent := c.sentAt(); sent {
			return true
		}
	}
	return false
}

// maySend: there is something to ask, and not too much of it in flight.
func (a *asking) maySend(now time.Duration) bool {
	if a.held && !a.polling {
		return false // what was written is waited for, and nothing sent beside it
	}
	return a.silent(now) < mostInFlight
}

// silent counts the commands in flight that are not older than a TTL.
func (a *asking) silent(now time.Duration) (n int) {
	for _, c := range a.inFlight {
		if now-c.began < a.config.ttl {
			n++
		}
	}
	return n
}

// next is when the loop should look again if no answer comes.
func (a *asking) next(now time.Duration) time.Duration {
	at := a.limit()
	if a.maySend(now) {
		at = min(at, a.sendAt)
	}
	if !a.held && len(a.inFlight) > 0 {
		at = min(at, later(a.quiet, a.config.patience()))
	}
	for _, c := range a.inFlight {
		sent, _ := c.sentAt()
		for _, since := range []time.Duration{c.began, sent} { // maySend and outstanding may change
			if old := later(since, a.config.ttl); old > now {
				at = min(at, old)
			}
		}
	}
	return max(at, now)
}

// pause is how long to wait before the next try. It ends when the holder's key will have lapsed.
func (a *asking) pause() time.Duration {
	a.attempt++
	var d time.Duration
	if f := a.config.backoff; f != nil {
		d = max(f(a.attempt), minBackoff)
	} else {
		d = a.locker.clock.jitter(min(pollFirst<<min(a.attempt-1, 16), pollMost), 0.5)
	}
	if a.held {
		d = min(d, a.lapse())
	}
	return d
}

// lapse is how long the holder's key will live, and a little longer: Redis tells whole milliseconds.
func (a *asking) lapse() time.Duration {
	if a.pttl < 0 {
		return forever
	}
	return later(a.pttl, max(a.locker.clock.jitter(pollFirst, 1), 2*time.Millisecond))
}

// send sends the next command: a check of the scripts, then SET, then the settling script. It returns false if there
// is no token for it.
func (a *asking) send(now time.Duration) bool {
	if !a.locker.checked.Load() {
		return a.check(now)
	}
	c := &a.first
	if a.asked {
		c = a.settling()
	} else {
		c.target, c.ctx, c.owner, c.kind, c.token = a.target, a.ctx, a.acquisition, kindSet, &a.token
		if a.config.fencing {
			c.kind = kindSettle
		}
	}
	if !a.draw(now, c) {
		return false
	}
	c.began, c.beside = now, len(a.inFlight) > 0
	a.takes(c)
	go c.run()
	return true
}

// settling returns the next command that may take the key, after the first one.
func (a *asking) settling() *command {
	if a.ready == nil {
		a.ready = a.command(a.ctx, a.acquisition, kindSettle, new(token))
	}
	if len(a.taking) > 0 {
		listed := a.listed()
		a.ready.listed = &listed
	}
	return a.ready
}

// takes takes note that c, which may take the key, is sent.
func (a *asking) takes(c *command) {
	a.asked, a.ready = true, nil
	a.taking = append(a.taking, c)
	a.underWay(c)
	a.sendAt = later(c.began, a.config.haste())
}

// check runs the renew and the release script with a token that nobody has, so that a server, a proxy or a user
// without scripts is found out before a key is taken. The first time both go out together.
func (a *asking) check(now time.Duration) bool {
	for i, k := range []kind{kindRenew, kindRelease} {
		if a.checked[i] || a.silent(now) >= mostInFlight {
			continue
		}
		c := a.command(a.ctx, a.acquisition, k, new(token))
		if c.check = true; !a.draw(now, c) {
			return false
		}
		a.dispatch(now, c)
	}
	a.sendAt = later(now, a.config.haste())
	return true
}

// draw gives c a new token. Without a random source nothing is sent, and that is the last answer.
func (a *asking) draw(now time.Duration, c *command) bool {
	if c.err = newToken(c.token); c.err != nil {
		c.began, a.last = now, answerError
		a.fail(now, c)
		return false
	}
	return true
}

func (a *asking) dispatch(now time.Duration, c *command) {
	c.began, c.beside = now, len(a.inFlight) > 0 && !c.check
	a.underWay(c)
	go c.run()
}

func (a *asking) underWay(c *command) {
	if a.held || len(a.inFlight) == 0 {
		a.quiet = c.began
	}
	a.inFlight = append(a.inFlight, c)
	a.held, a.polling = false, false
}

// listed returns the commands whose tokens the settling script is asked about: the newest whose own answer is not
// known.
func (a *asking) listed() []*command {
	return slices.Clone(a.taking[max(0, len(a.taking)-mostListed):])
}

// forget drops what was written two TTLs ago: whatever it took has lapsed, unless it is executed later still. A late Yes
// is heard all the same.
func (a *asking) forget(now time.Duration) {
	two := later(a.config.ttl, a.config.ttl)
	a.strays = slices.DeleteFunc(a.strays, func(c *command) bool { return now-c.began >= two })
	a.taking = slices.DeleteFunc(a.taking, func(c *command) bool {
		sent, ok := c.sentAt()
		if !ok || now-max(sent, c.until) < two {
			return !ok && now-c.began >= two && c.withdraw()
		}
		if !c.settled && a.last == answerHeld { // by another, or by what this took
			a.held, a.last = false, answerNone
		}
		return true
	})
}

// take takes the answers that have come in, oldest first.
func (a *asking) take(now time.Duration) {
	a.mu.Lock()
	newest := a.answers
	a.answers = nil
	a.mu.Unlock()
	var oldest *command
	for newest != nil {
		newest, newest.next, oldest = newest.next, oldest, newest
	}
	for ; oldest != nil; oldest = oldest.next {
		a.learn(now, oldest)
	}
}

// hasCome: c's answer has come in, and is yet to be taken.
func (a *acquisition) hasCome(c *command) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for other := a.answers; other != nil; other = other.next {
		if other == c {
			return true
		}
	}
	return false
}

// learn takes one answer into account.
func (a *asking) learn(now time.Duration, c *command) {
	a.inFlight = without(a.inFlight, c)
	c.taken = true
	if c.err == errWithdrawn {
		a.taking = without(a.taking, c)
		return
	}
	a.quiet = now
	switch {
	case c.check:
		a.learnCheck(now, c)
	case c.kind == kindRenew || c.kind == kindRelease:
		// whoever sent it looks at it
	case c.verdict == yes:
		a.failures = 0
		h := c.holder()
		if a.holds(h, c.code); h != c {
			a.taking = without(a.taking, c)
		}
	case c.verdict == no:
		a.learnNo(now, c)
	case c.verdict == failed:
		a.taking = without(a.taking, c)
		a.last = answerError
		a.fail(now, c)
	default:
		c.doubtful = now
		if a.fail(now, c); a.failures == 1 {
			a.sendAt = now // it is settled at once
		}
	}
}

// learnCheck: an error reply is Redis' answer even if nobody knows what it means, since nothing can have been taken.
func (a *asking) learnCheck(now time.Duration, c *command) {
	if c.kind == kindRelease && c.err != nil && isReply(c.err) && strings.Contains(strings.ToLower(c.err.Error()), "publish") &&
		!a.locker.quiet.Swap(true) {
		a.sendAt = now
		return
	}
	if c.verdict == failed || c.verdict == unknown {
		if c.verdict == failed || isReply(c.err) {
			a.last = answerError
		}
		a.fail(now, c)
		return
	}
	a.failures = 0
	a.checked[c.kind-kindRenew] = true
	if a.checked[0] && a.checked[1] {
		a.locker.checked.Store(true)
		a.sendAt = now
	}
}

// learnNo: another holds the key. That settles the tokens that Redis was asked about, too, except those that were
// still on their way less than a TTL after they were written: they may have arrived later.
func (a *asking) learnNo(now time.Duration, c *command) {
	a.taking = without(a.taking, c)
	for _, other := range c.others() {
		at, sent := other.sentAt()
		old := sent && !other.taken && c.sentTime()-at >= a.config.ttl
		if old || other.taken && other.doubtful <= c.sentTime() {
			other.settled = true
		}
	}
	a.held, a.polling, a.last, a.failures = true, false, answerHeld, 0
	a.heldAt = min(a.heldAt, now)
	before := a.pttl
	if a.pttl = -1; c.kind == kindSettle && c.code >= 0 && c.code < int64(forever/time.Millisecond) && (c.code > 0 || before != 0) {
		a.pttl = time.Duration(c.code) * time.Millisecond // 0 in the key's last millisecond, which is over by the next try
	}
}

// fail takes note of an answer that says nothing about who holds the key.
func (a *asking) fail(now time.Duration, c *command) {
	a.held, a.lastErr = false, c.err
	if a.countFailure(now, c.began) {
		a.sendAt = later(now, a.pause())
	}
}

// countFailure counts what began after the last failure that was counted.
func (a *asking) countFailure(now, began time.Duration) bool {
	if a.failures > 0 && began < a.failedAt {
		return false
	}
	a.failures, a.failedAt = a.failures+1, now
	return true
}

// holds: Redis says that c's token holds the key, and which fence is its own. If it has said so of two, the one sent first
// is over, and given back. It is reckoned with all the same if it was written twice, since it may be executed once more.
func (a *asking) holds(c *command, fence int64) {
	over := a.winner
	switch {
	case over == c:
		if a.fence < 1 {
			a.fence = fence
		}
		return
	case over != nil && over.sentTime() > c.sentTime():
		over = c
	default:
		a.winner, a.fence = c, fence
	}
	if over == nil {
		return
	}
	if over.writeNoMore() <= 1 {
		a.taking = without(a.taking, over)
	} else {
		over.doubtful, over.settled = a.now(), false
	}
	if a.claim(over) {
		clean := a.cleanUp(over)
		a.strays = append(a.strays, clean)
		go clean.run()
	}
}

// astray: the key may yet hold a token beside winner's.
func (a *asking) astray() bool {
	for _, c := range a.strays {
		if !c.taken || c.verdict != yes && c.verdict != no {
			return true
		}
	}
	return false
}

// grant makes a lease of a key that is ours, if there is enough trust left or Redis confirms it once more. Without a
// lease and an error the acquisition goes on.
func (a *asking) grant(now time.Duration) (*Lease, error) {
	w := a.winner
	start := w.sentTime()
	sent := start
	why := errTooLate
	trust := later(sent, a.config.useful())
	end := min(trust, later(start, a.config.maxHold))
	switch {
	case a.config.fencing && a.fence < 1:
		why = errNoFence
	case now < end && !w.cleaned: // if it was given back the DEL may be on its way
		if trust-now >= a.config.useful()/3 {
			return a.keep(start, sent), nil
		}
		c := a.command(a.ctx, a.acquisition, kindRenew, w.token)
		a.await(c, min(end, a.limit()), a.ctx.Done())
		c.withdraw()
		w.until = a.now()
		switch {
		case a.winner != w || a.ctx.Err() != nil || a.now() >= a.limit():
			return nil, nil // the loop looks at it anew
		case c.taken && c.verdict == yes:
			return a.keep(start, c.sentTime()), nil
		}
		why = errNotKept
	}
	definite := a.giveBack(w, later(a.now(), a.config.grace()), a.ctx.Done())
	if a.winner == w {
		a.winner = nil
	}
	if definite { // else it may hold the key for a while yet, and the settling script has to recognise it
		a.taking = without(a.taking, w)
	}
	if a.waiting || a.ctx.Err() != nil {
		a.last, a.lastErr = answerError, why
		if a.countFailure(a.now(), w.began) {
			a.sendAt = later(a.now(), a.pause())
		}
		return nil, nil
	}
	return nil, a.orUnknown(why, definite)
}

// orUnknown returns err, which says that the key was not kept, unless it may have been taken all the same.
func (a *asking) orUnknown(err error, definite bool) error {
	if now := a.now(); definite && a.winner == nil && !a.outstanding(now) && !a.inDoubt(now) && !a.astray() {
		return err
	}
	return detailed(ErrOutcomeUnknown, err)
}

// keep ends the acquisition with a lease.
func (a *asking) keep(start, sent time.Duration) *Lease {
	a.kept = a.winner
	fence := int64(noFence)
	if a.config.fencing {
		fence = a.fence
		a.locker.remember(fence)
	}
	return newLease(a.target, a.winner.token, fence, start, sent)
}

// end ends the acquisition. What was not sent is withdrawn, except for clean-ups. From now on answers look after
// themselves; those that came in before are looked after here.
func (a *asking) end() {
	a.withdraw()
	a.mu.Lock()
	a.over.Store(true)
	var late []*command
	for c := a.answers; c != nil; c = c.next {
		late = append(late, a.lateLocked(c))
	}
	if a.kept == nil {
		if a.wakeNoMore(); a.winner != nil {
			late = append(late, a.claimLocked(a.winner))
		}
	}
	a.mu.Unlock()
	for _, c := range late {
		if c != nil {
			go a.cleanUp(c).run()
		}
	}
}

// withdraw withdraws everything in flight that was not sent, except for clean-ups.
func (a *asking) withdraw() {
	for _, c := range a.inFlight {
		if c.kind != kindRelease || c.check {
			c.withdraw()
		}
	}
}

// giveUp ends the acquisition without a lease; cause is that of the context if it has ended. If something is unknown
// it tries to clean up and listens for a moment.
func (a *asking) giveUp(cause error) error {
	if a.waiting {
		a.locker.queues.leave(a, false) // the next need not wait until the rest is cleared up
	}
	a.withdraw()
	now := a.now()
	until := later(min(now, a.limit()), a.config.grace())
	if a.winner == nil && (a.outstanding(now) || a.inDoubt(now)) {
		tokens := a.listed()
		last := len(tokens) - 1
		clean := a.cleanUp(tokens[last])
		others := tokens[:last]
		clean.listed = &others
		a.await(clean, until, nil)
		for a.winner == nil && a.outstanding(a.now()) && a.awaitAny(until, nil) {
		}
	}
	var err error
	switch w := a.winner; {
	case w != nil:
		definite := a.giveBack(w, until, nil)
		if a.taking = without(a.taking, w); a.winner == w {
			a.winner = nil
		}
		err = a.orUnknown(errTooLate, definite)
	case a.outstanding(a.now()) || a.inDoubt(a.now()) || a.astray():
		err = detailed(ErrOutcomeUnknown, a.lastErr)
	case a.last == answerHeld:
		err = ErrNotAcquired
	case a.mayYet():
		err = detailed(ErrOutcomeUnknown, a.lastErr)
	case a.lastErr != nil:
		err = a.lastErr
	case cause == nil:
		err = fmt.Errorf("no answer within %v", a.now().Round(time.Millisecond))
	default:
		return cause
	}
	return detailed(err, cause)
}

// claim returns whether c's token has yet to be given back, which is up to the caller then.
func (a *acquisition) claim(c *command) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.claimLocked(c) != nil
}

func (a *acquisition) claimLocked(c *command) *command {
	if c.cleaned {
		return nil
	}
	c.cleaned = true
	c.writeNoMore()
	return c
}

// cleanUp returns a command that gives c's token back.
func (a *acquisition) cleanUp(c *command) *command {
	clean := a.deletion(a, c.token)
	clean.began = a.now()
	return clean
}

// giveBack gives c's token back, and returns whether Redis said in time, and before done is closed, that it does not hold
// the key now, and will not: of a command that was written twice, one may be executed later.
func (a *asking) giveBack(c *command, until time.Duration, done <-chan struct{}) bool {
	if !a.claim(c) {
		return false
	}
	clean := a.cleanUp(c)
	a.await(clean, until, done)
	return clean.taken && (clean.verdict == yes || clean.verdict == no) && c.writeNoMore() <= 1
}

// await sends c and waits until it is answered and taken, until the given time, or until done.
func (a *asking) await(c *command, until time.Duration, done <-chan struct{}) {
	a.dispatch(a.now(), c)
	for !c.taken && a.awaitAny(until, done) {
	}
}

// awaitAny waits for any answer, takes it, and returns false if none came before the given time.
func (a *asking) awaitAny(until time.Duration, done <-chan struct{}) bool {
	now := a.now()
	if now >= until {
		return false
	}
	a.wakeAt(until)
	if !wait(a.signal, done) {
		return false
	}
	a.take(a.now())
	return true
}

// wait returns true when signal is filled, and false if done, which may be nil, is closed before.
func wait(signal, done <-chan struct{}) bool {
	if done == nil { // as often as not, and cheaper
		<-signal
		return true
	}
	select {
	case <-signal:
		return true
	case <-done:
		return false
	}
}

// wanted implements owner. A clean-up is, until what it is to give back has lapsed for certain.
func (a *acquisition) wanted(c *command) (time.Duration, bool) {
	now := a.now()
	if c.kind == kindRelease && !c.check {
		return now, now-c.began < later(a.config.ttl, a.config.ttl)
	}
	return now, !a.over.Load() && now < a.bound && a.ctx.Err() == nil
}

// answered implements owner. After the end a Yes for a token that no lease has is answered by giving it back.
func (a *acquisition) answered(c *command) {
	a.mu.Lock()
	var late *command
	if !a.over.Load() {
		c.next, a.answers = a.answers, c
		a.ring()
	} else {
		late = a.lateLocked(c)
	}
	a.mu.Unlock()
	if late != nil {
		a.cleanUp(late).run()
	}
}

// lateLocked returns the command whose token has to be given back after a late answer to c, if any.
func (a *acquisition) lateLocked(c *command) *command {
	if c.verdict != yes || c.kind == kindRenew || c.kind == kindRelease || c.holder() == a.kept {
		return nil
	}
	return a.claimLocked(c.holder())
}

// without returns list without c, in the same order.
func without(list []*command, c *command) []*command {
	for i, other := range list {
		if other == c {
			return append(list[:i], list[i+1:]...)
		}
	}
	return list
}
