package faultproxy

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// entry is a request on its way to the server, or a reply, a message or the place of a reply on its way to the client.
type entry struct {
	fate
	req  *Request // nil for a message
	data []byte
	due  time.Time // not delivered before

	// In the order of replies a request has a place from its arrival until the server has answered it.
	awaiting int    // answers that the server still owes; 0: ready for delivery
	confirms string // name of the confirmations that are its answers, if any
}

// link is one direction of a connection: a queue, and one goroutine that delivers in order what is in it.
type link struct {
	p      *Proxy
	dir    direction
	ctx    context.Context // ends with the connection
	silent atomic.Bool     // something was lost, so nothing can arrive any more
	wake   chan struct{}   // cap 1: the queue has changed

	mu       sync.Mutex
	queue    []*entry
	finished bool // the last entry is the end of the connection
}

func newLink(p *Proxy, dir direction, ctx context.Context) *link {
	return &link{p: p, dir: dir, ctx: ctx, wake: make(chan struct{}, 1)}
}

// run calls deliver for every entry that is to arrive, until it was the last or the connection is gone.
func (l *link) run(deliver func(*entry)) {
	for {
		e := l.next()
		if e == nil {
			return
		}
		if l.admit(e) {
			deliver(e)
		}
		if e.end != goesOn {
			return
		}
	}
}

// next waits for the first entry to be ready. nil: the connection is gone.
func (l *link) next() *entry {
	for {
		if e := l.pop(); e != nil {
			return e
		}
		select {
		case <-l.wake:
		case <-l.ctx.Done():
			return nil
		}
	}
}

func (l *link) pop() *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 || l.queue[0].awaiting > 0 {
		return nil
	}
	e := l.queue[0]
	l.queue = l.queue[1:]
	return e
}

// admit waits as long as the entry is delayed or held, and says whether it is to arrive.
func (l *link) admit(e *entry) bool {
	if !l.sleepUntil(e.due) || !l.await(e.gate) {
		return false
	}
	for {
		flow, changed := l.p.flow(l.dir)
		switch {
		case l.silent.Load():
			return false
		case e.drop || flow == Drop:
			l.silent.Store(true)
			return false
		case flow == Pass:
			return true
		}
		if !l.await(changed) {
			return false
		}
	}
}

func (l *link) sleepUntil(due time.Time) bool {
	wait := time.Until(due)
	if wait <= 0 {
		return true
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ctx.Done():
		return false
	}
}

func (l *link) await(gate <-chan struct{}) bool {
	if gate == nil {
		return true
	}
	select {
	case <-gate:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// add appends an entry. After the end of the connection it is ignored.
func (l *link) add(e *entry) {
	l.insert(nil, e)
}

// insert puts an entry in front of another, or at the end of the queue.
func (l *link) insert(before, e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.finished {
		return
	}
	i := slices.Index(l.queue, before)
	if i < 0 {
		i = len(l.queue)
	}
	l.queue = slices.Insert(l.queue, i, e)
	l.signal()
}

// finish lets the connection end, behind everything that is in the queue and ready.
func (l *link) finish(end ending) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.finished {
		return
	}
	l.finished = true
	l.queue = slices.DeleteFunc(l.queue, func(e *entry) bool { return e.awaiting > 0 })
	l.queue = append(l.queue, &entry{fate: fate{end: end}})
	l.signal()
}

// firstAwaiting returns the place of the request whose answer comes next, nil if the server owes none.
func (l *link) firstAwaiting() *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.queue {
		if e.awaiting > 0 {
			return e
		}
	}
	return nil
}

// answered takes n answers off what the server owes to the request in that place, and the place away if that was all.
func (l *link) answered(place *entry, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if place.awaiting -= n; place.awaiting <= 0 {
		l.queue = slices.DeleteFunc(l.queue, func(e *entry) bool { return e == place })
		l.signal()
	}
}

func (l *link) signal() {
	select {
	case l.wake <- struct{}{}:
	default: // one wake-up is enough for any number of changes
	}
}
