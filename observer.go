package redislease

import (
	"context"
	"time"
)

// EventKind says what an [Event] is about.
type EventKind uint8

const (
	_ EventKind = iota

	// EventAcquired: an acquisition ended in a lease.
	EventAcquired
	// EventNotAcquired: an acquisition ended because somebody else holds the key.
	EventNotAcquired
	// EventAcquireFailed: an acquisition ended in any other way.
	EventAcquireFailed
	// EventRenewed: Redis confirmed a lease. Left is the trust that was left: the smallest is the figure to watch.
	EventRenewed
	// EventRenewFailed: a renewal was refused or got no usable answer; while trust lasts there will be another.
	EventRenewFailed
	// EventLost: a lease ended without being released, or its release found the key no longer its own.
	EventLost
	// EventReleased: a lease was released. Err is set if Redis refused the release or did not answer it.
	EventReleased
	// EventPolling: waiters of the Locker, or those for some keys, are not woken by releases, or its own releases wake
	// nobody; they find out by polling. Err says why. It is about no key, is delivered on a goroutine of its own, and
	// comes once until a subscription has worked again.
	EventPolling
)

var eventNames = [...]string{"unknown", "acquired", "not acquired", "acquire failed", "renewed", "renew failed", "lost", "released", "polling"}

// String returns the kind in words: "acquired", "not acquired", "acquire failed", "renewed", "renew failed", "lost",
// "released", "polling".
func (k EventKind) String() string {
	if int(k) >= len(eventNames) {
		k = 0
	}
	return eventNames[k]
}

// An Event tells an observer what happened. Each acquisition with valid arguments ends in exactly one of
// EventAcquired, EventNotAcquired and EventAcquireFailed, each lease in exactly one of EventLost and EventReleased.
//
// Events of a lease are delivered one at a time and in order. Those that a call causes (the end of an acquisition, a
// release, a loss that the call finds) are delivered on the caller's goroutine before the call returns, unless the
// observer is still busy with an earlier event of that lease; all others on a goroutine that exists only while events
// wait. At most 16 wait: beyond that renewal events are dropped, a final one never. So an observer may block, and may
// call Release and Renew, without holding up a lease.
//
// From them a program computes the three figures to watch: the share of failed acquisitions, the distribution of
// holding times, and the count of failed comparisons (EventLost with an Err that matches [ErrTaken] or [ErrGone]).
type Event struct {
	Kind  EventKind
	Key   string // as given to the acquisition, without prefix
	Fence int64  // of the lease; -1 without a lease, or without WithFencing
	Err   error  // why; nil with EventAcquired, EventRenewed and a clean EventReleased

	Took   time.Duration // end of an acquisition: how long it took as a whole
	Waited time.Duration // end of an acquisition: how much of that came after somebody else was found to hold the key
	Left   time.Duration // EventRenewed: the trust that was left when Redis' answer came
	Held   time.Duration // EventLost, EventReleased: how long the lease was held, from the sending of its acquisition
}

const maxWaiting = 16

// eventQueue holds the events of one lease that its observer has not seen yet. Its lease's mutex guards it.
type eventQueue struct {
	waiting []Event
	busy    bool // a goroutine is delivering, or has promised to
}

// push adds e. If it returns true the caller must see to the delivery, after the mutex is unlocked.
func (q *eventQueue) push(e Event) bool {
	final := e.Kind == EventLost || e.Kind == EventReleased
	if len(q.waiting) >= maxWaiting && !final {
		return false // q is busy, or nothing would wait
	}
	q.waiting = append(q.waiting, e)
	if q.busy {
		return false
	}
	q.busy = true
	return true
}

// more reports whether an event waits; without one the queue is idle again.
func (q *eventQueue) more() bool {
	if len(q.waiting) == 0 {
		q.waiting, q.busy = nil, false
	}
	return q.busy
}

// pop returns the first of the waiting events.
func (q *eventQueue) pop() Event {
	e := q.waiting[0]
	q.waiting = q.waiting[1:]
	return e
}

// observe calls f and keeps its panic from reaching anything of ours.
func observe(f func(context.Context, Event), ctx context.Context, e Event) {
	defer func() { _ = recover() }()
	f(ctx, e)
}
