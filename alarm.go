package redislease

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A Locker with tens of thousands of leases would be woken thousands of times a second, and each time write a renewal and
// read an answer. That costs several times as much as to do some hundred at once. So whoever is to be woken at the same
// moment shares a timer and a goroutine, and the renewals that are due then share a write and a read:
//
//	                    ┌─ look ─ renewal ─┐
//	timer ─ goroutine ──┼─ look            ├── a *redis.Client: one pipeline
//	                    └─ look ─ renewal ─┘   another client: each by itself
//
// What need not be exact is moved to the last moment of a grid before it. What has to be, as the end of trust, is not.
//
// A client that pipelines by itself makes the most of commands that come at the same moment. Only a plain *redis.Client
// is given a pipeline: a wrapper that has its methods by embedding may mean to see each command in Process, and in a
// Redis Cluster one node that hangs would hold up the answers of all.
//
// What goes wrong, and what follows:
//
//   - A look takes long: the others wait for it. So it waits for nothing, and what may call the user's code, the end of a
//     context for one, gets a goroutine of its own.
//   - Somebody need not be woken any more when the goroutine has begun: it looks in vain.
//   - The machine is suspended, and all timers with it: see clockWatch.
//   - A lease ends before its renewal is written: Redis gets one that it refuses, like any that is late.
//   - A pipeline is not answered, or fails: each of its leases sends another renewal, which goes by itself, as does all
//     that follows a failed renewal, and what Renew asks for. go-redis gives an error to commands that were answered
//     before it, too. That can turn a Yes or a No into "unknown", and nothing into a Yes.
//   - An answer has an observer called: on another goroutine, so that it holds up no other answer.
type alarms struct {
	locker   *Locker
	pipeline pipeline // nil: each by itself
	shards   [16]alarmShard
	watch    clockWatch
}

// alarmShard has the alarms of some moments, so that no lock is shared by all leases.
type alarmShard struct {
	mu sync.Mutex
	at map[time.Duration]*alarm // by moment, on the clock of instant.monotonic
	_  [48]byte                 // two of them share no cache line
}

// alarm is a moment at which somebody is to be woken. Its shard guards it.
type alarm struct {
	alarms  *alarms
	shard   *alarmShard
	moment  time.Duration
	timer   *time.Timer
	targets []*target
	soon    bool // it goes off so soon that it is not worth the trouble to end it when nobody is left
	over    bool // it has gone off, or nobody was left: who is there does not change any more
}

const (
	alarmTicks = 64  // in an interval
	batchMost  = 256 // commands in a pipeline

	clockLook = time.Second           // how often clockWatch looks at the clock,
	clockPart = 256                   // or so often before the next alarm, if that is more seldom
	clockJump = 10 * time.Millisecond // by how much two clocks part if the machine was suspended
)

// set has t woken at the moment, and not at the one that was set before.
func (a *alarms) set(t *target, moment time.Duration) {
	a.unset(t)
	s := &a.shards[uint64(moment)*0x9E3779B97F4A7C15>>60] // moments are multiples of something
	s.mu.Lock()
	g := s.at[moment]
	made := g == nil
	var now time.Duration
	if made {
		monotonic, _, _ := a.locker.clock.since(&t.base) // others rely on it: what t has read may be old
		now = t.base.monotonic + monotonic
		g = a.makeLocked(s, moment, max(0, moment-now))
	}
	t.alarm, t.place = g, len(g.targets)
	g.targets = append(g.targets, t)
	s.mu.Unlock()
	if made {
		a.lookBefore(now, moment)
	}
}

// makeLocked makes an alarm that goes off after d.
func (a *alarms) makeLocked(s *alarmShard, moment, d time.Duration) *alarm {
	if s.at == nil {
		s.at = map[time.Duration]*alarm{}
	}
	g := &alarm{alarms: a, shard: s, moment: moment, soon: d <= clockLook}
	g.timer = a.locker.clock.afterFunc(d, g.goOff)
	s.at[moment] = g
	return g
}

// unset has t not woken, unless that has begun.
func (a *alarms) unset(t *target) {
	g := t.alarm
	if g == nil {
		return
	}
	t.alarm = nil
	g.shard.mu.Lock()
	defer g.shard.mu.Unlock()
	if g.over {
		return
	}
	last := len(g.targets) - 1
	moved := g.targets[last]
	g.targets[t.place], moved.place = moved, t.place
	g.targets[last] = nil
	if g.targets = g.targets[:last]; last == 0 && !g.soon {
		g.endLocked()
	}
}

// goOff wakes everybody, and sends the renewals that are due.
func (g *alarm) goOff() {
	g.shard.mu.Lock()
	targets := g.endLocked()
	g.shard.mu.Unlock()
	var due []*command
	for _, t := range targets {
		c := t.fire()
		if c == nil {
			continue
		}
		if due = append(due, c); len(due) == batchMost {
			g.alarms.send(due)
			due = nil
		}
	}
	g.alarms.send(due)
}

// endLocked ends the alarm, if it is not over, and returns who was to be woken.
func (g *alarm) endLocked() (targets []*target) {
	if g.over {
		return nil
	}
	g.over = true
	g.timer.Stop()
	delete(g.shard.at, g.moment)
	targets, g.targets = g.targets, nil
	return targets
}

