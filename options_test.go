package redislease_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

func TestBadOptionsNameTheValueAndTheLimitAndSendNothing(t *testing.T) {
	sent := 0
	client := clientFunc(func(context.Context, redis.Cmder) error { sent++; return errors.New("sent") })
	k := newLocker(t, client)
	for _, test := range []struct {
		opts []redislease.Option
		want []string
	}{
		{[]redislease.Option{redislease.WithTTL(30)}, []string{"TTL 30ns", "100ms"}},
		{[]redislease.Option{redislease.WithTTL(0)}, []string{"TTL 0s", "100ms"}},
		{[]redislease.Option{redislease.WithTTL(-time.Second)}, []string{"TTL -1s", "100ms"}},
		{[]redislease.Option{redislease.WithTTL(99999 * time.Microsecond)}, []string{"TTL 99.999ms", "100ms"}},
		{[]redislease.Option{redislease.WithMargin(0)}, []string{"margin 0s", "1ms"}},
		{[]redislease.Option{redislease.WithMargin(-time.Second)}, []string{"margin -1s", "1ms"}},
		{[]redislease.Option{redislease.WithMargin(30 * time.Second)}, []string{"margin 30s", "TTL 30s (default)"}},
		{[]redislease.Option{redislease.WithTTL(time.Second), redislease.WithMargin(2 * time.Second)}, []string{"margin 2s", "TTL 1s"}},
		{[]redislease.Option{redislease.WithRenewInterval(-1)}, []string{"renew interval -1ns", "1ms"}},
		{[]redislease.Option{redislease.WithRenewInterval(1)}, []string{"renew interval 1ns", "1ms"}},
		{[]redislease.Option{redislease.WithRenewInterval(30 * time.Second)}, []string{"renew interval 30s", "13.5s", "TTL 30s (default)", "margin 3s (default)"}},
		{[]redislease.Option{redislease.WithTTL(9 * time.Second), redislease.WithRenewInterval(5 * time.Second)}, []string{"renew interval 5s", "4.05s", "TTL 9s", "margin 900ms (default)"}},
		{[]redislease.Option{redislease.WithTTL(9 * time.Second), redislease.WithMargin(6 * time.Second)}, []string{"renew interval 3s (default)", "1.5s", "TTL 9s", "margin 6s"}},
		{[]redislease.Option{redislease.WithMaxHold(0)}, []string{"longest hold 0s", "above 0"}},
		{[]redislease.Option{redislease.WithMaxHold(-1)}, []string{"longest hold -1ns", "above 0"}},
		{[]redislease.Option{redislease.WithMaxRenewals(-1)}, []string{"most renewals -1", "0"}},
		{[]redislease.Option{redislease.WithAcquireTimeout(0)}, []string{"acquire timeout 0s", "above 0"}},
		{[]redislease.Option{redislease.WithAcquireTimeout(-time.Second)}, []string{"acquire timeout -1s", "above 0"}},
		{[]redislease.Option{redislease.WithBackoff(nil)}, []string{"WithBackoff"}},
		{[]redislease.Option{redislease.WithTTL(time.Second), nil}, []string{"option 2 of 2 is nil"}},
	} {
		_, err := k.TryAcquire(context.Background(), "orders", test.opts...)
		require.Error(t, err)
		for _, want := range append(test.want, `"orders"`) {
			require.ErrorContains(t, err, want)
		}
		var all []redislease.LockerOption
		for _, o := range test.opts {
			all = append(all, o)
		}
		if test.opts[len(test.opts)-1] == nil {
			all[len(all)-1] = nil
		}
		_, err = redislease.New(client, all...)
		require.Error(t, err)
		for _, want := range test.want {
			require.ErrorContains(t, err, want)
		}
	}
	_, err := redislease.New(client, redislease.WithObserver(nil))
	require.ErrorContains(t, err, "WithObserver")
	require.Zero(t, sent)
}

