package main

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// The raw family is what one would write by hand on go-redis for just the scenario at hand: the limit that a library on
// go-redis can come near and not pass.

const (
	deleteLua = `if redis.call('GET',KEYS[1])==ARGV[1] then return redis.call('DEL',KEYS[1]) end return 0`
	extendLua = `if redis.call('GET',KEYS[1])==ARGV[1] then return redis.call('PEXPIRE',KEYS[1],ARGV[2]) end return 0`
)

// processor executes commands.
type processor interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

func direct(rdb *redis.Client) (processor, error)        { return rdb, nil }
func hopping(rdb *redis.Client) (processor, error)       { return hopper{rdb}, nil }
func autoPipelined(rdb *redis.Client) (processor, error) { return rdb.AutoPipeline() }
func inTwoBatches(rdb *redis.Client) (processor, error) {
	return rdb.AutoPipelineWithOptions(twoBatches())
}

// twoBatches are the options of an AutoPipeline that has two batches on their way at a time. The order that it gives up
// is of no use to a lease, which relies on none among commands in flight.
func twoBatches() *redis.AutoPipelineOptions {
	return &redis.AutoPipelineOptions{MaxBatchSize: 64, MaxConcurrentBatches: 2, Unordered: true}
}

// hopper executes each command on a goroutine of its own.
type hopper struct{ processor }

func (h hopper) Process(ctx context.Context, cmd redis.Cmder) error {
	done := make(chan error, 1)
	go func() { done <- h.processor.Process(ctx, cmd) }()
	return <-done
}

type rawClient struct {
	settings
	rdb            *redis.Client
	commands       processor
	tokens         *tokens
	delete, extend string
}

func openRaw(through func(*redis.Client) (processor, error)) func(settings) (client, error) {
	return func(s settings) (client, error) { return newRaw(s, through) }
}

func newRaw(s settings, through func(*redis.Client) (processor, error)) (*rawClient, error) {
	rdb := connect(s)
	hashes, err := load(rdb, deleteLua, extendLua)
	if err != nil {
		return nil, err
	}
	commands, err := through(rdb)
	if err != nil {
		return nil, err
	}
	return &rawClient{settings: s, rdb: rdb, commands: commands, tokens: newTokens(), delete: hashes[0], extend: hashes[1]}, nil
}

func (c *rawClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	h, err := c.set(ctx, key)
	if err != nil {
		return nil, err
	}
	return h, nil
}

// set is tryAcquire for those that are built on it.
func (c *rawClient) set(ctx context.Context, key string) (*rawHandle, error) {
	h := &rawHandle{client: c, key: key, token: c.tokens.next()}
	cmd := redis.NewBoolCmd(ctx, "set", key, h.token, "nx", "px", c.ttl.Milliseconds())
	if err := c.commands.Process(ctx, cmd); err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}
	if !cmd.Val() {
		return nil, errHeld
	}
	return h, nil
}

func (c *rawClient) acquire(context.Context, string) (handle, error) {
	return nil, errors.ErrUnsupported
}

func (c *rawClient) close() error { return c.rdb.Close() }

type rawHandle struct {
	client     *rawClient
	key, token string
}

func (h *rawHandle) release(ctx context.Context) error {
	cmd := redis.NewCmd(ctx, "evalsha", h.client.delete, 1, h.key, h.token)
	_ = h.client.commands.Process(ctx, cmd)
	return wasOne(cmd)
}
