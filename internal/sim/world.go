// Package sim runs the library in a simulated world: processes with clients of their own, a network, and a Redis, in
// all of which things go wrong. The world lives in a bubble of testing/synctest, so hours pass in seconds; everything
// that happens in it follows from a seed; and an oracle, which knows what the server holds, compares that with what the
// library does and says.
//
// The library is known by what it exports. What a bubble cannot move, a paused process and a clock that jumps, comes in
// through the functions that replace a Locker's clock.
package sim

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
)

// Config says which world to run.
type Config struct {
	Seed uint64
	// Lua has the scripts run on miniredis instead of a stub.
	Lua bool
	// Virtual is how long workers go on beginning things, in the world's time.
	Virtual time.Duration
	// SetClock makes a Locker read its clock through c.
	SetClock func(k *redislease.Locker, c Clock)
	// SetAlarms makes a Locker move what it does together, by up to a part of a lease's interval, and send several
	// renewals by f.
	SetAlarms func(k *redislease.Locker, part int, f func(cmds []redis.Cmder) error)
	// Yield, if set, is called around each look at a clock, to have goroutines that run at one instant take turns in
	// another order.
	Yield func()
	// Trace, if set, gets every line of the history.
	Trace func(line string)
}

// Tally counts what happened in a world.
type Tally struct {
	Faults                             map[string]int
	Acquisitions, Leases               int
	Held, Unknown, Failed              int // acquisitions without a lease
	Released, ReleaseUnknown, Renewals int
	Taken, Gone, Unconfirmed, MaxHold  int           // losses
	Writes, Gathered                   int           // Gathered: renewals that went out in pipelines
	Fenced, Landed, Refused, FellBack  int           // leases with a fence; their writes, and those refused where they land; numbers that fell back, as documented
	Robbed                             int           // tokens that the server was made to forget or remember
	Closest                            time.Duration // least time between the end of a belief and the earliest possible next holder
	Polling                            int           // times that a Locker said that its waiters are not woken
	Virtual                            time.Duration
}

func (t *Tally) lost(reason error) {
	switch reason {
	case redislease.ErrTaken:
		t.Taken++
	case redislease.ErrGone:
		t.Gone++
	case redislease.ErrUnconfirmed:
		t.Unconfirmed++
	case redislease.ErrMaxHold:
		t.MaxHold++
	}
}

// Add adds what happened in another world.
func (t *Tally) Add(o Tally) {
	if t.Faults == nil {
		t.Faults = map[string]int{}
	}
	for kind, n := range o.Faults {
		t.Faults[kind] += n
	}
	for _, s := range []struct{ to, from *int }{
		{&t.Acquisitions, &o.Acquisitions}, {&t.Leases, &o.Leases}, {&t.Held, &o.Held}, {&t.Unknown, &o.Unknown},
		{&t.Failed, &o.Failed}, {&t.Released, &o.Released}, {&t.ReleaseUnknown, &o.ReleaseUnknown},
		{&t.Renewals, &o.Renewals}, {&t.Gathered, &o.Gathered}, {&t.Taken, &o.Taken}, {&t.Gone, &o.Gone}, {&t.Unconfirmed, &o.Unconfirmed},
		{&t.MaxHold, &o.MaxHold}, {&t.Writes, &o.Writes}, {&t.Robbed, &o.Robbed},
		{&t.Fenced, &o.Fenced}, {&t.Landed, &o.Landed}, {&t.Refused, &o.Refused}, {&t.FellBack, &o.FellBack},
		{&t.Polling, &o.Polling},
	} {
		*s.to += *s.from
	}
	t.Virtual += o.Virtual
	if o.Closest != 0 && (t.Closest == 0 || o.Closest < t.Closest) {
		t.Closest = o.Closest
	}
}

// Injected is how many faults there were.
func (t *Tally) Injected() (n int) {
	for _, k := range t.Faults {
		n += k
	}
	return n
}

// String returns the figures as lines of text.
func (t Tally) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%.0f virtual hours\n", t.Virtual.Hours())
	fmt.Fprintf(&b, "%d faults\n", t.Injected())
	for _, kind := range slices.Sorted(maps.Keys(t.Faults)) {
		fmt.Fprintf(&b, "%9d  %s\n", t.Faults[kind], kind)
	}
	fmt.Fprintf(&b, "%d acquisitions: %d leases, %d held by another, %d unknown, %d refused or unanswered\n",
		t.Acquisitions, t.Leases, t.Held, t.Unknown, t.Failed)
	fmt.Fprintf(&b, "%d renewals answered or failed, %d of them sent together with others; %d writes under a lease\n", t.Renewals, t.Gathered, t.Writes)
	fmt.Fprintf(&b, "%d leases released, %d of them with an unknown outcome\n", t.Released, t.ReleaseUnknown)
	fmt.Fprintf(&b, "%d leases lost: %d unconfirmed, %d held for as long as allowed, %d gone, %d taken\n",
		t.Unconfirmed+t.MaxHold+t.Gone+t.Taken, t.Unconfirmed, t.MaxHold, t.Gone, t.Taken)
	fmt.Fprintf(&b, "%d leases with a fence: %d of their writes accepted where they landed, %d refused as stale; %d fences fell back, as documented\n",
		t.Fenced, t.Landed, t.Refused, t.FellBack)
	fmt.Fprintf(&b, "%d times waiters were not woken any more, and polled\n", t.Polling)
	fmt.Fprintf(&b, "%d tokens that Redis was made to forget or to remember\n", t.Robbed)
	fmt.Fprintf(&b, "%v was the shortest time between the end of a belief and the earliest possible next holder\n", t.Closest)
	return b.String()
}

