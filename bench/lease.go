package main

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
)

type leaseClient struct {
	rdb    *redis.Client
	locker *redislease.Locker
}

func openLease(through func(*redis.Client) (processor, error)) func(settings) (client, error) {
	return func(s settings) (client, error) {
		rdb := connect(s)
		commands, err := through(rdb)
		if err != nil {
			return nil, err
		}
		locker, err := redislease.New(commands, redislease.WithTTL(s.ttl), redislease.WithRenewInterval(s.renewEvery))
		if err != nil {
			return nil, err
		}
		return &leaseClient{rdb, locker}, nil
	}
}

func (c *leaseClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	lease, err := c.locker.TryAcquire(ctx, key)
	if errors.Is(err, redislease.ErrNotAcquired) {
		return nil, errHeld
	}
	if err != nil {
		return nil, err
	}
	return leaseHandle{lease}, nil
}

func (c *leaseClient) acquire(ctx context.Context, key string) (handle, error) {
	lease, err := c.locker.Acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	return leaseHandle{lease}, nil
}

func (c *leaseClient) close() error { return c.rdb.Close() }

type leaseHandle struct{ lease *redislease.Lease }

func (h leaseHandle) release(context.Context) error { return h.lease.Release() }
func (h leaseHandle) valid() bool                   { return h.lease.Err() == nil }
