package redislease

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// A Lease is one acquisition of a key: held, then lost or released, which is final.
//
//	         the watchdog renews it
//	          ┌───┐
//	acquired ─┴─▶ held ──── Release ───────────────────────────▶ released
//	               │
//	               └─ a No, the end of trust, the longest hold ▶ lost
//
// What goes wrong in each step, and what follows:
//
//   - A renewal is refused, or is not answered: nothing yet; another follows while trust lasts.
//   - Redis says No: lost, at once and for good. Two Noes, or a No and an end of trust: the first one counts.
//   - The process stood still: whoever looks first, at the clock under the lease's mutex, ends the lease. That may be
//     the watchdog, an answer that comes in, or a call.
//   - Release meets a renewal in flight: it is withdrawn if it was not sent; if it was, it comes before the DEL, or after
//     it and finds the key gone. Either way its answer finds a lease that has ended and is dropped.
//   - Release is not answered: the key lapses within a TTL, since nothing renews it any more.
//   - The caller's context ends: so does the lease's, and renewing stops; the lease stays held until trust ends, which
//     is time for the work to unwind and for Release to delete the key.
//
// Run the critical section under [Lease.Context]. Ask [Lease.Err] whether a write may still land, which costs nothing;
// call [Lease.Renew] before a step that cannot be undone; and release with a deferred [Lease.Release].
// All methods are safe for concurrent use, on nil and on a zero Lease too: those hold nothing.
type Lease struct {
	*target
	inner  context.Context // ends with the lease, and with the caller's context
	cancel context.CancelCauseFunc
	fence  int64
	token  token

	// Guarded by mu, like all that follows it.
	state     state
	releasing bool // a call of Release is under way
	resulted  bool // a call of Release has had a result

	mu       sync.Mutex
	lost     *LostError // set if state is lost
	lastErr  error      // the last failed renewal since the last confirmed one
	endedAt  time.Duration
	schedule schedule
	flights  []*command    // renewals in flight
	shared   chan struct{} // closed when the call of Release that is under way has its result
	released releaseResult
	events   *eventQueue // nil without an observer
}

type state uint8

const (
	stateHeld state = iota
	stateLost
	stateReleased
)

// releaseResult is what the last call of Release found.
type releaseResult struct {
	lost *LostError // the lease was lost before, or the key was not ours any more
	err  error      // Redis refused or did not answer: not definite
}

func (r *releaseResult) asError() error {
	switch {
	case r.lost == nil:
		return r.err
	case r.err == nil:
		return r.lost
	default:
		return errors.Join(r.lost, r.err)
	}
}

// leaseContext is a Lease as a context. Its deadline is no timer of its own.
type leaseContext Lease

// Deadline returns the earlier of the caller's deadline and the end of the longest hold.
func (c *leaseContext) Deadline() (time.Time, bool) {
	deadline, ok := c.inner.Deadline()
	if end := c.schedule.longest(); end != forever {
		if longest := c.base.time.Add(end); !ok || longest.Before(deadline) {
			return longest, true
		}
	}
	return deadline, ok
}

func (c *leaseContext) Done() <-chan struct{} { return c.inner.Done() }
func (c *leaseContext) Err() error            { return c.inner.Err() }
func (c *leaseContext) Value(key any) any     { return c.inner.Value(key) }

// releasedError is a Lease as the cause of the end that its holder gave it.
type releasedError Lease

func (e *releasedError) Error() string {
	return fmt.Sprintf("redislease: lease %q: released", e.name())
}
func (e *releasedError) Unwrap() error { return ErrReleased }

// newLease makes a lease of a key that was acquired by a command sent at start, and last confirmed by one sent at sent.
func newLease(t *target, token *token, fence int64, start, sent time.Duration) *Lease {
	l := &Lease{target: t, token: *token, fence: fence, schedule: schedule{config: t.config, start: start, offset: t.grid().offset}}
	l.inner, l.cancel = context.WithCancelCause(t.ctx)
	l.schedule.confirm(sent, t.locker.clock.random())
	if t.config.observer != nil {
		l.events = new(eventQueue)
	}
	return l
}

