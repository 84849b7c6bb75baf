package main

import (
	"fmt"
	"maps"
	"time"
)

// Scenario contended: waiters in one process or several want one key.
//
//	drain  they come while the key is held; it is let go, and each has it once
//	loop   each acquires and releases without a pause
const contended = "b"

const (
	contendedTTL = 20 * time.Second
	patience     = 5 * time.Second // a waiter of a drain that has not had the key by then is unserved
)

// contendedPlan is what to measure.
type contendedPlan struct {
	processes []int
	waiters   []int
	holds     []time.Duration // critical sections
	loops     bool
	rounds    int
	slot      time.Duration // how long a loop takes, and for how long drains follow each other
	drains    int           // so many instead, and nothing is counted beforehand
	arrivals  time.Duration // over what the waiters of a drain come
	grow      time.Duration // how long waiters have waited when what they send while nothing happens is counted,
	idle      time.Duration // and for how long it is; 0: it is not
}

func contendedColumns() []string {
	return []string{columnHandoffs, columnGapP50, columnGapP99, columnGapMax, columnCommands, columnIdle, columnClient,
		columnServer, columnFairness, columnSelf, columnDrains, columnUnserved, columnLate}
}

func (h *harness) contended(p contendedPlan) (*table, error) {
	t := &table{scenario: contended, columns: contendedColumns()}
	for _, processes := range p.processes {
		if err := h.contendedIn(processes, p, t); err != nil {
			return t, err
		}
	}
	return t, nil
}

// contendedIn measures all adapters, with so many processes each.
func (h *harness) contendedIn(processes int, p contendedPlan, t *table) error {
	var groups []*group
	defer func() {
		for _, g := range groups {
			g.end()
		}
	}()
	for _, a := range pick(contended, h.globs) {
		g, err := h.newGroup(a, processes)
		if err != nil {
			return err
		}
		groups = append(groups, g)
	}
	for _, waiters := range p.waiters {
		for _, g := range groups {
			if p.drains == 0 && g.broken == nil {
				h.logf("%s: what %d waiters in %d processes send", g.adapter.name, waiters, processes)
				g.broken = g.count(waiters, p)
			}
		}
		for round := range p.rounds {
			h.logf("round %d of %d: %d waiters in %d processes", round+1, p.rounds, waiters, processes)
			for _, hold := range p.holds {
				for i := range groups {
					groups[(i+round)%len(groups)].measure(waiters, hold, round, p, t)
				}
			}
		}
	}
	return nil
}

// group is the processes of one adapter.
type group struct {
	harness   *harness
	adapter   adapter
	processes []*process
	keys      int   // used so far
	broken    error // it takes no further part

	// What count has found out.
	share map[string]float64 // what part of the calls of a command clients have sent; the rest is that of scripts
	idle  float64            // commands per second and process while the key stays held; below 0: not counted
}

func (h *harness) newGroup(a adapter, processes int) (*group, error) {
	g := &group{harness: h, adapter: a, idle: -1}
	for range processes {
		p, err := spawn()
		if err != nil {
			g.end()
			return nil, err
		}
		g.processes = append(g.processes, p)
	}
	_, err := askAll(g.processes, func(int) request {
		return request{Do: doOpen, Adapter: a.name, Addr: h.server.addr, TTL: contendedTTL, RenewEvery: contendedTTL / 3}
	})
	if err != nil {
		g.end()
		return nil, fmt.Errorf("%s: %w", a.name, err)
	}
	return g, nil
}

func (g *group) end() {
	for _, p := range g.processes {
		p.end()
	}
}

func (g *group) newKey() string {
	g.keys++
	return fmt.Sprintf("bench:%s:%d", g.adapter.name, g.keys)
}

// spread returns the request for each process: the waiters are dealt out evenly.
func (g *group) spread(r request, waiters int) func(i int) request {
	n := len(g.processes)
	return func(i int) request {
		own := r
		own.First = i * waiters / n
		own.N = (i+1)*waiters/n - own.First
		return own
	}
}

// measure runs the drains of a slot, and a loop.
func (g *group) measure(waiters int, hold time.Duration, round int, p contendedPlan, t *table) {
	where := fmt.Sprintf("%d waiters in %d processes, critical section %v", waiters, len(g.processes), hold)
	t.add(g.measureDrains("drain: "+where, waiters, hold, round, p))
	if p.loops && p.drains == 0 {
		t.add(g.measureLoop("loop: "+where, waiters, hold, round, p))
	}
}

func (g *group) measureDrains(cell string, waiters int, hold time.Duration, round int, p contendedPlan) result {
	var drained outcome
	until := time.Now().Add(p.slot)
	for g.broken == nil && (drained.drains < max(1, p.drains) || p.drains == 0 && time.Now().Before(until)) {
		g.broken = g.drainOnce(&drained, waiters, hold, p, nil)
	}
	if g.broken != nil {
		return result{cell, g.adapter.name, round, nil, g.broken.Error()}
	}
	values := drained.values()
	values[columnDrains] = float64(drained.drains)
	values[columnUnserved] = float64(drained.unserved)
	values[columnLate] = float64(drained.late)
	if g.idle >= 0 {
		values[columnIdle] = g.idle
	}
	if g.share == nil {
		delete(values, columnCommands)
	}
	return result{cell, g.adapter.name, round, values, drained.problem()}
}

func (g *group) measureLoop(cell string, waiters int, hold time.Duration, round int, p contendedPlan) result {
	var looped outcome
	if g.broken == nil {
		g.broken = g.loop(&looped, waiters, hold, p.slot)
	}
	if g.broken != nil {
		return result{cell, g.adapter.name, round, nil, g.broken.Error()}
	}
	values := looped.values()
	delete(values, columnGapMax)
	values[columnSelf] = 100 * (1 - float64(looped.handoffs)/float64(looped.turns))
	values[columnUnserved] = float64(looped.unserved)
	return result{cell, g.adapter.name, round, values, looped.problem()}
}

