package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// The benchmarks compare, on the same go-redis client and a real server:
//
//	lease    TryAcquire and Release
//	raw      SET NX PX and a compare-and-DEL with EVAL, written by hand
//	raw-hop  the same with each call in a goroutine of its own and a channel, which is what it costs to be able to leave
//	         a call behind
//	hop#2    raw-hop once more: its distance from raw-hop is the noise
//
// Each iteration is a round in which all of them take their turn, in rotating order; what is reported are medians over
// the rounds. Read the ratios.

const benchDelete = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`

var errHeld = errors.New("held")

// contender is one way to take and give back a key.
type contender struct {
	name  string
	cycle func(key string) error // acquire and release
	try   func(key string) error // on a held key: nil
}

func rawContender(name string, client *redis.Client, call func(cmd redis.Cmder)) contender {
	ctx := context.Background()
	set := func(key, token string) bool {
		cmd := redis.NewBoolCmd(ctx, "set", key, token, "nx", "px", 30000)
		call(cmd)
		return cmd.Val()
	}
	return contender{
		name: name,
		cycle: func(key string) error {
			token := uuid.NewString()
			if !set(key, token) {
				return errHeld
			}
			cmd := redis.NewCmd(ctx, "eval", benchDelete, 1, key, token)
			call(cmd)
			return cmd.Err()
		},
		try: func(key string) error {
			if set(key, uuid.NewString()) {
				return errors.New("acquired a held key")
			}
			return nil
		},
	}
}

func contenders(b *testing.B) []contender {
	client := connect(b, redistest.Start(b).Addr())
	ctx := context.Background()
	k := newLocker(b, client)
	raw := rawContender("raw", client, func(cmd redis.Cmder) { _ = client.Process(ctx, cmd) })
	hop := func(name string) contender {
		return rawContender(name, client, func(cmd redis.Cmder) {
			done := make(chan struct{})
			go func() {
				_ = client.Process(ctx, cmd)
				close(done)
			}()
			<-done
		})
	}
	lease := contender{
		name: "lease",
		cycle: func(key string) error {
			l, err := k.TryAcquire(ctx, key)
			if err != nil {
				return err
			}
			return l.Release()
		},
		try: func(key string) error {
			if _, err := k.TryAcquire(ctx, key); !errors.Is(err, redislease.ErrNotAcquired) {
				return fmt.Errorf("acquired a held key: %w", err)
			}
			return nil
		},
	}
	if err := client.Set(ctx, "held", "other", 0).Err(); err != nil {
		b.Fatal(err)
	}
	return []contender{lease, raw, hop("raw-hop"), hop("hop#2")}
}

// measure runs do on n goroutines, each times times, and returns the median time of one and how many a second.
func measure(b *testing.B, n, times int, do func(key string) error) (p50, perSecond float64) {
	took := make([][]time.Duration, n)
	var wg sync.WaitGroup
	begun := time.Now()
	for g := range n {
		wg.Go(func() {
			key := fmt.Sprint("bench:", g)
			for range times {
				t := time.Now()
				if err := do(key); err != nil {
					b.Error(err)
					return
				}
				took[g] = append(took[g], time.Since(t))
			}
		})
	}
	wg.Wait()
	all := slices.Concat(took...)
	slices.Sort(all)
	if len(all) == 0 {
		b.FailNow()
	}
	return float64(all[len(all)/2]), float64(len(all)) / time.Since(begun).Seconds()
}

// compare runs a round of all contenders in each iteration and reports medians, and their ratios to raw-hop.
func compare(b *testing.B, n, times int, do func(c contender) func(key string) error) {
	all := contenders(b)
	p50s, rates := map[string][]float64{}, map[string][]float64{}
	round := func(i int, keep bool) {
		for j := range all {
			c := all[(i+j)%len(all)]
			p50, rate := measure(b, n, times, do(c))
			if keep {
				p50s[c.name], rates[c.name] = append(p50s[c.name], p50), append(rates[c.name], rate)
			}
		}
	}
	round(0, false) // warms up
	b.ResetTimer()
	for i := range b.N {
		round(i, true)
	}
	b.ReportMetric(0, "ns/op") // a round is nothing of interest
	for _, c := range all {
		b.ReportMetric(median(p50s[c.name])/1e3, c.name+"-µs")
		b.ReportMetric(median(rates[c.name]), c.name+"/s")
	}
	for _, name := range []string{"raw", "raw-hop"} {
		b.ReportMetric(median(ratios(p50s["lease"], p50s[name])), "µs/"+name)
		b.ReportMetric(median(ratios(rates["lease"], rates[name])), "rate/"+name)
	}
	b.ReportMetric(median(ratios(p50s["hop#2"], p50s["raw-hop"])), "noise-µs")
	b.ReportMetric(spread(ratios(p50s["hop#2"], p50s["raw-hop"])), "spread-µs")
	b.ReportMetric(median(ratios(rates["hop#2"], rates["raw-hop"])), "noise-rate")
}

func ratios(a, b []float64) (r []float64) {
	for i := range a {
		r = append(r, a[i]/b[i])
	}
	return r
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// spread is the ratio that nine in ten rounds of raw-hop against itself stay below.
func spread(v []float64) float64 {
	for i := range v {
		v[i] = math.Max(v[i], 1/v[i])
	}
	v = slices.Sorted(slices.Values(v))
	return v[len(v)*9/10]
}

func BenchmarkCycle(b *testing.B) {
	for n, times := range map[int]int{1: 400, 16: 60, 128: 12} {
		b.Run(fmt.Sprint("concurrency=", n), func(b *testing.B) {
			compare(b, n, times, func(c contender) func(string) error { return c.cycle })
		})
	}
}

func BenchmarkTryAcquireOfAHeldKey(b *testing.B) {
	compare(b, 1, 400, func(c contender) func(string) error {
		return func(string) error { return c.try("held") }
	})
}

// BenchmarkAllocations counts what one cycle, and one refused try, allocate. Concurrency is 1.
func BenchmarkAllocations(b *testing.B) {
	for _, c := range contenders(b)[:3] {
		for what, do := range map[string]func() error{
			"cycle": func() error { return c.cycle("allocations") },
			"held":  func() error { return c.try("held") },
		} {
			b.Run(what+"/"+c.name, func(b *testing.B) {
				b.ReportAllocs()
				if err := do(); err != nil { // the first opens connections
					b.Fatal(err)
				}
				for b.Loop() {
					if err := do(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
	runtime.GC()
}

// BenchmarkFencing times TryAcquire alone, with and without a fence, beside a plain SET NX PX on the same client.
func BenchmarkFencing(b *testing.B) {
	client := connect(b, redistest.Start(b).Addr())
	ctx := context.Background()
	k := newLocker(b, client)
	type way struct {
		name    string
		acquire func() (release func() error, err error)
	}
	lease := func(opts ...redislease.Option) func() (func() error, error) {
		return func() (func() error, error) {
			l, err := k.TryAcquire(ctx, "orders", opts...)
			return l.Release, err
		}
	}
	ways := []way{{"lease", lease()}, {"fenced", lease(redislease.WithFencing())}, {"raw", func() (func() error, error) {
		err := client.SetArgs(ctx, "orders", uuid.NewString(), redis.SetArgs{Mode: "NX", TTL: 30 * time.Second}).Err()
		return client.Del(ctx, "orders").Err, err
	}}}
	p50s := map[string][]float64{}
	for i := range b.N + 1 {
		for j := range ways {
			w := ways[(i+j)%len(ways)]
			var took []time.Duration
			for range 400 {
				t := time.Now()
				release, err := w.acquire()
				took = append(took, time.Since(t))
				if err = errors.Join(err, release()); err != nil {
					b.Fatal(err)
				}
			}
			if slices.Sort(took); i > 0 { // the first round warms up
				p50s[w.name] = append(p50s[w.name], float64(took[len(took)/2]))
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, w := range ways {
		b.ReportMetric(median(p50s[w.name])/1e3, w.name+"-µs")
	}
	b.ReportMetric(median(ratios(p50s["fenced"], p50s["lease"])), "fenced/lease")
	b.ReportMetric(median(ratios(p50s["fenced"], p50s["raw"])), "fenced/raw")
	b.ReportMetric(median(ratios(p50s["lease"], p50s["raw"])), "lease/raw")
}