// Report is what became of a world.
type Report struct {
	Tally
	History    uint64 // a digest of everything that happened, and when
	Violations []string
}

const prefix = "app:"

type world struct {
	Config
	start   time.Time
	end     time.Time
	weather weather
	keys    []string // in Redis
	server  *server
	oracle  *oracle
	ctx     context.Context
	workers sync.WaitGroup
	epoch   atomic.Uint64 // counts servers

	mu      sync.Mutex
	conns   []*conn
	history uint64    // up to the latest instant
	instant time.Time // of the latest line
	sum     uint64    // of the lines of that instant: in which order goroutines get to run is no part of the history
	faults  map[string]int
}

// Run runs a world to its end.
func Run(t *testing.T, c Config) (r Report) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { r = run(t, c) })
	return r
}

func run(t *testing.T, c Config) Report {
	w := &world{
		Config: c, start: time.Now(), end: time.Now().Add(c.Virtual), weather: weatherOf(c.Seed),
		keys: []string{prefix + "orders", prefix + "invoices"}, faults: map[string]int{}, history: c.Seed,
	}
	if w.Yield == nil {
		w.Yield = func() {}
	}
	w.oracle = &oracle{w: w, truths: map[string]*truth{}, grants: map[string]*grant{}, violated: map[string]int{}}
	w.server = &server{w: w, listeners: map[string][]*conn{}, place: uint64(*from(c.Seed, name("server")))}
	if w.server.store = newStub(); c.Lua {
		l, err := newLua()
		if err != nil {
			t.Fatal(err)
		}
		w.server.store = l
	}
	defer w.server.store.close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.ctx = ctx
	var clients []*client
	for i := range 2 + int(from(c.Seed, name("size")).next()%4) {
		clients = append(clients, w.newProcess(fmt.Sprintf("p%d", i)))
	}
	w.workers.Go(w.disasters)
	w.workers.Go(w.operators)
	time.Sleep(time.Until(w.end))
	w.heal()
	time.Sleep(20*ttlMost + w.weather.lateBy)
	w.oracle.starved()
	cancel() // whoever waits or works without a bound
	w.workers.Wait()
	time.Sleep(20 * ttlMost) // what was left behind
	w.oracle.close()
	for _, client := range clients {
		_ = client.redis.Close()
	}
	time.Sleep(time.Minute)
	return w.report()
}

func (w *world) report() Report {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := Report{Tally: w.oracle.tally, History: uint64(*from(w.history, w.sum)), Violations: w.oracle.violations}
	r.Faults, r.Virtual = maps.Clone(w.faults), time.Since(w.start)
	return r
}

// newProcess starts a process with a client, a Locker and workers.
func (w *world) newProcess(id string) *client {
	p := &process{w: w, name: id, failed: map[string]time.Time{}, place: uint64(*from(w.Seed, name(id)))}
	c := from(p.place)
	p.noBoot = c.hits(0.25)
	cl := newClient(p)
	k := &worker{w: w, p: p, place: uint64(*from(p.place, name("observer")))}
	locker, err := redislease.New(cl, redislease.WithPrefix(prefix), redislease.WithObserver(k.observe))
	if err != nil {
		panic(err)
	}
	w.SetClock(locker, p.clock())
	if g := from(p.place, name("alarms")); g.hits(0.5) { // few leases are seldom due together by themselves
		w.SetAlarms(locker, 4+g.below(8), cl.pipeline)
	}
	for i := range 1 + c.below(3) {
		k := &worker{w: w, p: p, locker: locker, place: uint64(*from(p.place, name("worker"), uint64(i)))}
		w.workers.Go(k.run)
	}
	w.workers.Go(func() { w.troubles(p) })
	w.workers.Go(func() { w.partitions(p) })
	return cl
}

// fenceOf is where the fence of a key is kept.
func fenceOf(key string) string { return key + ":fence{" + key + "}" }

// all returns the keys, and those of their fences.
func (w *world) all() (all []string) {
	for _, key := range w.keys {
		all = append(all, key, fenceOf(key))
	}
	return all
}

// healed: nothing goes wrong any more.
func (w *world) healed(now time.Time) bool { return !now.Before(w.end) }

// heal ends what would otherwise stay wrong for ever.
func (w *world) heal() {
	w.mu.Lock()
	conns := append([]*conn(nil), w.conns...)
	w.mu.Unlock()
	for _, c := range conns {
		c.mu.Lock()
		silent := c.silent
		c.mu.Unlock()
		if silent {
			time.Sleep(time.Microsecond)
			c.toProcess(c.cut)
		}
	}
}