func TestGoodOptionsAtTheirLimits(t *testing.T) {
	client := clientFunc(func(context.Context, redis.Cmder) error { return nil })
	for _, opts := range [][]redislease.LockerOption{
		{redislease.WithTTL(100 * time.Millisecond)},
		{redislease.WithMargin(time.Millisecond)},
		{redislease.WithTTL(10 * time.Second), redislease.WithMargin(4 * time.Second), redislease.WithRenewInterval(3 * time.Second)},
		{redislease.WithRenewInterval(time.Millisecond)},
		{redislease.WithRenewInterval(time.Hour), redislease.WithRenewInterval(0)}, // the default
		{redislease.WithMaxHold(1)},
		{redislease.WithMaxHold(redislease.NoMaxHold), redislease.WithMaxRenewals(0), redislease.WithAcquireTimeout(1), redislease.WithPrefix("")},
	} {
		_, err := redislease.New(client, opts...)
		require.NoError(t, err)
	}
}

func TestBadArgumentsSendNothing(t *testing.T) {
	sent := 0
	var r record
	k := newLocker(t, clientFunc(func(context.Context, redis.Cmder) error { sent++; return nil }), redislease.WithObserver(r.observe))
	_, err := k.TryAcquire(context.Background(), "")
	require.ErrorContains(t, err, "key is empty")
	//lint:ignore SA1012 it is what a caller should not do
	_, err = k.Acquire(nil, "orders")
	require.ErrorContains(t, err, "context is nil")
	require.ErrorContains(t, k.Do(context.Background(), "orders", nil), "function is nil")
	require.ErrorContains(t, k.TryDo(context.Background(), "orders", nil), "function is nil")
	require.Zero(t, sent)
	require.Empty(t, r.all(), "nothing began")
}

func TestARenewalWithoutAContextSendsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		//lint:ignore SA1012 it is what a caller should not do
		require.ErrorContains(t, l.Renew(nil), `renew "orders": the context is nil`)
		require.NoError(t, l.Err(), "it is as it was")
		require.Empty(t, b.sent("renew", 0))
		require.NoError(t, l.Release())
	})
}

func TestClientsOnWhichALeaseIsUnsafeAreRefused(t *testing.T) {
	client := connect(t, "127.0.0.1:1")
	conn := client.Conn()
	defer func() { _ = conn.Close() }()
	ring := redis.NewRing(&redis.RingOptions{})
	defer func() { _ = ring.Close() }()
	sentinel := redis.NewSentinelClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer func() { _ = sentinel.Close() }()
	var none *redis.Client
	var cluster *redis.ClusterClient
	for want, c := range map[string]redislease.RedisClient{
		"*redis.Ring":           ring,
		"*redis.Pipeline":       client.Pipeline(),
		"*redis.Conn":           conn,
		"*redis.Tx":             new(redis.Tx),
		"*redis.SentinelClient": sentinel,
	} {
		_, err := redislease.New(c)
		require.ErrorContains(t, err, want)
	}
	for _, c := range []redislease.RedisClient{nil, none, cluster} {
		_, err := redislease.New(c)
		require.ErrorContains(t, err, "nil")
	}
	clusterClient := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer func() { _ = clusterClient.Close() }()
	for _, c := range []redislease.RedisClient{client, clusterClient, redis.UniversalClient(client)} {
		_, err := redislease.New(c)
		require.NoError(t, err)
	}
}

func TestC16ARandomSourceThatFailsSendsNothing(t *testing.T) {
	sent := 0
	k := newLocker(t, clientFunc(func(context.Context, redis.Cmder) error { sent++; return nil }))
	broken := errors.New("no entropy")
	uuid.SetRand(failingReader{broken})
	defer uuid.SetRand(nil)
	_, err := k.TryAcquire(context.Background(), "orders")
	require.ErrorIs(t, err, broken)
	require.Zero(t, sent)

	bubble(t, func(t *testing.T, b *bubbled) {
		uuid.SetRand(nil)
		k := b.locker()
		uuid.SetRand(failingReader{broken})
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, broken)
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
		_, err = k.Acquire(context.Background(), "orders")
		require.ErrorIs(t, err, broken, "three failures in a row")
		require.Empty(t, b.sent("set", 0))
	})
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }
