package redislease

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
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
// A line's channel is listened to from the first time that its head finds the key held until a second after the last
// waiter has left, by one subscription for all lines of a Locker, which the hub keeps. That Redis has confirmed it is a
// reason to look again, since what was published before was not heard. Nobody relies on being woken: the head polls all
// the while, less and less often, and no later than the holder's key lapses.
type queues struct {
	mu       sync.Mutex
	lines    map[string]*line // by the key in Redis
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

const (
	releasedSuffix = ":released" // of the channel that tells of a key's release

	lingering      = time.Second      // for how long a line is listened to without a waiter
	listenQuiet    = 10 * time.Second // after so much silence the subscription is doubted,
	listenPatience = 5 * time.Second  // and after so much more given up
	listenBackoff  = 100 * time.Millisecond
	listenMost     = time.Minute // between two tries to open one that does not work,
	flapMost       = pollMost    // and one that works for a moment
	mostShift      = 10
)

var (
	errCannotSubscribe = errors.New("the client cannot subscribe")
	errDeaf            = errors.New("the subscription is silent")
	errUnheard         = errors.New("releases are not published: Redis refuses it")
)

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
			a.wakeAt(now, a.bound)
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

// offer has the hub try for a, which sleeps until the given time. It returns false if a has to be woken for that, since
// what it has sent may yet take the key.
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
	q.mu.Unlock()
	if d.refused != nil {
		a.learnNo(d.refusedAt, d.refused)
		a.polling, a.sendAt = true, min(a.sendAt, later(d.refusedAt, a.lapse()))
	}
	if a.ready = d.ready; d.ready == nil {
		a.takes(d.sent)
	}
}

// deputy is what the hub needs, and does, to try for a head that sleeps. Its Locker's queues.mu guards it.
type deputy struct {
	offered   bool          // it may
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
	lapses := c.code >= 0 && c.code < int64(pollMost/time.Millisecond)
	if !p.offered || lapses && later(now, time.Duration(c.code)*time.Millisecond) < p.until {
		return false
	}
	p.line.learnt(answerHeld, nil)
	p.ready, p.refused, p.refusedAt = next, c, now
	return true
}

// listen sees to it that releases of a's key will be heard of.
func (a *asking) listen() {
	if a.place == nil {
		return
	}
	k := a.locker
	q := &k.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	if a.place.line.wanted {
		return
	}
	client, ok := k.client.(subscriber)
	if !ok {
		k.tellLocked(errCannotSubscribe)
		return
	}
	if a.place.line.wanted = true; q.hub != nil {
		signal(q.hub)
		return
	}
	q.hub = make(chan struct{}, 1)
	h := &hub{locker: k, client: client, wake: q.hub}
	go h.run()
}

// tellLocked tells an observer, once until the subscription works again, that waiters poll.
func (k *Locker) tellLocked(err error) {
	q := &k.queues
	told := q.told
	if q.told = true; told || k.config.observer == nil || !q.telling.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer q.telling.Store(false)
		observe(k.config.observer, context.Background(),
			Event{Kind: EventPolling, Fence: noFence, Err: fmt.Errorf("redislease: waiters are not woken: %w", err)})
	}()
}

// published takes note of whether a release of this Locker was.
func (k *Locker) published(ok bool) {
	q := &k.queues
	if q.unheard.Load() == !ok {
		return
	}
	if q.unheard.Store(!ok); !ok {
		q.mu.Lock()
		defer q.mu.Unlock()
		k.tellLocked(errUnheard)
	}
}

// subscriber is a client that can subscribe.
type subscriber interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// hub owns the subscription of a Locker. Its goroutine alone opens, changes and closes it:
//
//	(none) ── a line wants it ──▶ open ── confirmed ──▶ works ── no line wants it for a second ──▶ closed, the hub ends
//	   ▲                           │                     │
//	   └── a pause, if it has failed before ◀────────────┴── an error, or silence
//
// A channel that Redis refuses stays unconfirmed, and does not concern the others.
type hub struct {
	locker *Locker
	client subscriber
	wake   chan struct{}
	pubsub *redis.PubSub       // nil: there is none
	have   map[string]struct{} // the keys whose channels it was told to listen to
	ended  chan error          // filled when nothing is read from it any more
}