// resetAll has all connections reset: the server is another one now.
func (w *world) resetAll() {
	w.epoch.Add(1)
	w.mu.Lock()
	conns := append([]*conn(nil), w.conns...)
	w.mu.Unlock()
	for _, c := range conns {
		c.mu.Lock()
		c.pending, c.broken = nil, [2]bool{true, true}
		salt := from(c.place, uint64(time.Now().UnixNano())).between(1, time.Millisecond)
		c.mu.Unlock()
		time.AfterFunc(salt, func() { c.toProcess(c.cut) })
	}
}

// pause is how long nothing happens between two troubles.
func (w *world) pause(c *chance, least, most time.Duration) bool {
	time.Sleep(c.between(least, most))
	return !w.healed(time.Now())
}

// troubles are those of a process and its machine.
func (w *world) troubles(p *process) {
	c := from(p.place, name("troubles"))
	var kinds []func()
	if w.weather.pauses {
		kinds = append(kinds, func() { w.count("process paused"); p.stop(c.between(time.Millisecond, 2*ttlMost), false) })
	}
	if w.weather.suspends {
		kinds = append(kinds, func() { w.count("machine suspended"); p.stop(c.between(time.Millisecond, 2*ttlMost), true) })
	}
	if w.weather.steps {
		kinds = append(kinds, func() {
			w.count("wall clock set")
			least := -time.Hour
			if p.noBoot { // without another clock a step back hides a suspend
				least = 0
			}
			p.step(c.between(least, time.Hour))
		})
	}
	for len(kinds) > 0 && w.pause(c, ttlLeast, 10*ttlMost) {
		kinds[c.below(len(kinds))]()
		w.record(p.name + " in trouble")
		time.Sleep(p.left() + time.Millisecond)
	}
}

// parted says until when what p sends, or what is sent to p, does not get through, and whether it is lost.
func (p *process) parted(direction int, now time.Time) (until time.Time, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.partedUntil[direction], p.partLoses
}

func (w *world) partitions(p *process) {
	c := from(p.place, name("partitions"))
	for w.weather.partitions && w.pause(c, ttlLeast, 10*ttlMost) {
		until := time.Now().Add(c.between(10*time.Millisecond, 2*ttlMost))
		p.mu.Lock()
		p.partLoses = c.hits(0.5)
		for direction, both := range []bool{true, c.hits(0.5)} {
			if both {
				p.partedUntil[direction^int(c.next()%2)] = until
			}
		}
		p.mu.Unlock()
		w.count("partition")
		w.record(p.name + " parted")
	}
}

// disasters are those of the server.
func (w *world) disasters() {
	c, s := from(w.Seed, name("disasters")), w.server
	var kinds []func()
	add := func(there bool, f func()) {
		if there {
			kinds = append(kinds, f)
		}
	}
	add(w.weather.hangs, func() {
		w.count("server hung")
		s.mu.Lock()
		defer s.mu.Unlock()
		s.hung = time.Now().Add(c.between(10*time.Millisecond, 2*ttlMost))
	})
	add(w.weather.refusesAll, func() {
		w.count("server refuses everything")
		s.mu.Lock()
		defer s.mu.Unlock()
		s.refuses, s.refusal = time.Now().Add(c.between(10*time.Millisecond, ttlMost)), notExecuted[c.below(len(notExecuted))]
	})
	add(w.weather.restarts, func() { w.count("restart with an empty server"); s.restart() })
	add(w.weather.failovers, func() { w.count("failover to a lagging replica"); s.failover(c.between(0, replicaLag)) })
	add(w.weather.jumps, func() { w.count("server clock set"); s.jump(c.between(-ttlMost, ttlMost)) })
	for len(kinds) > 0 && w.pause(c, ttlLeast, 10*ttlMost) {
		s.forget()
		w.record("disaster")
		kinds[c.below(len(kinds))]()
	}
}

// operators delete and overwrite keys by hand.
func (w *world) operators() {
	c, s := from(w.Seed, name("operators")), w.server
	for n := 0; w.weather.operators && w.pause(c, ttlLeast, 5*ttlMost); n++ {
		w.count("operator changed a key")
		key := w.keys[c.below(len(w.keys))]
		if c.hits(0.3) {
			key = fenceOf(key)
		}
		expires := time.Now().Add(c.between(ttlLeast, ttlMost))
		switch c.below(4) {
		case 0, 1:
			s.change(key, item{})
		case 2:
			s.change(key, item{value: fmt.Sprintf("by hand %d", n), expires: expires})
		default:
			s.change(key, item{value: listed, list: true, expires: expires})
		}
	}
}

func (w *world) count(fault string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults[fault]++
}

func (w *world) since() time.Duration { return time.Since(w.start) }

// record adds a line to the history.
func (w *world) record(line string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if !now.Equal(w.instant) {
		w.history = uint64(*from(w.history, uint64(w.instant.Sub(w.start)), w.sum))
		w.instant, w.sum = now, 0
	}
	w.sum += name(line)
	if w.Trace != nil {
		w.Trace(fmt.Sprintf("%17.9f %s", now.Sub(w.start).Seconds(), line))
	}
}