// drainOnce has the waiters come while the key is held, and lets it go. While they wait meanwhile, if not nil, is run.
func (g *group) drainOnce(o *outcome, waiters int, hold time.Duration, p contendedPlan, meanwhile func() error) error {
	key, holder := g.newKey(), g.processes[0]
	if _, err := holder.ask(request{Do: doHold, Key: key}); err != nil {
		return err
	}
	queue := request{Do: doQueue, Key: key, Hold: hold, For: p.arrivals}
	if _, err := askAll(g.processes, g.spread(queue, waiters)); err != nil {
		return err
	}
	// By then they have come, and have found the key held.
	time.Sleep(p.arrivals + 50*time.Millisecond + time.Duration(waiters)*200*time.Microsecond)
	if meanwhile != nil {
		if err := meanwhile(); err != nil {
			return err
		}
	}
	before, err := g.usage()
	if err != nil {
		return err
	}
	freed, err := holder.ask(request{Do: doLetGo})
	if err != nil {
		return err
	}
	limit := patience + time.Duration(waiters)*hold*2
	replies, err := askAll(g.processes, func(int) request { return request{Do: doCollect, For: limit} })
	if err != nil {
		return err
	}
	after, err := g.harness.server.counters()
	if err != nil {
		return err
	}
	last := o.fold(replies, freed.At)
	unserved := 0
	for _, r := range replies {
		unserved += len(r.Waiting)
	}
	if unserved > 0 {
		last = freed.At.Add(limit)
		g.harness.logf("%s: %d of %d waiters had not had the key after %v", g.adapter.name, unserved, waiters, limit)
	}
	o.took += last.Sub(freed.At)
	o.unserved += unserved
	o.drains++
	o.client += totalCPU(replies) - before.client
	o.server += after.cpu - before.server.cpu
	o.commands += g.sent(before.server, after)
	return nil
}

// loop has the waiters acquire and release without a pause.
func (g *group) loop(o *outcome, waiters int, hold, d time.Duration) error {
	before, err := g.harness.server.counters()
	if err != nil {
		return err
	}
	begun := time.Now()
	r := request{Do: doLoop, Key: g.newKey(), Hold: hold, For: d}
	if err := tellAll(g.processes, g.spread(r, waiters)); err != nil {
		return err
	}
	time.Sleep(d)
	o.took = time.Since(begun)
	after, err := g.harness.server.counters()
	if err != nil {
		return err
	}
	replies, err := hearAll(g.processes)
	if err != nil {
		return err
	}
	o.fold(replies, time.Time{})
	served := map[int]bool{}
	for _, r := range replies {
		for _, t := range r.Turns {
			served[t.Waiter] = true
		}
	}
	o.unserved = waiters - len(served)
	o.client, o.server, o.commands = totalCPU(replies), after.cpu-before.cpu, g.sent(before, after)
	return nil
}

// used is what the processes and the server have used up to a moment.
type used struct {
	client float64
	server counters
}

func (g *group) usage() (u used, err error) {
	replies, err := askAll(g.processes, func(int) request { return request{Do: doUsage} })
	if err != nil {
		return u, err
	}
	u.client = totalCPU(replies)
	u.server, err = g.harness.server.counters()
	return u, err
}

// sent is how many commands the clients have sent between two moments.
func (g *group) sent(before, after counters) (n float64) {
	for command, calls := range after.calls {
		if ofConnections(command) {
			continue
		}
		share, known := g.share[command]
		if !known {
			share = 1
		}
		n += share * (calls - before.calls[command])
	}
	return n
}

// count finds out what the clients send while nothing happens, and which commands they send and which their scripts run,
// since INFO counts both as one. MONITOR, which tells, slows Redis down: so it does not run while anything is timed.
func (g *group) count(waiters int, p contendedPlan) error {
	type sighting struct {
		at       time.Time
		name     string
		inScript bool
	}
	var seen []sighting
	stop, err := g.harness.server.monitor(func(m monitored) { seen = append(seen, sighting{m.at, m.name, m.inScript}) })
	if err != nil {
		return err
	}
	var from, to time.Time
	err = g.drainOnce(new(outcome), waiters, 0, p, func() error {
		time.Sleep(p.grow)
		from = time.Now()
		time.Sleep(p.idle)
		to = time.Now()
		return nil
	})
	if stopErr := stop(); err == nil {
		err = stopErr
	}
	if err != nil {
		return err
	}
	idle := 0
	var all, handingOver sources
	for _, s := range seen {
		all.add(s.name, s.inScript)
		if s.at.After(to) {
			handingOver.add(s.name, s.inScript)
		} else if s.at.After(from) && !s.inScript {
			idle++
		}
	}
	g.share = all.shares()
	maps.Copy(g.share, handingOver.shares()) // what is timed is handing over, if the command is part of that
	if p.idle > 0 {
		g.idle = float64(idle) / p.idle.Seconds() / float64(len(g.processes))
	}
	return nil
}

// sources counts, by command, how often clients have sent it and how often scripts have run it.
type sources struct{ clients, scripts map[string]float64 }

func (s *sources) add(command string, inScript bool) {
	if s.clients == nil {
		s.clients, s.scripts = map[string]float64{}, map[string]float64{}
	}
	if inScript {
		s.scripts[command]++
	} else {
		s.clients[command]++
	}
}

// shares returns the part of clients, for the commands that scripts run.
func (s *sources) shares() map[string]float64 {
	shares := map[string]float64{}
	for command, n := range s.scripts {
		shares[command] = s.clients[command] / (s.clients[command] + n)
	}
	return shares
}
