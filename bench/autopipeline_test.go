package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// enough is how long a test waits for what has to happen.
const enough = 20 * time.Second

// eachPipeline runs a test on an AutoPipeline that sends a batch per round trip, on one that has two on their way at a
// time, in no order, and on one that sends and receives at the same time, which newer versions of go-redis have.
func eachPipeline(t *testing.T, test func(t *testing.T, options func() *redis.AutoPipelineOptions)) {
	t.Run("half duplex", func(t *testing.T) {
		t.Parallel()
		test(t, redis.DefaultBlockingAutoPipelineOptions)
	})
	t.Run("two batches", func(t *testing.T) {
		t.Parallel()
		test(t, twoBatches)
	})
	t.Run("full duplex", func(t *testing.T) {
		if _, ok := reflect.TypeFor[redis.AutoPipelineOptions]().FieldByName("FullDuplex"); !ok {
			t.Skip("this version of go-redis has none")
		}
		t.Parallel()
		test(t, func() *redis.AutoPipelineOptions {
			o := redis.DefaultBlockingAutoPipelineOptions()
			reflect.ValueOf(o).Elem().FieldByName("FullDuplex").SetBool(true)
			return o
		})
	})
}

func pipelined(t *testing.T, addr string, o *redis.AutoPipelineOptions, configure ...func(*redis.Options)) *redis.AutoPipeliner {
	options := &redis.Options{Addr: addr}
	for _, f := range configure {
		f(options)
	}
	rdb := redis.NewClient(options)
	t.Cleanup(func() { _ = rdb.Close() })
	pipeline, err := rdb.AutoPipelineWithOptions(o)
	require.NoError(t, err)
	return pipeline
}

func lockerOn(t *testing.T, c redislease.RedisClient, opts ...redislease.LockerOption) *redislease.Locker {
	locker, err := redislease.New(c, opts...)
	require.NoError(t, err)
	return locker
}

func TestALeaseOnAnAutoPipelineIsHeldRenewedAndReleased(t *testing.T) {
	t.Parallel()
	eachPipeline(t, func(t *testing.T, options func() *redis.AutoPipelineOptions) {
		server := redistest.Start(t)
		locker := lockerOn(t, pipelined(t, server.Addr(), options()), redislease.WithTTL(2*time.Second))
		ctx := context.Background()
		lease, err := locker.TryAcquire(ctx, "orders")
		require.NoError(t, err)
		require.Equal(t, lease.Token(), server.Get("orders"))
		_, err = locker.TryAcquire(ctx, "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.NoError(t, lease.Renew(ctx))
		until := lease.Until()
		require.Eventually(t, func() bool { return lease.Until().After(until) }, enough, time.Millisecond, "the watchdog renews it")
		require.NoError(t, lease.Err())
		require.NoError(t, lease.Release())
		require.Empty(t, server.Get("orders"))
	})
}

func TestAnAcquisitionOnAnAutoPipelineIsSettledAfterALostReply(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]faultproxy.Action{
		"the connection ends":     faultproxy.CloseAfter(),
		"the connection is reset": faultproxy.ResetAfter(),
		"the reply never comes":   faultproxy.DropReply(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachPipeline(t, func(t *testing.T, options func() *redis.AutoPipelineOptions) {
				server := redistest.Start(t)
				proxy := faultproxy.Start(t, server.Addr())
				// What is silent holds up all that is behind it, for as long as the client lets it.
				locker := lockerOn(t, pipelined(t, proxy.Addr(), options(), func(o *redis.Options) { o.ReadTimeout = time.Second }))
				t.Cleanup(proxy.Close) // before the client, whose Close would wait for the silent connection
				ctx := context.Background()
				warm, err := locker.TryAcquire(ctx, "warm")
				require.NoError(t, err)
				require.NoError(t, warm.Release())
				lost := proxy.On(faultproxy.Command("SET")).Times(1).Do(fault)
				lease, err := locker.TryAcquire(ctx, "orders")
				require.NoError(t, err)
				require.Equal(t, 1, lost.Hits())
				require.Equal(t, lease.Token(), server.Get("orders"))
				require.Equal(t, 1, proxy.Count(faultproxy.Command("SET").And(faultproxy.ArgContains("orders"))), "it is not repeated")
				require.NoError(t, lease.Release())
			})
		})
	}
}

