package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

type redsyncClient struct {
	rdb     *redis.Client
	mutexes *redsync.Redsync
	options []redsync.Option
}

func openRedsync(options ...redsync.Option) func(settings) (client, error) {
	return func(s settings) (client, error) {
		rdb := connect(s)
		all := append([]redsync.Option{redsync.WithExpiry(s.ttl)}, options...)
		return &redsyncClient{rdb, redsync.New(goredis.NewPool(rdb)), all}, nil
	}
}

func fastTries() []redsync.Option {
	return []redsync.Option{redsync.WithFailFast(true), redsync.WithTries(math.MaxInt32),
		redsync.WithRetryDelayFunc(func(int) time.Duration { return tunedPoll/2 + rand.N(tunedPoll) })}
}

func (c *redsyncClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	mutex := c.mutexes.NewMutex(key, c.options...)
	err := mutex.TryLockContext(ctx)
	var taken *redsync.ErrTaken
	var takenAtNode *redsync.ErrNodeTaken
	switch {
	case err == nil:
		return redsyncHandle{mutex}, nil
	case errors.As(err, &taken), errors.As(err, &takenAtNode), errors.Is(err, redsync.ErrFailed):
		return nil, errHeld
	}
	return nil, err
}

// acquire goes on when redsync has used up its tries.
func (c *redsyncClient) acquire(ctx context.Context, key string) (handle, error) {
	mutex := c.mutexes.NewMutex(key, c.options...)
	for {
		if err := mutex.LockContext(ctx); err == nil {
			return redsyncHandle{mutex}, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func (c *redsyncClient) close() error { return c.rdb.Close() }

type redsyncHandle struct{ mutex *redsync.Mutex }

func (h redsyncHandle) release(ctx context.Context) error {
	return confirmed(h.mutex.UnlockContext(ctx))
}

func (h redsyncHandle) renew(ctx context.Context) error {
	return confirmed(h.mutex.ExtendContext(ctx))
}

func (h redsyncHandle) valid() bool { return time.Now().Before(h.mutex.Until()) }

func confirmed(ok bool, err error) error {
	if err == nil && !ok {
		return errLost
	}
	return err
}