// run keeps the subscription as the lines want it, until none does.
func (h *hub) run() {
	defer h.close()
	timer := time.NewTimer(lingering)
	defer timer.Stop()
	for {
		now := time.Now()
		want, idle, retryAt := h.sweep(now)
		if want == nil {
			return
		}
		if !now.Before(retryAt) {
			if err := h.follow(want); err != nil {
				h.fail(err)
			}
		}
		next := time.Duration(forever)
		if idle {
			next = lingering
		}
		if h.pubsub == nil {
			next = min(next, max(time.Until(retryAt), time.Millisecond)) // it may have failed just now
		}
		timer.Reset(next)
		select {
		case <-h.wake:
		case <-timer.C:
		case err := <-h.ended:
			h.fail(err)
		}
	}
}

// sweep forgets lines that nobody has stood in for a while, and returns the keys to listen to: nil if there is none, and
// then the next waiter starts another hub. idle: some are about to be forgotten.
func (h *hub) sweep(now time.Time) (want map[string]struct{}, idle bool, retryAt time.Time) {
	q := &h.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	for key, l := range q.lines {
		switch {
		case !l.wanted:
			continue
		case l.head == nil && now.Sub(l.idle) >= lingering:
			delete(q.lines, key)
			continue
		case l.head == nil:
			idle = true
		}
		if want == nil {
			want = map[string]struct{}{}
		}
		want[key] = struct{}{}
	}
	if want == nil {
		q.hub = nil
	}
	return want, idle, q.retryAt
}

// follow has the subscription be about the given keys.
func (h *hub) follow(want map[string]struct{}) error {
	more, less := channels(want, h.have), channels(h.have, want)
	h.have = want
	if h.pubsub != nil && len(more) == 0 && len(less) == 0 {
		return nil
	}
	pubsub, err := h.change(h.pubsub, more, less)
	if err == nil && h.pubsub == nil {
		h.pubsub, h.ended = pubsub, make(chan error, 1)
		r := &reader{hub: h, pubsub: pubsub, ended: h.ended, over: make(chan struct{}), relay: make(chan struct{})}
		go r.run()
	}
	return err
}

// channels returns those of the keys that are in one set and not in the other.
func channels(in, notIn map[string]struct{}) (list []string) {
	for key := range in {
		if _, ok := notIn[key]; !ok {
			list = append(list, key+releasedSuffix)
		}
	}
	slices.Sort(list)
	return list
}

// change changes the subscription, or opens one if pubsub is nil. The client may be held up for ever by a handshake, so
// it is asked on a goroutine that can be left behind, and then closes what it has opened.
func (h *hub) change(pubsub *redis.PubSub, more, less []string) (*redis.PubSub, error) {
	type result struct {
		pubsub *redis.PubSub
		err    error
	}
	left := &h.locker.queues.left
	if left.Load() >= mostInFlight {
		return nil, errDeaf
	}
	left.Add(1)
	done := make(chan result, 1)
	var given atomic.Bool // somebody has the result, or nobody wants it any more
	go func() {
		r := result{pubsub, errGoexit}
		defer func() {
			if v := recover(); v != nil {
				r.err = panicked(v)
			}
			left.Add(-1)
			if (r.err != nil && pubsub == nil || !given.CompareAndSwap(false, true)) && r.pubsub != nil {
				shut(r.pubsub)
			}
			done <- r
		}()
		ctx, cancel := context.WithTimeout(context.Background(), listenPatience)
		defer cancel()
		if r.pubsub == nil {
			r.pubsub = h.client.Subscribe(ctx) // sends nothing yet
		}
		r.err = nil
		for _, channel := range more { // one by one, since one that may not be listened to has the whole command refused
			if r.err = r.pubsub.Subscribe(ctx, channel); r.err != nil {
				return
			}
		}
		if r.err == nil && len(less) > 0 {
			r.err = r.pubsub.Unsubscribe(ctx, less...)
		}
	}()
	timer := time.NewTimer(listenPatience)
	defer timer.Stop()
	select {
	case r := <-done:
		return r.pubsub, r.err
	case <-timer.C:
	}
	if !given.CompareAndSwap(false, true) {
		r := <-done
		return r.pubsub, r.err
	}
	return nil, errDeaf
}

