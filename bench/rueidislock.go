package main

import (
	"context"
	"errors"
	"time"

	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

type rueidisClient struct{ locker rueidislock.Locker }

func openRueidislock(tuned bool) func(settings) (client, error) {
	return func(s settings) (client, error) {
		o := rueidislock.LockerOption{KeyMajority: 1, KeyValidity: s.ttl,
			ClientOption: rueidis.ClientOption{InitAddress: []string{s.addr}}}
		if tuned {
			o.NoLoopTracking, o.TryNextAfter, o.ExtendInterval = true, time.Second, s.renewEvery
		}
		locker, err := rueidislock.NewLocker(o)
		if err != nil {
			return nil, err
		}
		return &rueidisClient{locker}, nil
	}
}

func (c *rueidisClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	lease, release, err := c.locker.TryWithContext(ctx, key)
	if errors.Is(err, rueidislock.ErrNotLocked) {
		return nil, errHeld
	}
	if err != nil {
		return nil, err
	}
	return rueidisHandle{lease, release}, nil
}

// acquire cuts the lease off from ctx once it is held: rueidislock ends it with the context of its acquisition.
func (c *rueidisClient) acquire(ctx context.Context, key string) (handle, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	lease, release, err := c.locker.WithContext(own, key)
	if !stop() && err == nil {
		release()
		err = ctx.Err()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return rueidisHandle{lease, func() { release(); cancel() }}, nil
}

func (c *rueidisClient) close() error {
	c.locker.Close()
	return nil
}

type rueidisHandle struct {
	lease context.Context
	stop  context.CancelFunc
}

func (h rueidisHandle) valid() bool { return h.lease.Err() == nil }

func (h rueidisHandle) release(context.Context) error {
	h.stop()
	return nil
}
