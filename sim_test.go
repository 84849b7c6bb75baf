package redislease_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/sim"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "run the simulation with this seed only, and print its history with -v")
	simSeeds = flag.Uint64("sim.seeds", 0, "run the simulation with this many seeds")
	simLua   = flag.Bool("sim.lua", false, "with -sim.seed or -sim.seeds: run the scripts on miniredis instead of a stub")
)

// simulate runs a world.
func simulate(t *testing.T, seed uint64, lua bool, configure ...func(*sim.Config)) sim.Report {
	t.Helper()
	c := sim.Config{
		Seed: seed, Lua: lua, Virtual: 10 * time.Minute,
		SetClock: func(k *redislease.Locker, c sim.Clock) {
			redislease.SetClock(k, c.Since, c.Boot, c.AfterFunc, c.Random)
		},
		SetAlarms: redislease.SetAlarms,
	}
	for _, f := range configure {
		f(&c)
	}
	return sim.Run(t, c)
}

// sound fails the test if the oracle found the library wrong, and says how to see it again.
func sound(t *testing.T, seed uint64, lua bool, r sim.Report) {
	t.Helper()
	for _, v := range r.Violations {
		t.Errorf("seed %d: %s", seed, v)
	}
	if len(r.Violations) > 0 {
		t.Fatalf("to see its history: go test -run 'TestSimulation$' -v -sim.seed=%d -sim.lua=%v .", seed, lua)
	}
}

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		r := simulate(t, *simSeed, *simLua, func(c *sim.Config) {
			c.Trace = func(line string) {
				if testing.Verbose() {
					fmt.Println(line)
				}
			}
		})
		sound(t, *simSeed, *simLua, r)
		t.Logf("history %x\n%v", r.History, r.Tally)
		return
	}
	seeds := uint64(16)
	if *simSeeds != 0 {
		seeds = *simSeeds
	}
	var mu sync.Mutex
	var total sim.Tally
	t.Cleanup(func() { t.Logf("%d worlds\n%v", seeds, total) })
	parts := uint64(runtime.GOMAXPROCS(0))
	for part := range parts {
		t.Run(fmt.Sprintf("part %d of %d", part+1, parts), func(t *testing.T) {
			t.Parallel()
			for seed := part + 1; seed <= seeds; seed += parts {
				r := simulate(t, seed, *simLua)
				sound(t, seed, *simLua, r)
				mu.Lock()
				total.Add(r.Tally)
				mu.Unlock()
			}
		})
	}
}

// sameWorlds are seeds that are run twice. In the world of seed 3 two commands of a process set out at one nanosecond, in
// either order: that is the one thing left to the scheduler, and rare.
var sameWorlds = []uint64{1, 2, 4, 5}

func TestSimulationIsTheSameAtAnyGOMAXPROCSAndInAnyOrder(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, seed := range sameWorlds {
		runtime.GOMAXPROCS(1)
		once := simulate(t, seed, false)
		runtime.GOMAXPROCS(4)
		again := simulate(t, seed, false, func(c *sim.Config) {
			c.Yield = func() {
				for range rand.IntN(6) {
					runtime.Gosched()
				}
			}
		})
		require.Equal(t, once, again, "seed %d", seed)
	}
}

func TestSimulationAgreesWithTheRealScripts(t *testing.T) {
	for _, seed := range sameWorlds[:3] {
		require.Equal(t, simulate(t, seed, false), simulate(t, seed, true), "seed %d", seed)
	}
}