func TestWaitersOnAnAutoPipelineAreWoken(t *testing.T) {
	t.Parallel()
	eachPipeline(t, func(t *testing.T, options func() *redis.AutoPipelineOptions) {
		server := redistest.Start(t)
		holder := lockerOn(t, pipelined(t, server.Addr(), options()))
		// A poll would come too late for the test.
		deaf := redislease.WithBackoff(func(int) time.Duration { return time.Hour })
		waiter := lockerOn(t, pipelined(t, server.Addr(), options()), deaf)
		ctx, cancel := context.WithTimeout(context.Background(), enough)
		defer cancel()
		for range 20 {
			held, err := holder.Acquire(ctx, "orders")
			require.NoError(t, err)
			acquired := make(chan error, 1)
			go func() {
				acquired <- waiter.Do(ctx, "orders", func(context.Context, *redislease.Lease) error { return nil })
			}()
			require.Eventually(t, func() bool {
				reply, err := server.Do("PUBSUB", "NUMSUB", "orders:released")
				require.NoError(t, err)
				return reply.([]any)[1] == int64(1)
			}, enough, time.Millisecond)
			require.NoError(t, held.Release())
			require.NoError(t, <-acquired)
		}
	})
}

// TestAWithdrawnCommandHarmsNobodyInTheSameFlush has acquisitions be cancelled while their commands stand in the queue of
// an AutoPipeline, and others count beside them.
func TestAWithdrawnCommandHarmsNobodyInTheSameFlush(t *testing.T) {
	t.Parallel()
	eachPipeline(t, func(t *testing.T, options func() *redis.AutoPipelineOptions) {
		const counters, each, cancelled = 16, 500, 4
		server := redistest.Start(t)
		pipeline := pipelined(t, server.Addr(), options())
		locker := lockerOn(t, pipeline)
		warm, err := locker.TryAcquire(context.Background(), "warm")
		require.NoError(t, err)
		require.NoError(t, warm.Release())
		refused := errorReplies(t, server)

		var counting, acquiring sync.WaitGroup
		var over atomic.Bool
		for i := range cancelled {
			acquiring.Go(func() {
				for !over.Load() {
					acquireForAMoment(t, locker, "orders:"+strconv.Itoa(i))
				}
			})
		}
		for range counters {
			counting.Go(func() {
				for range each {
					if err := pipeline.Incr(context.Background(), "count").Err(); err != nil {
						t.Errorf("INCR: %v", err)
						return
					}
				}
			})
		}
		counting.Wait()
		over.Store(true)
		acquiring.Wait()
		require.Equal(t, strconv.Itoa(counters*each), server.Get("count"))
		require.Greater(t, errorReplies(t, server), refused, "or no command was withdrawn in the queue")
		require.Eventually(t, func() bool {
			keys, err := server.Do("DBSIZE")
			require.NoError(t, err)
			return keys == int64(1)
		}, enough, time.Millisecond, "what was acquired for nobody is given back")
	})
}

// acquireForAMoment acquires the key, and gives up after a time in which the command may be anywhere.
func acquireForAMoment(t *testing.T, locker *redislease.Locker, key string) {
	ctx, cancel := context.WithCancel(context.Background())
	timer := time.AfterFunc(rand.N(300*time.Microsecond), cancel)
	defer timer.Stop()
	defer cancel()
	lease, err := locker.TryAcquire(ctx, key)
	switch {
	case err == nil:
		if err := lease.Release(); err != nil {
			t.Errorf("release: %v", err)
		}
	case !errors.Is(err, context.Canceled) && !errors.Is(err, redislease.ErrNotAcquired) && !errors.Is(err, redislease.ErrOutcomeUnknown):
		t.Errorf("acquire: %v", err)
	}
}

// errorReplies is how often the server has replied with ERR, as it does to a command that was withdrawn.
func errorReplies(t *testing.T, server *redistest.Server) int {
	info, err := server.Do("INFO", "errorstats")
	require.NoError(t, err)
	for line := range strings.Lines(info.(string)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "errorstat_ERR:count="); ok {
			n, err := strconv.Atoi(count)
			require.NoError(t, err)
			return n
		}
	}
	return 0
}
