package redislease

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Those who wait for one key of a Locker stand in line, in the order in which they came. Only the first, the head, talks
// to Redis; the others share what it learns:
//
//	behind others ── all ahead have left ──▶ head ──▶ tries ── granted ──────▶ leaves
//	      │                                             │ ▲
//	      │                                   held by another: a release that is heard of, a new subscription, the poll
//	      └── its context or its bound ends, or the head has failed three times and it has no bound ──▶ leaves
//
// A new head tries at once, unless it is known that the key is held and that its release will be heard of: the last head
// has left with the key, or has just asked.
//
// A release publishes on the channel of its key. What is heard is kept with the line and not with a waiter, until a
// command is sent after it: so a head that leaves between the two takes no wake-up with it.
//
// While the head sleeps, the hub tries for it: as soon as it hears of a release it sends the command that the head has made
// ready, and wakes nobody. That another holds the key after all is no news for the head; any other answer wakes it, and a
// try that stays silent is found when it looks, which it does every two seconds at least.
//
// A line's channel is listened to from the first time that its head finds the key held until a second after the last
// waiter has left, by one subscription for all lines of a Locker, which the hub keeps. That Redis has confirmed it is a
// reason to look again, since what was published before was not heard. Nobody relies on being woken: the head polls all
// the while, less and less often, and no later than the holder's key lapses.
type queues struct {
	mu       sync.Mutex
	lines    map[string]*line // by the key in Redis
	waited   int              // how many of them somebody stands in
	away     *reader          // the last one that was; it may be back
	hub      chan struct{}    // filled when lines have changed; nil: no goroutine listens
	told     bool             // an observer knows that waiters are not woken
	telling  atomic.Bool      // it is being told
	failures int              // of the subscription, in a row
	flaps    int              // in a row: it worked, and not for long
	since    time.Time        // when it began to work; zero: it does not
	retryAt  time.Time        // not to be opened before
	left     atomic.Int32     // calls of the client that are under way or were left behind
	unheard  atomic.Bool      // what this Locker releases is not published
}

// line is the waiters for one key. Its Locker's queues.mu guards it.
type line struct {
	head, tail *place
	heard      bool      // something that no command has followed yet
	wanted     bool      // its channel is to be listened to
	listening  bool      // Redis has confirmed that
	idle       time.Time // since when nobody waits

	// What the head has learnt.
	last    lastAnswer
	lastErr error
	heldAt  time.Time // when another was found to hold the key

	lull lull // what the last head knew
}

// lull: the key is held, and its release will be heard of.
type lull struct {
	known    bool
	pollAt   time.Time // when the head would have polled next
	attempt  int       // pauses so far
	lapsesAt time.Time // when the key does if it is not renewed; zero: that is not known
}

// place is a waiter's place in a line.
type place struct {
	*acquisition
	deputy
	line          *line
	ahead, behind *place
	endless       bool // it has no bound
	hopeless      bool // the head has failed so often that whoever has no bound gives up
}

// releasedSuffix is that of the channel that tells of a key's release.
const releasedSuffix = ":released"

// join puts a at the end of the line for its key.
func (q *queues) join(a *asking) {
	endless := a.unbounded()
	q.mu.Lock()
	defer q.mu.Unlock()
	key := a.key.(string)
	l := q.lines[key]
	if l == nil {
		if l = new(line); q.lines == nil {
			q.lines = map[string]*line{}
		}
		q.lines[key] = l
	}
	p := &place{acquisition: a.acquisition, line: l, ahead: l.tail, endless: endless}
	if a.place = p; l.tail == nil {
		l.head = p
		q.waited++
		q.readOnLocked()
	} else {
		l.tail.behind = p
	}
	l.tail = p
}

// leave takes a out of its line, from any place, and has the next be the head if a was. granted: it has the key.
func (q *queues) leave(a *asking, granted bool) {
	p := a.place
	if p == nil {
		return
	}
	a.place = nil
	q.mu.Lock()
	defer q.mu.Unlock()
	l := p.line
	head := l.head == p
	if p.ahead == nil {
		l.head = p.behind
	} else {
		p.ahead.behind = p.behind
	}
	if p.behind == nil {
		l.tail = p.ahead
	} else {
		p.behind.ahead = p.ahead
	}
	if granted {
		l.learnt(answerHeld, nil)
	}
	if l.head == nil {
		q.waited--
	}
	switch {
	case l.head == nil && !l.wanted:
		delete(q.lines, a.key.(string))
	case l.head == nil:
		l.lull, l.idle = lull{}, time.Now()
		l.last, l.lastErr = answerNone, nil // whoever comes next asks for himself
		signal(q.hub)
	case head:
		l.inherit(a, granted)
		l.head.ring()
	}
}

// inherit keeps what the head that leaves knows, for the next one.
func (l *line) inherit(a *asking, granted bool) {
	now := time.Now()
	switch {
	case !l.listening:
		l.lull = lull{}
	case granted && !a.locker.queues.unheard.Load():
		pause := min(a.locker.clock.jitter(pollMost, 0.5), later(a.config.ttl, pollFirst))
		l.lull = lull{true, now.Add(pause), mostShift, now.Add(a.config.ttl)}
	case !granted && a.held && a.polling && len(a.inFlight) == 0 && a.config.backoff == nil:
		l.lull = lull{known: true, pollAt: now.Add(a.sendAt - a.now()), attempt: a.attempt}
	default:
		l.lull = lull{}
	}
}

func (l *line) learnt(last lastAnswer, err error) {
	if last == answerHeld && l.last != answerHeld {
		l.heldAt = time.Now()
	}
	l.last, l.lastErr = last, err
}

// attend waits in line until a is the head. It returns an error if a ends before.
func (a *asking) attend() error {
	q := &a.locker.queues
	q.join(a)
	for {
		now := a.now()
		q.mu.Lock()
		l := a.place.line
		head, hopeless := l.head == a.place, a.place.hopeless
		a.last, a.lastErr = l.last, l.lastErr
		if a.last == answerHeld {
			a.heldAt = min(a.heldAt, max(0, now-time.Since(l.heldAt)))
		}
		lull := l.takeLull(head)
		q.mu.Unlock()
		switch {
		case a.ctx.Err() != nil:
			return a.giveUp(ofCaller(context.Cause(a.ctx)))
		case hopeless:
			a.last = answerError // that another holds the key is not why
			return a.giveUp(nil)
		case now >= a.bound:
			return a.giveUp(nil)
		case head:
			if lull.known {
				a.goOn(now, lull)
			}
			return nil
		}
		if a.bound != forever {
			a.wakeAt(a.bound)
		}
		wait(a.signal, a.ctx.Done())
	}
}

// takeLull returns what the last head knew, to the next one.
func (l *line) takeLull(head bool) (known lull) {
	if head {
		known, l.lull = l.lull, lull{}
	}
	return known
}

// goOn has a poll where another has left off. Its tries ask for the TTL at once.
func (a *asking) goOn(now time.Duration, l lull) {
	a.asked, a.held, a.polling = true, true, true
	if a.config.backoff == nil {
		a.attempt, a.sendAt = l.attempt, later(now, max(0, time.Until(l.pollAt)))
		return
	}
	if !l.lapsesAt.IsZero() {
		a.pttl = max(0, time.Until(l.lapsesAt))
	}
	a.sendAt = later(now, a.pause())
}

// share has those behind a know what it has learnt.
func (a *asking) share() {
	if a.place == nil {
		return
	}
	q := &a.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	if a.last != answerNone {
		a.place.line.learnt(a.last, a.lastErr)
	}
	if a.failures >= mostFailures {
		a.place.line.lastErr = a.lastErr
		for w := a.place.behind; w != nil; w = w.behind {
			if w.endless {
				w.hopeless = true
				w.ring()
			}
		}
	}
}

// news returns whether something was heard that no command has followed yet. One has to be sent now.
func (a *asking) news() bool {
	if a.place == nil {
		return false
	}
	q := &a.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	heard := a.place.line.heard
	a.place.line.heard = false
	return heard
}

// offer has the hub try for a, which sleeps until the given time. It returns false if a has to try by itself: it does not
// wait for a holder in line, or what it has sent may yet take the key.
func (a *asking) offer(until time.Duration) bool {
	if a.place == nil || !a.polling || len(a.inFlight) > 0 || len(a.taking) > 0 {
		return false
	}
	c := a.settling()
	if newToken(c.token) != nil {
		return false // it will be tried again, and said
	}
	q := &a.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	a.place.deputy = deputy{offered: true, until: until, ready: c}
	return true
}

// retract has the hub try no more, and takes over what it has done.
func (a *asking) retract() {
	q := &a.locker.queues
	q.mu.Lock()
	d := a.place.deputy
	a.place.deputy = deputy{}
	if d.ready == nil && !a.hasCome(d.sent) { // whoever sent it may not read meanwhile
		q.readOnLocked()
	}
	q.mu.Unlock()
	if d.refused != nil {
		a.learnNo(d.refusedAt, d.refused)
		a.polling, a.sendAt = true, min(a.sendAt, later(d.refusedAt, a.lapse()))
	}
	if a.ready = d.ready; d.ready == nil {
		a.takes(d.sent)
	}
}

// deputy is what the hub needs to try for a head that sleeps, and what came of it. Its Locker's queues.mu guards it.
type deputy struct {
	offered   bool          // the head sleeps, and the hub may try
	until     time.Duration // when the head will wake up by itself
	ready     *command      // to be sent when a release is heard of; nil: it has been
	sent      *command      // the last one that was
	refused   *command      // the last one to which Redis said that another holds the key
	refusedAt time.Duration
}

// try returns the command to send for the head, if it has left that to the hub. The head stays asleep.
func (p *place) try() *command {
	c := p.ready
	if c != nil {
		p.ready, p.sent = nil, c
		c.owner, c.began = p, p.now()
	}
	return c
}

// answered implements owner for the tries of the hub. That another holds the key is no news for the head.
func (p *place) answered(c *command) {
	if c.verdict != no || !p.again(c) {
		p.acquisition.answered(c)
	}
}

// again makes another try ready after a No to c. It returns false if it is the head that has to go on.
func (p *place) again(c *command) bool {
	next := p.command(p.ctx, p.acquisition, kindSettle, new(token))
	if newToken(next.token) != nil {
		return false
	}
	q := &p.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	now := p.now()
	// The head has to know if that key lapses before it will look.
	lapses := c.code >= 0 && c.code < int64(pollMost/time.Millisecond)
	if !p.offered || lapses && later(now, time.Duration(c.code)*time.Millisecond) < p.until {
		return false
	}
	p.line.learnt(answerHeld, nil)
	p.ready, p.refused, p.refusedAt = next, c, now
	return true
}
