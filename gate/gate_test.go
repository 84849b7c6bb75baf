package gate_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/gate"
)

func newGate(t testing.TB, limit int) *gate.Gate {
	t.Helper()
	g, err := gate.New(limit)
	require.NoError(t, err)
	return g
}

// do has g let through a write that does nothing, and returns whether it did and the error.
func do(g *gate.Gate, resource string, fence int64) (wrote bool, err error) {
	err = g.Do(context.Background(), resource, fence, func() error { wrote = true; return nil })
	return wrote, err
}

func TestAGateLetsThroughFencesThatDoNotFall(t *testing.T) {
	g := newGate(t, 10)
	for _, step := range []struct {
		name     string
		resource string
		fence    int64
		seen     int64 // 0: let through
	}{
		{"the first", "a", 5, 0},
		{"the same again", "a", 5, 0},
		{"a greater one", "a", 7, 0},
		{"a smaller one", "a", 6, 7},
		{"the first, late", "a", 5, 7},
		{"the smallest", "a", 1, 7},
		{"the same after others were refused", "a", 7, 0},
		{"a smaller one for another resource", "b", 2, 0},
		{"resources are compared byte by byte", "A", 1, 0},
		{"and may be empty", "", 1, 0},
		{"a number above 2^53", "a", 1<<53 + 1, 0},
		{"one less", "a", 1 << 53, 1<<53 + 1},
		{"the greatest", "a", math.MaxInt64, 0},
		{"the greatest again", "a", math.MaxInt64, 0},
		{"one less than the greatest", "a", math.MaxInt64 - 1, math.MaxInt64},
	} {
		wrote, err := do(g, step.resource, step.fence)
		require.Equal(t, step.seen == 0, wrote, step.name)
		if step.seen == 0 {
			require.NoError(t, err, step.name)
			continue
		}
		var stale *gate.StaleError
		require.ErrorAs(t, err, &stale, step.name)
		require.Equal(t, gate.StaleError{Resource: step.resource, Fence: step.fence, Seen: step.seen}, *stale, step.name)
		require.ErrorIs(t, err, gate.ErrStale)
		require.NotErrorIs(t, err, gate.ErrForgotten)
		require.EqualError(t, err, fmt.Sprintf("gate: %q: stale fence: %d, after %d was seen", step.resource, step.fence, step.seen))
	}
}

func TestAFenceBelowOneIsThatOfALeaseWithoutFencing(t *testing.T) {
	g := newGate(t, 1)
	for _, fence := range []int64{0, -1, math.MinInt64} {
		for range 2 { // for a resource that is unknown, and for one that is not
			wrote, err := do(g, "a", fence)
			require.False(t, wrote)
			require.ErrorContains(t, err, fmt.Sprintf(`"a": fence %d: the lease was taken without redislease.WithFencing`, fence))
			require.NotErrorIs(t, err, gate.ErrStale)
			require.NotErrorIs(t, err, gate.ErrForgotten)
			_, err = do(g, "a", 5)
			require.NoError(t, err)
		}
	}
}

func TestTheErrorOfTheWriteIsReturnedAndItsFenceStays(t *testing.T) {
	g := newGate(t, 1)
	failed := errors.New("disk full")
	require.Equal(t, failed, g.Do(t.Context(), "a", 5, func() error { return failed }))
	_, err := do(g, "a", 4)
	require.ErrorIs(t, err, gate.ErrStale)
	_, err = do(g, "a", 5)
	require.NoError(t, err)
}

func TestWhatCannotWorkIsAnError(t *testing.T) {
	for _, limit := range []int{0, -1, math.MinInt} {
		_, err := gate.New(limit)
		require.EqualError(t, err, fmt.Sprintf("gate: new: limit %d is below the least, 1", limit))
	}
	write := func() error { t.Error("called"); return nil }
	for _, g := range []*gate.Gate{nil, {}} {
		require.ErrorContains(t, g.Do(t.Context(), "a", 5, write), `"a": the Gate was not made by New`)
	}
	g := newGate(t, 1)
	var none context.Context
	require.ErrorContains(t, g.Do(none, "a", 5, write), `"a": the context is nil`)
	require.ErrorContains(t, g.Do(t.Context(), "a", 5, nil), `"a": the write is nil`)

	ctx, cancel := context.WithCancelCause(t.Context())
	away := errors.New("the client has gone away")
	cancel(away)
	require.ErrorIs(t, g.Do(ctx, "a", 5, write), away)
}

