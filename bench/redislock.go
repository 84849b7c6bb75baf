package main

import (
	"context"
	"errors"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"
)

// tunedPoll is how often peers that poll ask if they are to hand over quickly. At 1 ms 512 waiters keep Redis busy with
// nothing else; at 20 ms 8 waiters hand over no faster than by default.
const tunedPoll = 5 * time.Millisecond

type redislockClient struct {
	settings
	rdb    *redis.Client
	locker *redislock.Client
	retry  redislock.Options
}

func openRedislock(poll time.Duration) func(settings) (client, error) {
	return func(s settings) (client, error) {
		rdb := connect(s)
		return &redislockClient{s, rdb, redislock.New(rdb), redislock.Options{RetryStrategy: redislock.LinearBackoff(poll)}}, nil
	}
}

func (c *redislockClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	return c.obtain(ctx, key, nil)
}

// acquire goes on when redislock gives up, which it does after a TTL if there is no deadline.
func (c *redislockClient) acquire(ctx context.Context, key string) (handle, error) {
	for {
		h, err := c.obtain(ctx, key, &c.retry)
		if ctx.Err() != nil || !errors.Is(err, errHeld) {
			return h, err
		}
	}
}

func (c *redislockClient) obtain(ctx context.Context, key string, o *redislock.Options) (handle, error) {
	lock, err := c.locker.Obtain(ctx, key, c.ttl, o)
	if errors.Is(err, redislock.ErrNotObtained) {
		return nil, errHeld
	}
	if err != nil {
		return nil, err
	}
	return redislockHandle{lock, c.ttl}, nil
}

func (c *redislockClient) close() error { return c.rdb.Close() }

type redislockHandle struct {
	lock *redislock.Lock
	ttl  time.Duration
}

func (h redislockHandle) release(ctx context.Context) error { return h.lock.Release(ctx) }
func (h redislockHandle) renew(ctx context.Context) error   { return h.lock.Refresh(ctx, h.ttl, nil) }
