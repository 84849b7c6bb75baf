package redislease

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

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
	reader *reader             // of pubsub
}

// subscriber is a client that can subscribe.
type subscriber interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

const (
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
		var ended chan error
		if h.reader != nil {
			ended = h.reader.ended
		}
		select {
		case <-h.wake:
		case <-timer.C:
		case err := <-ended:
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
		h.pubsub = pubsub
		h.reader = &reader{hub: h, pubsub: pubsub, ended: make(chan error, 1), over: make(chan struct{}), relay: make(chan struct{})}
		go h.reader.run()
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
	h.pubsub, h.have, h.reader = nil, nil, nil
}

// shut closes p, whatever that is.
func shut(p *redis.PubSub) {
	defer func() { _ = recover() }()
	_ = p.Close()
}

// reader reads from a subscription until it fails. The goroutine that hears of a release sends the command that is ready
// for it at once, since each change of goroutines would be felt by all who wait. If somebody stands in another line,
// another goroutine reads on: the one that has sent the last command and stands by, or a new one. If nobody does, it reads
// on itself after the answer. Should that be long in coming, the head will look or leave, or somebody will stand in another
// line, and then another goroutine reads on.
type reader struct {
	hub    *hub
	pubsub *redis.PubSub
	ended  chan error    // filled when nothing is read any more,
	over   chan struct{} // and closed
	away   atomic.Bool   // nobody reads; who comes first does: a new goroutine, or the one that waits for an answer
	relay  chan struct{} // where somebody stands by
	spare  atomic.Bool   // somebody does
}

func (r *reader) run() {
	err, reading := errGoexit, true
	defer func() {
		if v := recover(); v != nil {
			err = panicked(v)
		}
		if reading || r.back() {
			r.ended <- err
			close(r.over)
		}
	}()
	for {
		c, alone, failed := r.next()
		if c == nil {
			err = failed
			return
		}
		if reading = false; !alone {
			select {
			case r.relay <- struct{}{}:
			default:
				go r.run()
			}
		}
		c.run()
		if !r.back() && !r.standBy() {
			return
		}
		reading = true
	}
}

// back returns true if nobody reads, which is up to the caller then.
func (r *reader) back() bool { return r.away.CompareAndSwap(true, false) }

// readOnLocked has the subscription read if nobody reads it, since an answer is long in coming or somebody else waits.
func (q *queues) readOnLocked() {
	if r := q.away; r != nil && r.back() {
		go r.run()
	}
	q.away = nil
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

// endedContext is one that has ended. With it go-redis does not connect anew by itself when a subscription fails (over TCP;
// with TLS, or a Dialer that does not ask the context, it does once, for nothing). It would be under a mutex that the hub
// needs, and what is published meanwhile would be lost without a word.
var endedContext = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// next reads until there is a command to send, and returns an error if the subscription fails before. alone: nobody reads
// from now on.
func (r *reader) next() (c *command, alone bool, err error) {
	patience, timeout := listenQuiet, net.Error(nil)
	for c == nil {
		var message any
		message, err = r.pubsub.ReceiveTimeout(endedContext, patience)
		switch m := message.(type) {
		case *redis.Message:
			c, alone = r.hear(m.Channel, false)
		case *redis.Subscription:
			c, alone = r.hear(m.Channel, m.Kind == "subscribe")
		}
		switch {
		case err == nil:
			patience = listenQuiet
		case redis.HasErrorPrefix(err, "NOPERM"): // a channel that may not be listened to; any other reply is about them all
			r.hub.refused(err)
		case !errors.As(err, &timeout) || !timeout.Timeout():
			return nil, false, err
		case patience == listenPatience:
			return nil, false, errDeaf
		default:
			patience = listenPatience
			if err = r.pubsub.Ping(endedContext); err != nil {
				return nil, false, err
			}
		}
	}
	return c, alone, nil
}

// refused: Redis does not let one of the channels be listened to.
func (h *hub) refused(err error) {
	q := &h.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	h.locker.tellLocked(err)
}

// hear has the head of a line look again. It returns a command if that is all there is to do, and it has to be sent now.
// alone: nobody stands in another line, so that nobody need read meanwhile.
func (r *reader) hear(channel string, confirmed bool) (c *command, alone bool) {
	q := &r.hub.locker.queues
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[channel[:max(0, len(channel)-len(releasedSuffix))]]
	if l == nil {
		return nil, false
	}
	if confirmed && l.wanted {
		l.listening = true
		if q.failures, q.told = 0, false; q.since.IsZero() {
			q.since = time.Now()
		}
	}
	l.heard = true
	if l.head == nil {
		return nil, false
	}
	if c = l.head.try(); c != nil {
		l.heard = false
		if alone = q.waited == 1; alone {
			r.away.Store(true)
			q.away = r
		}
		return c, alone
	}
	l.head.ring()
	return nil, false
}