func TestWhatWasForgottenIsRefusedBelowTheGreatestForgottenFence(t *testing.T) {
	g := newGate(t, 2)
	through := func(resource string, fence int64) {
		t.Helper()
		wrote, err := do(g, resource, fence)
		require.NoError(t, err)
		require.True(t, wrote)
	}
	refused := func(resource string, fence int64, as error) {
		t.Helper()
		wrote, err := do(g, resource, fence)
		require.False(t, wrote)
		require.ErrorIs(t, err, as)
		for _, other := range []error{gate.ErrStale, gate.ErrForgotten} {
			require.Equal(t, as == other, errors.Is(err, other))
		}
		require.ErrorContains(t, err, fmt.Sprintf("%q: ", resource))
		require.ErrorContains(t, err, fmt.Sprint(fence))
	}
	through("a", 10)
	through("b", 20)
	through("a", 30)
	through("c", 40) // b is forgotten
	refused("b", 19, gate.ErrForgotten)
	refused("new", 19, gate.ErrForgotten)
	refused("a", 29, gate.ErrStale) // it is remembered
	refused("a", 5, gate.ErrStale)
	through("b", 20) // nothing is between 20 and 30, so it is forgotten again
	through("new", 25)
	refused("b", 24, gate.ErrForgotten)
	through("b", 50) // a is forgotten
	refused("a", 29, gate.ErrForgotten)
	through("a", 30)
	resources, turns := g.Remembered()
	require.Equal(t, 2, resources)
	require.Zero(t, turns)
}

// unlimited is a gate that never forgets.
type unlimited map[string]int64

func (u unlimited) admits(resource string, fence int64) bool {
	if fence < u[resource] {
		return false
	}
	u[resource] = fence
	return true
}

// compare lets a Gate and one with unlimited memory decide about the same writes.
func compare(t *testing.T, limit int, writes func(yield func(resource string, fence int64) bool)) {
	g, model := newGate(t, limit), unlimited{}
	var greatest int64
	for resource, fence := range writes {
		before := model[resource]
		possible := model.admits(resource, fence)
		wrote, err := do(g, resource, fence)
		require.Equal(t, err == nil, wrote)
		var stale *gate.StaleError
		switch {
		case err == nil:
			require.True(t, possible, "%q was let through with %d after %d", resource, fence, before)
		case errors.As(err, &stale):
			require.False(t, possible, "%v", err)
			require.LessOrEqual(t, stale.Seen, before, "%v", err)
		default:
			require.ErrorIs(t, err, gate.ErrForgotten)
			require.Greater(t, len(model), limit, "forgotten for nothing: %v", err)
			require.Less(t, fence, greatest, "refused although it is the greatest of all: %v", err)
		}
		greatest = max(greatest, fence)
		resources, turns := g.Remembered()
		require.LessOrEqual(t, resources, min(len(model), limit))
		require.Zero(t, turns)
	}
}

func TestAGateOfBoundedMemoryLetsNothingThroughThatOneWithoutBoundsRefuses(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 22))
		limit, resources, fences := 1+random.IntN(8), 1+random.IntN(16), 1+random.Int64N(60)
		clock := int64(0) // half of the seeds: fences that grow, and come late
		compare(t, limit, func(yield func(string, int64) bool) {
			for range 300 {
				fence := 1 + random.Int64N(fences)
				if clock++; seed%2 == 0 {
					fence = max(1, clock-random.Int64N(fences))
				}
				if !yield(fmt.Sprint(random.IntN(resources)), fence) {
					return
				}
			}
		})
	}
}

func FuzzAGateOfBoundedMemoryLetsNothingThroughThatOneWithoutBoundsRefuses(f *testing.F) {
	f.Add(uint8(1), []byte("a1b2a1b1c9a8"))
	f.Add(uint8(2), []byte("a1b2c3d4a1b2c3d4d1c2b3a4"))
	f.Fuzz(func(t *testing.T, limit uint8, writes []byte) {
		compare(t, 1+int(limit%8), func(yield func(string, int64) bool) {
			for ; len(writes) >= 2; writes = writes[2:] {
				if !yield(string(writes[0]%16), 1+int64(writes[1])) {
					return
				}
			}
		})
	})
}

func TestANewerHolderWaitsForAWriteThatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t, 1)
		var story []string // guarded by the Gate
		start, end := make(chan struct{}), make(chan struct{})
		var all sync.WaitGroup
		write := func(ctx context.Context, fence int64, during func() error) {
			all.Go(func() {
				err := g.Do(ctx, "a", fence, func() error {
					story = append(story, fmt.Sprint("write ", fence))
					return during()
				})
				if err != nil && !errors.Is(err, gate.ErrStale) && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		nothing := func() error { return nil }

		write(t.Context(), 41, func() error {
			close(start)
			<-end
			story = append(story, "41 has ended")
			return nil
		})
		<-start
		write(t.Context(), 41, nothing) // of the same holder; it will have become stale
		write(t.Context(), 42, nothing)
		impatient, cancel := context.WithCancel(t.Context())
		write(impatient, 43, func() error { t.Error("let through after its context ended"); return nil })
		cancel()
		synctest.Wait()
		require.Equal(t, []string{"write 41"}, story)
		wrote, err := do(g, "b", 50) // another resource does not wait, though a is forgotten for it
		require.NoError(t, err)
		require.True(t, wrote)
		write(t.Context(), 51, nothing) // still a waits for its write that is under way
		require.Equal(t, []string{"write 41"}, story)

		close(end)
		all.Wait()
		require.Equal(t, []string{"write 41", "41 has ended", "write 51"}, story)
		_, turns := g.Remembered()
		require.Zero(t, turns)
	})
}

func TestAWriteThatPanicsOrEndsItsGoroutineGivesItsTurnAway(t *testing.T) {
	g := newGate(t, 1)
	require.PanicsWithValue(t, "boom", func() { _ = g.Do(t.Context(), "a", 5, func() error { panic("boom") }) })
	var ended sync.WaitGroup
	ended.Go(func() { _ = g.Do(t.Context(), "a", 5, func() error { runtime.Goexit(); return nil }) })
	ended.Wait()
	wrote, err := do(g, "a", 5)
	require.NoError(t, err)
	require.True(t, wrote)
	_, turns := g.Remembered()
	require.Zero(t, turns)
}

// Writers with fences handed out in order, and late ones among them. What they write is guarded by nothing but the Gate,
// so that the race detector sees whether two of one resource write at a time.
func TestNoStaleWriteLandsAfterANewerOne(t *testing.T) {
	const resources, writers, rounds = 8, 4, 200
	g := newGate(t, resources/2) // so that it forgets
	type place struct {
		fence int64 // of the last write
		log   []int64
	}
	places := make([]place, resources)
	var (
		mu    sync.Mutex
		clock int64
		count = map[string]int{}
	)
	grant := func() int64 {
		mu.Lock()
		defer mu.Unlock()
		clock++
		return clock
	}
	var all sync.WaitGroup
	for i := range resources {
		for w := range writers {
			all.Go(func() {
				random := rand.New(rand.NewPCG(uint64(i), uint64(w)))
				for range rounds {
					fence := grant()
					for range random.IntN(4) {
						runtime.Gosched()
					}
					err := g.Do(t.Context(), fmt.Sprint(i), fence, func() error {
						p := &places[i]
						before := p.fence
						for range random.IntN(4) {
							runtime.Gosched()
						}
						if p.fence != before {
							t.Error("two wrote at a time")
						}
						p.fence = fence
						p.log = append(p.log, fence)
						return nil
					})
					mu.Lock()
					switch {
					case err == nil:
						count["let through"]++
					case errors.Is(err, gate.ErrStale):
						count["stale"]++
					case errors.Is(err, gate.ErrForgotten):
						count["forgotten"]++
					default:
						t.Error(err)
					}
					mu.Unlock()
				}
			})
		}
	}
	all.Wait()
	for i := range places {
		require.IsIncreasing(t, places[i].log)
	}
	remembered, turns := g.Remembered()
	require.LessOrEqual(t, remembered, resources/2)
	require.Zero(t, turns)
	require.Positive(t, count["let through"])
	t.Log(count)
}

// What a Gate adds to a write: the same resource by one goroutine and by many, and many resources, of which most have
// been forgotten.
func BenchmarkDo(b *testing.B) {
	names := make([]string, 1<<16)
	for i := range names {
		names[i] = fmt.Sprint("account:", i)
	}
	write := func() error { return nil }
	b.Run("one resource", func(b *testing.B) {
		b.ReportAllocs()
		g := newGate(b, 1000)
		for b.Loop() {
			if err := g.Do(b.Context(), names[0], 1, write); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("one resource, in parallel", func(b *testing.B) {
		b.ReportAllocs()
		g := newGate(b, 1000)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if err := g.Do(b.Context(), names[0], 1, write); err != nil {
					b.Error(err)
				}
			}
		})
	})
	for _, limit := range []int{1 << 10, 1 << 16} {
		b.Run(fmt.Sprintf("%d resources, limit %d", len(names), limit), func(b *testing.B) {
			b.ReportAllocs()
			g := newGate(b, limit)
			fence := int64(0)
			for b.Loop() {
				fence++
				if err := g.Do(b.Context(), names[fence%int64(len(names))], fence, write); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
