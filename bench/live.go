package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Scenario live: leases that one process has taken, and that are renewed.
const live = "c"

type livePlan struct {
	leases []int
	ttl    time.Duration
	rounds int
}

const (
	columnTake       = "ramp-up ms"
	columnHeapStack  = "heap+stack B"
	columnGoroutines = "goroutines"
	columnRenewals   = "cmds/s"
	columnClientCPU  = "client CPU %"
	columnServerCPU  = "server CPU %"
	columnLateP50    = "late p50 ms"
	columnLateP99    = "late p99 ms"
	columnLateMax    = "late max ms"
	columnLost       = "lost"
	columnRelease    = "release ms"
)

func (h *harness) live(p livePlan) *table {
	t := &table{scenario: live, columns: []string{columnTake, columnHeapStack, columnGoroutines, columnRenewals,
		columnClientCPU, columnServerCPU, columnLateP50, columnLateP99, columnLateMax, columnLost, columnRelease}}
	for _, n := range p.leases {
		cell := fmt.Sprintf("%d live leases in one process, TTL %v", n, p.ttl)
		h.inTurn(t, cell, p.rounds, func(a adapter) (map[string]float64, error) { return h.liveOf(a, n, p.ttl) })
	}
	return t
}

// inTurn measures the adapters of a scenario by turns, and adds what that gives to the table.
func (h *harness) inTurn(t *table, cell string, rounds int, measure func(adapter) (map[string]float64, error)) {
	adapters := pick(t.scenario, h.globs)
	for round := range rounds {
		for i := range adapters {
			a := adapters[(i+round)%len(adapters)]
			h.logf("round %d of %d: %s: %s", round+1, rounds, cell, a.name)
			values, err := measure(a)
			r := result{cell, a.name, round, values, ""}
			if err != nil {
				r.problem = err.Error()
			}
			t.add(r)
		}
	}
}

// holder starts a fresh process that takes n leases on an empty server. It has to be ended unless there is an error.
func (h *harness) holder(a adapter, n int, ttl time.Duration) (p *process, taken reply, err error) {
	if err := h.server.flush(); err != nil {
		return nil, reply{}, err
	}
	if p, err = spawn(); err != nil {
		return nil, reply{}, err
	}
	_, err = p.ask(request{Do: doOpen, Adapter: a.name, Addr: h.server.addr, TTL: ttl, RenewEvery: ttl / 3})
	if err == nil {
		taken, err = p.ask(request{Do: doTake, N: n})
	}
	if err != nil {
		p.end()
	}
	return p, taken, err
}

// liveOf has a fresh process take the leases, watches for a renewal interval and a bit, and has it release them.
func (h *harness) liveOf(a adapter, n int, ttl time.Duration) (map[string]float64, error) {
	p, taken, err := h.holder(a, n, ttl)
	if err != nil {
		return nil, err
	}
	defer p.end()
	w, err := h.watch(p, ttl/3)
	if err != nil {
		return nil, err
	}
	census, err := p.ask(request{Do: doCensus})
	if err != nil {
		return nil, err
	}
	kept, err := h.server.keys()
	if err != nil {
		return nil, err
	}
	released, err := p.ask(request{Do: doReleaseAll})
	if err != nil {
		return nil, err
	}
	if released.Failures > 0 {
		err = fmt.Errorf("%d releases failed", released.Failures)
	}
	each, late := float64(n), w.lateness(taken.Taken)
	return map[string]float64{
		columnTake:       millis(taken.Took),
		columnHeapStack:  (census.Census.Heap + census.Census.Stack) / each,
		columnGoroutines: float64(census.Census.Goroutines) / each,
		columnRenewals:   float64(len(w.seen)) / w.took().Seconds(),
		columnClientCPU:  w.client / w.took().Seconds() * 100,
		columnServerCPU:  w.server / w.took().Seconds() * 100,
		columnLateP50:    millis(quantile(late, 0.5)),
		columnLateP99:    millis(quantile(late, 0.99)),
		columnLateMax:    millis(quantile(late, 1)),
		columnLost:       float64(max(census.Census.Lost, n-int(kept))),
		columnRelease:    millis(released.Took),
	}, err
}

// watched is the renewals that the server has executed in some time, and what they have cost.
type watched struct {
	interval       time.Duration
	from, to       time.Time
	seen           []renewal
	client, server float64 // CPU seconds
}

type renewal struct {
	lease int
	at    time.Time
}

func (w *watched) took() time.Duration { return w.to.Sub(w.from) }

// watch watches the leases of a process for a renewal interval, and a bit for those that are late.
func (h *harness) watch(p *process, interval time.Duration) (*watched, error) {
	w := &watched{interval: interval}
	// A census collects what is left of the ramp-up, which would otherwise be collected while the CPU is measured.
	if _, err := p.ask(request{Do: doCensus}); err != nil {
		return nil, err
	}
	stop, err := h.server.monitor(w.see)
	if err != nil {
		return nil, err
	}
	err = h.timeLeases(p, w)
	if stopErr := stop(); err == nil {
		err = stopErr
	}
	return w, err
}

func (h *harness) timeLeases(p *process, w *watched) error {
	client, err := p.ask(request{Do: doUsage})
	if err != nil {
		return err
	}
	server, err := h.server.counters()
	if err != nil {
		return err
	}
	w.from = time.Now()
	time.Sleep(w.interval + w.interval/10)
	w.to = time.Now()
	serverAfter, err := h.server.counters()
	if err != nil {
		return err
	}
	clientAfter, err := p.ask(request{Do: doUsage})
	w.client, w.server = clientAfter.CPU-client.CPU, serverAfter.cpu-server.cpu
	return err
}

// see takes note of a command that MONITOR tells of.
func (w *watched) see(m monitored) {
	if m.inScript {
		return
	}
	if i, ok := liveIndex(m.line); ok {
		w.seen = append(w.seen, renewal{i, m.at})
	}
}

// liveIndex returns the number of the lease that a line of MONITOR is about.
func liveIndex(line string) (int, bool) {
	_, rest, ok := strings.Cut(line, livePrefix)
	if !ok || len(rest) < liveDigits {
		return 0, false
	}
	i, err := strconv.Atoi(rest[:liveDigits])
	return i, err == nil
}

// lateness returns by how much more than an interval each renewal came after the one before, or after the acquisition,
// and how late those are by now that have not come. What is renewed early is not late.
func (w *watched) lateness(taken []time.Time) (late []time.Duration) {
	last := make([]time.Time, len(taken)) // zero: not known
	for i, at := range taken {
		// Those that were taken long before the watch may have been renewed before it, too.
		if w.from.Sub(at) < w.interval*3/4 {
			last[i] = at
		}
	}
	for _, r := range w.seen {
		if r.lease >= len(last) {
			continue
		}
		if at := last[r.lease]; !at.IsZero() {
			late = append(late, max(0, r.at.Sub(at)-w.interval))
		}
		last[r.lease] = r.at
	}
	for _, at := range last {
		if by := w.to.Sub(at) - w.interval; !at.IsZero() && by > 0 {
			late = append(late, by)
		}
	}
	return late
}
