package redislease

import "time"

// How long a process may believe that it holds a lease, without hearing from Redis again:
//
//	trust = sent + TTL − margin
//
// sent is when the last command that Redis confirmed was written to the network, not when it was asked for and not
// when the answer came: Redis cannot have started to count the TTL any earlier. Since the context ends with trust, it
// ends at least one margin before the key can expire, whatever Redis, the network or go-redis is doing then.
//
//	sent          renewal due            trust ends     the key can expire
//	  |---------------|----------------------|--------------|
//	  |<- interval -->|                      |<-- margin -->|
//	  |<---------------------- TTL ------------------------>|
//
// A renewal is due one interval after the last confirmed one was sent. While it is silent others are sent beside it,
// and any answer counts from its own send, however late: cutting slow answers off would lose leases that were never in
// danger. An error is answered by another try soon. Only a No ends the lease before trust does.

// mostInFlight is how many renewals of one lease may be silent at once. One older than a TTL does not count.
const mostInFlight = 3

// By which part of the interval a renewal goes out early at the most. The first one spreads leases that were taken in a
// burst, which would all be due together otherwise; the others keep them apart. Up to a tick of the grid comes on top.
const (
	firstSpread    = 2
	intervalSpread = 8
)

// schedule says when to renew a lease and when it ends. It is a plain value: no clock, no I/O. All times are readings
// of the lease's clock.
type schedule struct {
	config  *config
	start   time.Duration // when the acquisition was sent
	trust   time.Duration // its end
	good    time.Duration // when the last confirmed command was sent
	renewAt time.Duration // when the next renewal is due
	begun   time.Duration // when the last one was sent off, if none has failed since
	count   int           // confirmed renewals of the watchdog
	tries   int32         // refused renewals since the last confirmed one
	stopped bool          // the caller's context has ended: nothing more is due
	offset  time.Duration // of the grid that what need not be exact is moved to
}

// confirm takes note that Redis confirmed a command that was sent at the given time. spread, from 0 to 1, says how
// much earlier than due the next one goes out, so that leases taken together are not renewed together.
func (s *schedule) confirm(sent time.Duration, spread float64) {
	s.trust = max(s.trust, later(sent, s.config.useful()))
	s.good = max(s.good, sent)
	s.tries = 0
	most := s.config.interval / intervalSpread
	if s.count == 0 {
		most = s.config.interval / firstSpread
	}
	early := time.Duration(spread * float64(most))
	s.renewAt = max(s.good, s.grid().floor(later(s.good, s.config.interval-early)))
	if s.begun > sent { // another one is on its way, so that several late answers are not followed by one each
		s.renewAt = max(s.renewAt, min(s.joinAt(), s.trust-s.config.useful()/4))
	}
}

func (s *schedule) grid() grid { return grid{s.config.tick, s.offset} }

// longest is when the longest hold ends.
func (s *schedule) longest() time.Duration { return later(s.start, s.config.maxHold) }

// end is when the lease ends unless it is renewed before.
func (s *schedule) end() time.Duration { return min(s.trust, s.longest()) }

// capped: by then the watchdog renews no more.
func (s *schedule) capped(now time.Duration) bool {
	return s.count >= s.config.maxRenewals || now >= s.longest()
}

// idle: the watchdog sends nothing, whatever the time.
func (s *schedule) idle(now time.Duration, inFlight int) bool {
	return s.stopped || s.capped(now) || inFlight >= mostInFlight
}

// due: a renewal should be sent now.
func (s *schedule) due(now time.Duration, inFlight int) bool {
	return now >= s.renewAt && now < s.end() && !s.idle(now, inFlight)
}

// begin takes note that a renewal is sent off now. If it stays silent the next goes out beside it.
func (s *schedule) begin(now time.Duration) {
	s.begun = now
	s.renewAt = s.joinAt()
}

// joinAt is when another renewal goes out beside the last one.
func (s *schedule) joinAt() time.Duration {
	return max(later(s.begun, 1), s.grid().floor(later(s.begun, s.config.silence())))
}

// failed takes note of a renewal that was not confirmed, and has another follow after a pause that doubles up to a
// twentieth of the TTL, and never takes more than half of the trust that is left. spread, from 0 to 1, shortens it by
// up to half. It puts nothing off that is due earlier.
func (s *schedule) failed(now time.Duration, spread float64) {
	pause := s.config.ttl / 20
	if s.tries < 4 {
		pause = s.config.ttl / 320 << s.tries
	}
	s.tries++
	s.begun = 0
	pause = min(pause, (s.trust-now)/2)
	at := later(now, max(pause-time.Duration(spread*float64(pause/2)), time.Millisecond))
	if s.renewAt > now {
		at = min(at, s.renewAt)
	}
	s.renewAt = at
}

// wake is when the watchdog should look again: for the next renewal, or for the end. free is when a renewal in flight is
// so old that it does not count any more.
func (s *schedule) wake(now time.Duration, inFlight int, free time.Duration) time.Duration {
	at := s.end()
	switch {
	case s.stopped || s.capped(now):
		return at
	case inFlight >= mostInFlight:
		return min(at, max(free, s.renewAt))
	default:
		return min(at, s.renewAt)
	}
}

// The watchdog of a lease is an alarm and this look at the lease, which needs a goroutine only while it lasts. It calls
// nothing that can block, since other leases wait for it: not even the end of the context, which asks the caller's. It
// returns false if the lease is not held any more, and then there is no other look; and a renewal to send, if it may go
// with others.
func (l *Lease) watch() (renewal *command, held bool) {
	l.mu.Lock()
	now := l.now()
	f := l.lookLocked(now)
	held = l.state == stateHeld
	if held {
		l.schedule.stopped = l.inner.Err() != nil
		if inFlight, _ := l.inFlightLocked(now); l.schedule.due(now, inFlight) {
			l.schedule.begin(now)
			if renewal = l.renewalLocked(l.inner, now, nil); renewal.beside || l.schedule.tries > 0 {
				go renewal.run()
				renewal = nil
			}
		}
		l.rearmLocked(now)
	}
	l.mu.Unlock()
	if f.ended != nil || f.deliver {
		go l.tell(f)
	}
	return renewal, held
}

// rearmLocked has the watchdog look again when the schedule says. It follows whatever has changed the schedule.
func (l *Lease) rearmLocked(now time.Duration) {
	l.wakeAt(l.wakeLocked(now))
}

// wakeLocked returns when the watchdog should look again, and wakes the calls of Renew whose time is up.
func (l *Lease) wakeLocked(now time.Duration) time.Duration {
	inFlight, free := l.inFlightLocked(now)
	return min(l.schedule.wake(now, inFlight, free), l.callsLocked(now))
}

// callsLocked wakes the calls of Renew whose time is up, and returns when that of the next one is.
func (l *Lease) callsLocked(now time.Duration) (next time.Duration) {
	next = forever
	for _, c := range l.flights {
		switch {
		case c.waiter == nil:
		case c.until <= now:
			signal(c.waiter)
		default:
			next = min(next, c.until)
		}
	}
	return next
}