// begin starts the watchdog and reports the lease to the observer, for which nothing waits.
func (l *Lease) begin(acquired Event) {
	l.mu.Lock()
	deliver := l.pushLocked(acquired)
	l.target.lease.Store(l)
	l.rearmLocked(l.now())
	l.mu.Unlock()
	if deliver {
		l.deliverOne()
	}
}

// Context returns the context to run the critical section under. It has the values of the context that the lease was
// acquired with. It ends when the lease does, or when that context ends; [context.Cause] says why: a [*LostError],
// [ErrReleased], or the cause of the caller's context. Its deadline is the earlier of the caller's and the end of
// WithMaxHold.
func (l *Lease) Context() context.Context {
	if l.none() {
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(ErrReleased)
		return ctx
	}
	return (*leaseContext)(l)
}

// Key returns the key as it was given, without the Locker's prefix.
func (l *Lease) Key() string {
	if l.none() {
		return ""
	}
	return l.name()
}

// Token returns the random value that the key holds for this lease. Whoever knows it can release the lease.
func (l *Lease) Token() string {
	if l.none() {
		return ""
	}
	return string(l.token[:])
}

// Fence returns the lease's fence: a number of at least 1 that is greater than that of every lease that others had of
// the key before, and never changes. What writes under the lease hands it to the place where the write lands, which
// refuses a smaller one than it has seen; see [WithFencing]. Without that option it is -1, which every check refuses.
func (l *Lease) Fence() int64 {
	if l.none() {
		return noFence
	}
	return l.fence
}

