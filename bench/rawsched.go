package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// raw-sched renews all leases of a process on one goroutine, by pipelines. It has no context, no margin, and no word for
// a lease that is lost.

const (
	schedTick  = 5 * time.Millisecond
	schedBatch = 500
)

type schedClient struct {
	*rawClient
	stop chan struct{}

	mu    sync.Mutex
	queue []*schedHandle // by due time, since all have the same interval
}

type schedHandle struct {
	*rawHandle
	due  time.Time
	done atomic.Bool // it is released
	lost atomic.Bool
}

func openSched(s settings) (client, error) {
	raw, err := newRaw(s, direct)
	if err != nil {
		return nil, err
	}
	c := &schedClient{rawClient: raw, stop: make(chan struct{})}
	go c.run()
	return c, nil
}

func (c *schedClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	raw, err := c.set(ctx, key)
	if err != nil {
		return nil, err
	}
	h := &schedHandle{rawHandle: raw, due: time.Now().Add(c.renewEvery)}
	c.push(h)
	return h, nil
}

func (c *schedClient) push(handles ...*schedHandle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, handles...)
}

func (c *schedClient) run() {
	ticker := time.NewTicker(schedTick)
	defer ticker.Stop()
	for {
		select {
		case <-c.stop:
			return
		case <-ticker.C:
		}
		for due := c.pop(); len(due) > 0; due = c.pop() {
			c.renewAll(due)
			c.push(due...)
		}
	}
}

// pop takes the next batch of leases that are due.
func (c *schedClient) pop() (due []*schedHandle) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) > 0 && len(due) < schedBatch && !c.queue[0].due.After(now) {
		h := c.queue[0]
		c.queue = c.queue[1:]
		if !h.done.Load() {
			due = append(due, h)
		}
	}
	return due
}

func (c *schedClient) renewAll(due []*schedHandle) {
	ctx := context.Background()
	pipeline := c.rdb.Pipeline()
	for _, h := range due {
		pipeline.EvalSha(ctx, c.extend, []string{h.key}, h.token, c.ttl.Milliseconds())
	}
	answers, _ := pipeline.Exec(ctx) // the answers have the error
	for i, h := range due {
		h.due = h.due.Add(c.renewEvery)
		if i >= len(answers) || wasOne(answers[i].(*redis.Cmd)) != nil {
			h.lost.Store(true)
		}
	}
}

func (c *schedClient) close() error {
	close(c.stop)
	return c.rawClient.close()
}

func (h *schedHandle) release(ctx context.Context) error {
	h.done.Store(true)
	return h.rawHandle.release(ctx)
}

func (h *schedHandle) valid() bool { return !h.lost.Load() }
