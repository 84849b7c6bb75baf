package main

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

// plan is what to measure.
type plan struct {
	uncontended uncontendedPlan
	contended   contendedPlan
	live        livePlan
	hang        hangPlan
}

func quick() plan {
	return plan{
		uncontendedPlan{concurrency: []int{1, 16, 128}, rounds: 3, slot: 200 * time.Millisecond, cycles: 500},
		contendedPlan{processes: []int{1, 8}, waiters: []int{64}, holds: []time.Duration{0}, loops: true, rounds: 1,
			slot: 300 * time.Millisecond, arrivals: 100 * time.Millisecond, grow: 2500 * time.Millisecond, idle: 2 * time.Second},
		livePlan{leases: []int{10_000}, ttl: 9 * time.Second, rounds: 1},
		hangPlan{leases: 30, ttl: time.Second, parts: []float64{0.5, 3}, rounds: 1},
	}
}

func full() plan {
	return plan{
		uncontendedPlan{concurrency: []int{1, 16, 128}, rounds: 15, slot: 400 * time.Millisecond, cycles: 2000},
		contendedPlan{processes: []int{1, 8}, waiters: []int{64, 512}, holds: []time.Duration{0, time.Millisecond}, loops: true,
			rounds: 5, slot: 600 * time.Millisecond, arrivals: 120 * time.Millisecond, grow: 5 * time.Second, idle: 5 * time.Second},
		livePlan{leases: []int{50_000}, ttl: 30 * time.Second, rounds: 3},
		hangPlan{leases: 100, ttl: 3 * time.Second, parts: []float64{0.5, 3}, rounds: 3},
	}
}

// plan is the quick or the full one, as changed by the other flags.
func (f flags) plan() (plan, error) {
	p := quick()
	if f.full {
		p = full()
	}
	if f.rounds > 0 {
		p.uncontended.rounds, p.contended.rounds, p.live.rounds, p.hang.rounds = f.rounds, f.rounds, f.rounds, f.rounds
	}
	if f.ttl > 0 {
		p.live.ttl = f.ttl
	}
	if f.drains > 0 {
		p.contended.drains, p.contended.rounds, p.contended.arrivals = f.drains, max(1, f.rounds), 20*time.Millisecond
	}
	return p, errors.Join(override(&p.contended.waiters, f.waiters), override(&p.contended.processes, f.processes),
		override(&p.live.leases, f.leases))
}

// override replaces a list by the numbers in text, which commas separate, unless there are none.
func override(list *[]int, text string) error {
	if text == "" {
		return nil
	}
	*list = nil
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(part)
		if err != nil || n < 1 {
			return fmt.Errorf("%q is no number above 0", part)
		}
		*list = append(*list, n)
	}
	return nil
}

// goRedisVersion is that of the module that this program was built with.
func goRedisVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "github.com/redis/go-redis/v9" {
				return m.Version
			}
		}
	}
	return "of unknown version"
}
