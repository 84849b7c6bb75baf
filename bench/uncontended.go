package main

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Scenario uncontended: acquire and release, each goroutine with a key of its own.
const uncontended = "a"

// everything is all scenarios.
const everything = uncontended + contended + live + hang

const uncontendedTTL = 30 * time.Second

type uncontendedPlan struct {
	concurrency []int
	rounds      int
	slot        time.Duration
	cycles      int // of what is counted
}

const (
	columnCycleP50  = "cycle p50 µs"
	columnCycleP99  = "cycle p99 µs"
	columnCycles    = "cycles/s"
	columnClientUse = "client µs/cycle"
	columnServerUse = "server µs/cycle"
	columnSent      = "cmds"
	columnAllocs    = "allocs"
	columnBytes     = "bytes"
)

// opened is an adapter with its client.
type opened struct {
	adapter
	client client
}

func (h *harness) uncontended(p uncontendedPlan) (*table, error) {
	t := &table{scenario: uncontended, columns: []string{columnCycleP50, columnCycleP99, columnCycles, columnClientUse,
		columnServerUse, columnSent, columnAllocs, columnBytes}}
	var all []opened
	defer func() {
		for _, o := range all {
			_ = o.client.close()
		}
	}()
	for _, a := range pick(uncontended, h.globs) {
		c, err := a.open(settings{h.server.addr, uncontendedTTL, uncontendedTTL / 3})
		if err != nil {
			return t, fmt.Errorf("%s: %w", a.name, err)
		}
		all = append(all, opened{a, c})
	}
	for _, o := range all {
		if err := h.countCycle(o, p.cycles, t); err != nil {
			return t, err
		}
	}
	for round := range p.rounds {
		h.logf("round %d of %d", round+1, p.rounds)
		for _, n := range p.concurrency {
			for i := range all {
				if err := h.timeCycles(all[(i+round)%len(all)], n, round, p.slot, t); err != nil {
					return t, err
				}
			}
		}
	}
	return t, nil
}

// countCycle finds out what a cycle sends and allocates.
func (h *harness) countCycle(o opened, n int, t *table) error {
	h.logf("%s: what a cycle sends and allocates", o.name)
	runCycles(o.client, o.name, 1, n, 0) // opens the connection
	sent := 0
	stop, err := h.server.monitor(func(m monitored) {
		if !m.inScript {
			sent++
		}
	})
	if err != nil {
		return err
	}
	runCycles(o.client, o.name, 1, n, 0)
	if err := stop(); err != nil {
		return err
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	c := runCycles(o.client, o.name, 1, n, 0)
	runtime.ReadMemStats(&after)
	each := func(v float64) float64 { return v / float64(n) }
	t.add(result{"one cycle of acquire and release", o.name, 0, map[string]float64{
		columnSent:   each(float64(sent)),
		columnAllocs: math.Round(each(float64(after.Mallocs - before.Mallocs))),
		columnBytes:  each(float64(after.TotalAlloc - before.TotalAlloc)),
	}, c.problem})
	return nil
}

func (h *harness) timeCycles(o opened, concurrency, round int, slot time.Duration, t *table) error {
	runCycles(o.client, o.name, concurrency, 0, slot/8) // opens the connections
	server, err := h.server.counters()
	if err != nil {
		return err
	}
	before := cpu()
	c := runCycles(o.client, o.name, concurrency, 0, slot)
	used := cpu() - before
	after, err := h.server.counters()
	if err != nil {
		return err
	}
	n := float64(len(c.latencies))
	t.add(result{fmt.Sprint("acquire and release, concurrency ", concurrency), o.name, round, map[string]float64{
		columnCycleP50:  micros(quantile(c.latencies, 0.5)),
		columnCycleP99:  micros(quantile(c.latencies, 0.99)),
		columnCycles:    n / c.took.Seconds(),
		columnClientUse: used / n * 1e6,
		columnServerUse: (after.cpu - server.cpu) / n * 1e6,
	}, c.problem})
	return nil
}

// cycles is what came of some cycles.
type cycles struct {
	latencies []time.Duration
	took      time.Duration
	problem   string
}

// runCycles acquires and releases on so many goroutines, each n times, or for the duration d if n is 0.
func runCycles(c client, name string, concurrency, n int, d time.Duration) cycles {
	took := make([][]time.Duration, concurrency)
	errs := make([]error, concurrency)
	var wg sync.WaitGroup
	begun := time.Now()
	for g := range concurrency {
		wg.Go(func() {
			key := fmt.Sprintf("bench:%s:%d", name, g)
			latencies := make([]time.Duration, 0, max(n, 1<<12))
			for i := 0; errs[g] == nil && (i < n || n == 0 && time.Since(begun) < d); i++ {
				t := time.Now()
				errs[g] = cycle(c, key)
				latencies = append(latencies, time.Since(t))
			}
			took[g] = latencies
		})
	}
	wg.Wait()
	result := cycles{latencies: slices.Concat(took...), took: time.Since(begun)}
	for _, err := range errs {
		if err != nil {
			result.problem = err.Error()
		}
	}
	return result
}

func cycle(c client, key string) error {
	ctx := context.Background()
	h, err := c.tryAcquire(ctx, key)
	if err != nil {
		return err
	}
	return h.release(ctx)
}