// Until returns when the lease ends unless it is renewed before; afterwards, when it would have. The result has a
// monotonic reading.
func (l *Lease) Until() time.Time {
	if l.none() {
		return time.Time{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Add(l.schedule.end() - l.now()) // not from base on: the machine may have been suspended since
}

// Err returns nil while the lease is held, then a [*LostError] or an error that matches [ErrReleased]. It asks the
// clock and not Redis, so that it is right even where a process that stood still has not yet been told by its timers:
// check it before each write. It is nil for as long as a write may still land, even if Context has ended because the
// caller's context has.
func (l *Lease) Err() error {
	if l.none() {
		return ErrReleased
	}
	l.mu.Lock()
	found := l.lookLocked(l.now())
	err := l.causeLocked()
	l.mu.Unlock()
	l.carryOut(found, err)
	return err
}

// Renew asks Redis to confirm and extend the lease, and waits for the answer, for ctx, or for the end that the lease had
// when the call began. Call it before a step that cannot be undone.
//
// It returns nil only if Redis said yes to a command sent after the call began. An error that matches [ErrLost] or
// [ErrReleased] says that the lease is over. Any other error says that it was not confirmed and is as it was: do not
// take the step. Renew is bounded by WithMaxHold and does not count for WithMaxRenewals.
func (l *Lease) Renew(ctx context.Context) error {
	if l.none() {
		return ErrReleased
	}
	if ctx == nil {
		return &opError{"renew", l.name(), errNilContext}
	}
	done := ctx.Err() != nil
	l.mu.Lock()
	now := l.now()
	found := l.lookLocked(now)
	var c *command
	waiter := make(chan struct{}, 1)
	if l.state == stateHeld && !done {
		c = l.renewalLocked(ctx, now, waiter)
		c.until = l.schedule.end()
		go c.run()
	}
	err := l.causeLocked()
	l.mu.Unlock()
	l.carryOut(found, err)
	switch {
	case err != nil:
		return err
	case c == nil:
		return &opError{"renew", l.name(), ofCaller(context.Cause(ctx))}
	}
	wait(waiter, ctx.Done())
	return l.renewed(ctx, c)
}

// renewed ends a call of Renew.
func (l *Lease) renewed(ctx context.Context, c *command) error {
	l.mu.Lock()
	found := l.lookLocked(l.now())
	found.deliver = found.deliver || c.handed
	c.waiter = nil // from now on the answer looks after itself
	err, verdict := l.causeLocked(), c.outcome()
	l.mu.Unlock()
	l.carryOut(found, err)
	var cause error
	if ctx.Err() != nil {
		cause = ofCaller(context.Cause(ctx))
	}
	switch {
	case err != nil:
		return err
	case verdict == yes:
		return nil
	case verdict == failed && c.err != errWithdrawn:
		err = detailed(c.err, cause)
	case verdict == unknown:
		err = detailed(ErrOutcomeUnknown, c.err, cause)
	case verdict == unanswered && !c.withdraw():
		err = detailed(ErrOutcomeUnknown, errNoAnswer, cause)
	case cause != nil:
		err = cause
	default:
		err = errNotSent
	}
	return &opError{"renew", l.name(), err}
}

// Release ends the lease and its context and deletes the key if it is still ours. It needs no context: a deferred
// Release has to work when the caller's context is dead. It sends one command and waits for the answer for half the
// TTL and at most 2 s.
//
// It returns nil if the key was deleted; a [*LostError] if the lease was lost before, or Redis found the key not to be
// ours any more; an error that matches [ErrOutcomeUnknown] if Redis did not answer, in which case the key lapses by
// itself; and else the error by which Redis or the client refused.
//
// A deferred Release drops what it returns; the observer sees it all the same, and Do returns it.
//
// Concurrent calls share one result. Once it is definite, further calls return it without asking Redis; after a
// refusal or an unknown outcome another call may send one more command, and returns nil if the key is no longer ours.
func (l *Lease) Release() error {
	if l == nil {
		return nil
	}
	if l.none() {
		return ErrReleased
	}
	result := l.release()
	return result.asError()
}

func (l *Lease) release() releaseResult {
	l.mu.Lock()
	if l.releasing || l.resulted && l.released.err == nil {
		return l.sharedResult()
	}
	now := l.now()
	found := l.lookLocked(now)
	if l.state == stateHeld {
		found = l.endLocked(now, stateReleased, nil)
	}
	ask := l.state == stateReleased || l.lost.Reason == ErrUnconfirmed || l.lost.Reason == ErrMaxHold
	l.releasing = true
	cause := l.causeLocked()
	l.mu.Unlock()

	l.cancel(cause)
	var c *command
	var sentInTime bool
	if ask {
		c, sentInTime = l.delete(now)
	}

	l.mu.Lock()
	result := l.resultLocked(c, sentInTime)
	found.deliver = l.releasedLocked(result) || found.deliver
	l.mu.Unlock()
	l.carryOut(found, nil)
	return result
}

// sharedResult returns the result of the call that is under way, or was. l.mu is held on entry.
func (l *Lease) sharedResult() releaseResult {
	if l.releasing {
		if l.shared == nil {
			l.shared = make(chan struct{})
		}
		shared := l.shared
		l.mu.Unlock()
		<-shared
		l.mu.Lock()
	}
	defer l.mu.Unlock()
	return l.released
}

// delete sends one compare-and-DEL and waits for its answer within the bound. It returns whether the command was
// written, as far as that matters.
func (l *Lease) delete(now time.Duration) (c *command, sent bool) {
	c = l.deletion(l, &l.token)
	c.waiter = l.signal
	until := later(now, l.config.releaseBound())
	defer l.wakeNoMore()
	go c.run()
	for {
		l.wakeAt(l.about(now, until))
		<-l.signal // perhaps one that is left over
		l.mu.Lock()
		arrived := c.arrived
		l.mu.Unlock()
		if arrived {
			return c, true
		}
		if now = l.now(); now >= until {
			return c, !c.withdraw()
		}
	}
}

// resultLocked says what a release has come to; c is nil if Redis had said No before.
func (l *Lease) resultLocked(c *command, sent bool) releaseResult {
	r := releaseResult{lost: l.lost}
	if c == nil {
		return r
	}
	switch verdict := c.outcome(); {
	case verdict == no && r.lost == nil && !l.resulted:
		r.lost = &LostError{Key: l.name(), Reason: reasonOf(c), At: time.Now()}
	case verdict == failed:
		r.err = &opError{"release", l.name(), c.err}
	case verdict == unknown:
		r.err = &opError{"release", l.name(), detailed(ErrOutcomeUnknown, c.err)}
	case verdict == unanswered && sent:
		r.err = &opError{"release", l.name(), detailed(ErrOutcomeUnknown, errNoAnswer)}
	case verdict == unanswered:
		r.err = &opError{"release", l.name(), errNotSent}
	}
	return r
}

// releasedLocked makes the result known, and returns whether an event is to be delivered.
func (l *Lease) releasedLocked(r releaseResult) (deliver bool) {
	if l.state == stateReleased && !l.resulted {
		e := Event{Kind: EventReleased, Err: r.err}
		if r.lost != nil {
			e = Event{Kind: EventLost, Err: r.lost}
		}
		deliver = l.pushLocked(e)
	}
	l.released, l.releasing = r, false
	l.resulted = true
	if l.shared != nil {
		close(l.shared)
		l.shared = nil
	}
	return deliver
}

// found is what a look at the lease has brought about, to be carried out without the mutex.
type found struct {
	ended   error // why the lease has ended just now
	deliver bool  // an event waits, and this goroutine has to see to it
}

// lookLocked ends the lease if its time is up.
func (l *Lease) lookLocked(now time.Duration) found {
	end := l.schedule.end()
	if l.state != stateHeld || now < end {
		return found{}
	}
	switch {
	case l.schedule.capped(end):
		return l.loseLocked(now, ErrMaxHold, nil)
	case l.inner.Err() != nil:
		return l.loseLocked(now, ErrUnconfirmed, &hiding{context.Cause(l.inner), ownErrors})
	case l.lastErr != nil:
		return l.loseLocked(now, ErrUnconfirmed, l.lastErr)
	case len(l.flights) > 0:
		return l.loseLocked(now, ErrUnconfirmed, errNoAnswer)
	default:
		return l.loseLocked(now, ErrUnconfirmed, errStoodStill)
	}
}

var (
	errNoAnswer   = errors.New("no answer from Redis")
	errNotSent    = errors.New("not sent in time")
	errStoodStill = errors.New("no renewal was sent in time: the process or the machine stood still")
)

func (l *Lease) loseLocked(now time.Duration, reason, err error) found {
	lost := &LostError{Key: l.name(), Reason: reason, Err: err, At: time.Now()}
	f := l.endLocked(now, stateLost, lost)
	l.wakeNoMore()
	f.deliver = l.pushLocked(Event{Kind: EventLost, Err: lost})
	return f
}

// endLocked is the only place that ends a lease: state first; the context follows in carryOut, then everything else.
// Renewals that have not been sent never will be, and nobody waits for the others any more.
func (l *Lease) endLocked(now time.Duration, to state, lost *LostError) found {
	l.state, l.lost, l.endedAt = to, lost, now
	for _, c := range l.flights {
		c.withdraw()
		signal(c.waiter)
	}
	l.flights = nil
	return found{ended: l.causeLocked()}
}

// carryOut does what a call has found, on the caller's goroutine. If the lease has ended, its context has, too, when the
// call returns, even if somebody else has ended the lease and not come to the context yet. The mutex is not held.
func (l *Lease) carryOut(f found, cause error) {
	if cause != nil {
		l.cancel(cause)
	}
	if f.deliver {
		l.deliverOne()
	}
}

// causeLocked is why the lease has ended, and nil while it is held.
func (l *Lease) causeLocked() error {
	switch l.state {
	case stateLost:
		return l.lost
	case stateReleased:
		return (*releasedError)(l)
	default:
		return nil
	}
}

// inFlightLocked counts the watchdog's renewals that are silent and not older than a TTL, and returns when the first of
// them will be.
func (l *Lease) inFlightLocked(now time.Duration) (n int, free time.Duration) {
	free = forever
	for _, c := range l.flights {
		if old := later(c.began, l.config.ttl); !c.manual && now < old {
			n++
			free = min(free, old)
		}
	}
	return n, free
}

// renewalLocked returns a renewal that is to be sent now. waiter is set if a call waits for it.
func (l *Lease) renewalLocked(ctx context.Context, now time.Duration, waiter chan struct{}) *command {
	c := l.command(ctx, l, kindRenew, &l.token)
	c.began, c.manual, c.waiter = now, waiter != nil, waiter
	c.beside = len(l.flights) > 0
	l.flights = append(l.flights, c)
	return c
}

// wanted implements owner. A release always is, until it is withdrawn; nobody asks when it was sent.
func (l *Lease) wanted(c *command) (time.Duration, bool) {
	if c.kind == kindRelease {
		return 0, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	ok := l.state == stateHeld && now < l.schedule.end()
	return now, ok && (c.manual || l.inner.Err() == nil && !l.schedule.capped(now))
}

// answered implements owner: a renewal or a release has its answer. Events are delivered here, on the goroutine of the
// command, which has nothing else left to do, unless a call waits for the answer and it is a loss.
func (l *Lease) answered(c *command) {
	l.mu.Lock()
	c.arrived = true
	var f found
	if c.kind == kindRenew {
		now := l.now()
		if f = l.lookLocked(now); l.state == stateHeld {
			f = l.learnLocked(now, c)
		}
		if l.state == stateHeld {
			l.wakeOnlyAt(l.wakeLocked(now))
		}
	}
	if f.deliver && f.ended != nil && c.waiter != nil {
		c.handed, f.deliver = true, false
	}
	signal(c.waiter)
	l.mu.Unlock()
	switch {
	case f.ended == nil && !f.deliver:
	case c.piped:
		go l.tell(f)
	default:
		l.tell(f)
	}
}

// tell carries out what the watchdog or an answer has found, on a goroutine that no other lease waits for.
func (l *Lease) tell(f found) {
	if f.ended != nil {
		l.cancel(f.ended)
	}
	if f.deliver {
		l.deliverAll()
	}
}

// learnLocked takes the answer to a renewal into account, counting from when it was sent.
func (l *Lease) learnLocked(now time.Duration, c *command) found {
	for i, other := range l.flights {
		if other == c {
			l.flights = append(l.flights[:i], l.flights[i+1:]...)
			break
		}
	}
	switch {
	case c.err == errWithdrawn: // for it, nothing has happened
		return found{}
	case c.verdict == yes:
		left := l.schedule.trust - now
		if !c.manual {
			l.schedule.count++
		}
		l.schedule.offset = l.grid().offset // which moves if the clock has jumped
		l.schedule.confirm(c.sentTime(), l.locker.clock.random())
		l.lastErr = nil
		return found{deliver: l.pushLocked(Event{Kind: EventRenewed, Left: left})}
	case c.verdict == no:
		return l.loseLocked(now, reasonOf(c), nil)
	default:
		if l.lastErr = c.err; !c.manual {
			l.schedule.failed(now, l.locker.clock.random())
		}
		return found{deliver: l.pushLocked(Event{Kind: EventRenewFailed, Err: &opError{"renew", l.name(), c.err}})}
	}
}

// reasonOf says what a No to a renewal or a release means.
func reasonOf(c *command) error {
	if c.code == 0 {
		return ErrGone
	}
	return ErrTaken
}

// pushLocked has e wait for its delivery, and returns whether the caller has to see to that.
func (l *Lease) pushLocked(e Event) bool {
	if l.events == nil {
		return false
	}
	if e.Key, e.Fence = l.name(), l.fence; e.Kind == EventLost || e.Kind == EventReleased {
		e.Held = l.endedAt - l.schedule.start
	}
	return l.events.push(e)
}

// deliverOne delivers the first waiting event on this goroutine, and leaves any others to another one.
func (l *Lease) deliverOne() {
	defer func() {
		l.mu.Lock()
		more := l.events.more()
		l.mu.Unlock()
		if more {
			go l.deliverAll()
		}
	}()
	l.mu.Lock()
	e := l.events.pop()
	l.mu.Unlock()
	observe(l.config.observer, context.WithoutCancel(l.ctx), e)
}

// deliverAll delivers events until none waits. An observer that ends its goroutine is followed by another one.
func (l *Lease) deliverAll() {
	alive := false
	defer func() {
		if !alive {
			go l.deliverAll()
		}
	}()
	for {
		l.mu.Lock()
		if !l.events.more() {
			l.mu.Unlock()
			alive = true
			return
		}
		e := l.events.pop()
		l.mu.Unlock()
		observe(l.config.observer, context.WithoutCancel(l.ctx), e)
	}
}

func (l *Lease) none() bool { return l == nil || l.target == nil }