// fail closes a subscription that does not work, or no longer. The first time another follows at once.
func (h *hub) fail(err error) {
	h.close()
	h.locker.lookAnew()
	err = ofClient(err)
	q := &h.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, l := range q.lines {
		l.listening, l.lull = false, lull{}
	}
	now, pause := time.Now(), time.Duration(0)
	switch {
	case q.since.IsZero():
		q.failures++
	case now.Sub(q.since) < listenPatience:
		q.flaps++
	default:
		q.flaps = 0
	}
	if q.flaps > 1 {
		pause = min(listenBackoff<<min(q.flaps, mostShift), flapMost)
	}
	if q.failures > 0 {
		h.locker.tellLocked(err)
		pause = min(listenBackoff<<min(q.failures, mostShift), listenMost)
	}
	q.since = time.Time{}
	q.retryAt = now.Add(h.locker.clock.jitter(pause, 0.5))
}

func (h *hub) close() {
	if h.pubsub != nil {
		go shut(h.pubsub) // it waits for whatever is under way
	}
	h.pubsub, h.have, h.ended = nil, nil, nil
}

// shut closes p, whatever that is.
func shut(p *redis.PubSub) {
	defer func() { _ = recover() }()
	_ = p.Close()
}

// reader reads from a subscription until it fails. The goroutine that hears of a release sends the command that is ready
// for it at once, since each change of goroutines would be felt by all who wait, and another one reads on: the one that
// has sent the last command and stands by, or a new one, since an answer may be long in coming.
type reader struct {
	hub    *hub
	pubsub *redis.PubSub
	ended  chan<- error  // filled when nothing is read any more,
	over   chan struct{} // and closed
	relay  chan struct{} // where somebody stands by
	spare  atomic.Bool   // somebody does
}

func (r *reader) run() {
	err, reading := errGoexit, true
	defer func() {
		if v := recover(); v != nil {
			err = panicked(v)
		}
		if reading {
			r.ended <- err
			close(r.over)
		}
	}()
	for {
		var c *command
		if c, err = r.next(); c == nil {
			return
		}
		reading = false
		select {
		case r.relay <- struct{}{}:
		default:
			go r.run()
		}
		c.run()
		if !r.standBy() {
			return
		}
		err, reading = errGoexit, true
	}
}

// standBy waits until this goroutine has to read on. It returns false if none has to stand by any more.
func (r *reader) standBy() bool {
	if r.spare.Swap(true) {
		return false
	}
	select {
	case <-r.relay:
		r.spare.Store(false)
		return true
	case <-r.over:
		return false
	}
}

// ended is a context that has ended. With it go-redis does not connect anew by itself when a subscription fails (over TCP;
// with TLS, or a Dialer that does not ask the context, it does once, for nothing). It would be under a mutex that the hub
// needs, and what is published meanwhile would be lost without a word.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// next reads until there is a command to send, and returns an error if the subscription fails before.
func (r *reader) next() (c *command, err error) {
	patience, timeout := listenQuiet, net.Error(nil)
	for c == nil {
		var message any
		message, err = r.pubsub.ReceiveTimeout(ended, patience)
		switch m := message.(type) {
		case *redis.Message:
			c = r.hub.hear(m.Channel, false)
		case *redis.Subscription:
			c = r.hub.hear(m.Channel, m.Kind == "subscribe")
		}
		switch {
		case err == nil:
			patience = listenQuiet
		case redis.HasErrorPrefix(err, "NOPERM"): // a channel that may not be listened to; any other reply is about them all
			r.hub.refused(err)
		case !errors.As(err, &timeout) || !timeout.Timeout():
			return nil, err
		case patience == listenPatience:
			return nil, errDeaf
		default:
			patience = listenPatience
			if err = r.pubsub.Ping(ended); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

// refused: Redis does not let one of the channels be listened to.
func (h *hub) refused(err error) {
	q := &h.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	h.locker.tellLocked(err)
}

// hear has the head of a line look again. It returns a command if that is all there is to do, and it has to be sent now.
func (h *hub) hear(channel string, confirmed bool) *command {
	q := &h.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[channel[:max(0, len(channel)-len(releasedSuffix))]]
	if l == nil {
		return nil
	}
	if confirmed && l.wanted {
		l.listening = true
		if q.failures, q.told = 0, false; q.since.IsZero() {
			q.since = time.Now()
		}
	}
	l.heard = true
	if l.head == nil {
		return nil
	}
	if c := l.head.try(); c != nil {
		l.heard = false
		return c
	}
	l.head.ring()
	return nil
}
