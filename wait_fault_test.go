package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

const (
	waitSeeds   = 300
	waitAtATime = 100
	waitTTL     = 3 * time.Second
	waitMost    = 20 * time.Second // ten polls, and every handoff may cost a TTL
)

// What may happen while waiters subscribe, try, wait, and let the key go.
var (
	waitSteps = map[string]faultproxy.Matcher{
		"the first try":         faultproxy.Command("SET"),
		"a try":                 scripted("settle"),
		"a release":             scripted("release"),
		"the subscription":      faultproxy.Command("SUBSCRIBE"),
		"the end of it":         faultproxy.Command("UNSUBSCRIBE"),
		"the handshake":         faultproxy.Command("HELLO"),
		"whatever is sent next": faultproxy.Any(),
	}
	waitFaults = map[string]func(rng *rand.Rand) faultproxy.Action{
		"is lost":                     func(*rand.Rand) faultproxy.Action { return faultproxy.DropRequest() },
		"is answered, and that lost":  func(*rand.Rand) faultproxy.Action { return faultproxy.DropReply() },
		"meets a closed connection":   func(*rand.Rand) faultproxy.Action { return faultproxy.CloseBefore() },
		"is reset":                    func(*rand.Rand) faultproxy.Action { return faultproxy.ResetBefore() },
		"is executed, then closed":    func(*rand.Rand) faultproxy.Action { return faultproxy.CloseAfter() },
		"is executed, then reset":     func(*rand.Rand) faultproxy.Action { return faultproxy.ResetAfter() },
		"is late":                     func(rng *rand.Rand) faultproxy.Action { return faultproxy.DelayRequest(upTo(rng, time.Second)) },
		"is answered late":            func(rng *rand.Rand) faultproxy.Action { return faultproxy.DelayReply(upTo(rng, time.Second)) },
		"is refused by a full server": func(*rand.Rand) faultproxy.Action { return faultproxy.AnswerError("LOADING Redis is loading") },
	}
	waitEvents = map[string]func(f *faulty, rng *rand.Rand, key string){
		"nothing":                      func(*faulty, *rand.Rand, string) {},
		"all connections are reset":    func(f *faulty, _ *rand.Rand, _ string) { f.proxy.ResetConns() },
		"all connections are closed":   func(f *faulty, _ *rand.Rand, _ string) { f.proxy.CloseConns() },
		"all connections fall silent":  func(f *faulty, _ *rand.Rand, _ string) { f.proxy.Silence() },
		"the network is a black hole":  blackHole,
		"everything is delivered late": deliverLate,
		"the server kills subscribers": func(f *faulty, _ *rand.Rand, _ string) {
			f.operator.ClientKillByFilter(context.Background(), "TYPE", "pubsub")
		},
		"signals come without a release": signalsInVain,
		"the key goes to somebody else": func(f *faulty, _ *rand.Rand, key string) {
			f.operator.Set(context.Background(), key, "another's", waitTTL)
		},
		"the key is deleted by somebody": func(f *faulty, _ *rand.Rand, key string) { f.operator.Del(context.Background(), key) },
	}
)

func scripted(what string) faultproxy.Matcher {
	return func(r faultproxy.Request) bool { return r.Name() == "EVAL" && scriptName(r.Args[1]) == what }
}

func upTo(rng *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(most)))
}

func deliverLate(f *faulty, rng *rand.Rand, _ string) {
	by := upTo(rng, 300*time.Millisecond)
	f.proxy.DelayReplies(func() time.Duration { return by })
}

func blackHole(f *faulty, rng *rand.Rand, _ string) {
	f.proxy.BlackHole()
	time.Sleep(upTo(rng, 500*time.Millisecond))
	f.proxy.SetRequests(faultproxy.Pass)
	f.proxy.SetReplies(faultproxy.Pass)
}

func signalsInVain(f *faulty, rng *rand.Rand, key string) {
	for range 1 + rng.IntN(5) {
		f.operator.Publish(context.Background(), key+":released", "")
	}
}

// draw returns one of several, in an order that does not change.
func draw[V any](rng *rand.Rand, from map[string]V) (name string, v V) {
	names := slices.Sorted(maps.Keys(from))
	name = names[rng.IntN(len(names))]
	return name, from[name]
}

func TestWaitersAreServedWhateverHappensToTheirConnections(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	w := newWorld(t, server.Addr())
	seeds := make(chan uint64)
	var wg sync.WaitGroup
	for range waitAtATime {
		wg.Go(func() {
			for seed := range seeds {
				waitThrough(t, w, seed)
			}
		})
	}
	for seed := range uint64(waitSeeds) {
		seeds <- seed
	}
	close(seeds)
	wg.Wait()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		channels := w.operator.PubSubChannels(context.Background(), "*").Val()
		keys := w.operator.Keys(context.Background(), "*").Val()
		if len(channels)+len(keys) == 0 {
			return
		}
		require.True(t, time.Now().Before(deadline), "left behind: %v %v", channels, keys)
	}
}

// waitThrough has waiters of one Locker take a key one after the other while something happens that follows from the seed.
func waitThrough(t *testing.T, w *world, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	f := &faulty{world: w, proxy: faultproxy.Start(t, w.addr)}
	client := redis.NewClient(&redis.Options{Addr: f.proxy.Addr(), ReadTimeout: 500 * time.Millisecond})
	defer client.Close()
	var underWay atomic.Int64
	client.AddHook(hook(func(next redis.ProcessHook) redis.ProcessHook {
		return func(ctx context.Context, cmd redis.Cmder) error {
			underWay.Add(1)
			defer underWay.Add(-1)
			return next(ctx, cmd)
		}
	}))
	defer func() { // when it closes go-redis 9.19 reads from connections that a command reads from, too
		assert.Eventually(t, func() bool { return underWay.Load() == 0 }, patience, time.Millisecond, "a command does not end")
	}()
	defer f.proxy.Close() // first, so that they end
	step, matcher := draw(rng, waitSteps)
	fault, action := draw(rng, waitFaults)
	event, happen := draw(rng, waitEvents)
	what := fmt.Sprintf("seed %d: %s %s, and %s", seed, step, fault, event)

	key := fmt.Sprint("orders:", seed)
	held := acquire(t, newLocker(t, w.operator), key, redislease.WithTTL(waitTTL))
	k := newLocker(t, client, redislease.WithTTL(waitTTL), redislease.WithAcquireTimeout(waitMost))
	f.proxy.On(matcher).Skip(rng.IntN(4)).Times(1 + rng.IntN(2)).Do(action(rng))
	var inside, served atomic.Int32
	var waiters sync.WaitGroup
	const n = 3
	for range n {
		waiters.Go(func() {
			err := k.Do(context.Background(), key, func(_ context.Context, l *redislease.Lease) error {
				served.Add(1)
				others := inside.Add(1)
				defer inside.Add(-1)
				value := w.get(key)
				if l.Err() == nil {
					require.Equal(t, l.Token(), value, what)
					require.EqualValues(t, 1, others, what)
				}
				return nil
			})
			if !errors.Is(err, redislease.ErrOutcomeUnknown) && !errors.Is(err, redislease.ErrLost) {
				require.NoError(t, err, what)
			}
		})
		time.Sleep(upTo(rng, 20*time.Millisecond))
	}
	time.Sleep(upTo(rng, 100*time.Millisecond))
	happen(f, rng, key)
	time.Sleep(upTo(rng, 100*time.Millisecond))
	if err := held.Release(); !errors.Is(err, redislease.ErrLost) {
		require.NoError(t, err, what)
	}
	waiters.Wait()
	require.EqualValues(t, n, served.Load(), what)
}