// send sends renewals that are due at the same moment.
func (a *alarms) send(list []*command) {
	switch {
	case len(list) > 1 && a.pipeline != nil:
		go a.pipeline.run(list)
	default:
		for _, c := range list {
			go c.run()
		}
	}
}

// clockWatch has everybody woken soon after the machine was suspended, since timers stand still meanwhile. While there are
// alarms it compares the clocks once a second, or more seldom if the next one is minutes away.
type clockWatch struct {
	at      atomic.Int64 // the moment of the next look; 0: none is set
	mu      sync.Mutex   // guards what follows, and changes of at
	timer   *time.Timer
	seen    instant // by the last look, or when the first one was set
	watches bool    // seen is what the next look compares with
}

// lookBefore has a look come in time for an alarm at the given moment.
func (a *alarms) lookBefore(now, moment time.Duration) {
	at := later(now, max(clockLook, (moment-now)/clockPart))
	w := &a.watch
	if set := w.at.Load(); set != 0 && set <= int64(at) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if set := w.at.Load(); set != 0 && set <= int64(at) {
		return
	}
	w.at.Store(int64(at))
	if !w.watches {
		w.seen, w.watches = a.locker.clock.now(&a.locker.anchor), true
	}
	if w.timer == nil {
		w.timer = a.locker.clock.afterFunc(at-now, a.look)
	} else {
		w.timer.Reset(at - now)
	}
}

// look compares the clocks. Each look goes on from the last one, so that no suspend falls between two.
func (a *alarms) look() {
	w := &a.watch
	w.mu.Lock()
	w.at.Store(0) // first: an alarm that is set from now on sees to a look, or is seen below
	monotonic, wall, read := a.locker.clock.since(&w.seen)
	w.seen = instant{read, w.seen.boot + monotonic, w.seen.monotonic + monotonic}
	now := w.seen.monotonic
	w.mu.Unlock()
	if apart := wall - monotonic; apart > clockJump || apart < -clockJump {
		a.goOff()
	}
	if next := a.next(); next < forever {
		a.lookBefore(now, next)
		return
	}
	w.mu.Lock()
	w.watches = w.at.Load() != 0
	w.mu.Unlock()
}

// next returns the next moment at which somebody is to be woken.
func (a *alarms) next() time.Duration {
	next := forever
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		for moment := range s.at {
			next = min(next, moment)
		}
		s.mu.Unlock()
	}
	return next
}

// goOff has all alarms go off.
func (a *alarms) goOff() {
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		all := slices.SortedFunc(maps.Values(s.at), func(g, h *alarm) int { return cmp.Compare(g.moment, h.moment) })
		s.mu.Unlock()
		for _, g := range all {
			g.goOff()
		}
	}
}

// fire is called when t is to be woken: the watchdog of a lease that is held, or else whoever waits on signal. It
// returns a renewal that is due, if it may go with others.
func (t *target) fire() *command {
	t.armed.Store(0) // first: whoever sets an alarm before is seen to by the look that follows
	if l := t.lease.Load(); l != nil {
		if renewal, held := l.watch(); held {
			return renewal
		}
	}
	t.ring()
	return nil
}

// wakeAt has t woken at the given time, or earlier: an alarm is not put off, which is dear. Whoever is woken looks at the
// clock anyway.
func (t *target) wakeAt(at time.Duration) {
	due := int64(at) - t.ahead.Load()
	if armed := t.armed.Load(); armed == 0 || armed > due {
		t.wakeOnlyAt(at)
	}
}

// wakeOnlyAt has t woken at the given time.
func (t *target) wakeOnlyAt(at time.Duration) {
	due := max(int64(at)-t.ahead.Load(), 1)
	if t.armed.Swap(due) != due {
		t.locker.alarms.set(t, later(t.base.monotonic, time.Duration(due)))
	}
}

// wakeNoMore has t not woken, unless that has begun.
func (t *target) wakeNoMore() {
	t.locker.alarms.unset(t)
	t.armed.Store(0)
}

// about returns a time to be woken at that others may be woken at, too: a little before the given one if that is not over.
func (t *target) about(now, at time.Duration) time.Duration {
	if f := t.grid().floor(at); f > now {
		return f
	}
	return at
}

// grid is a row of moments, one each tick, which are the same for all leases of a Locker. offset leads to them from a
// reading of the lease's own clock.
type grid struct {
	tick, offset time.Duration
}

func (t *target) grid() grid {
	return grid{t.config.tick, t.base.monotonic - time.Duration(t.ahead.Load())}
}

// tick returns a power of ten, or five times one, that is no more than most, so that the moments of leases with different
// intervals are the same as often as may be.
func tick(most time.Duration) time.Duration {
	t := time.Duration(1)
	for t <= most/10 {
		t *= 10
	}
	if t <= most/5 {
		t *= 5
	}
	return t
}

// floor returns the last moment that is not after t.
func (g grid) floor(t time.Duration) time.Duration {
	if g.tick <= 1 || t > forever-max(g.offset, 0) {
		return t
	}
	over := (t + g.offset) % g.tick
	if over < 0 {
		over += g.tick
	}
	return t - over
}
