package main

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

// raw-grant keeps the line of waiters in Redis, and the release hands the key to the first of them in the same script.
// Nothing is faster; but a waiter that has died is handed the key, too, and nobody has it for a TTL.

const (
	// enqueueLua takes the key, or the last place in the line. KEYS: the key, the line. ARGV: the token, the TTL in ms.
	enqueueLua = `if redis.call('SET',KEYS[1],ARGV[1],'NX','PX',ARGV[2]) then return 1 end
redis.call('RPUSH',KEYS[2],ARGV[1])
return 0`

	// grantLua gives the key to the first in line and tells its process, whose name its token begins with.
	grantLua = `if redis.call('GET',KEYS[1])~=ARGV[1] then return 0 end
local next=redis.call('LPOP',KEYS[2])
if not next then redis.call('DEL',KEYS[1]) return 1 end
redis.call('SET',KEYS[1],next,'PX',ARGV[2])
redis.call('PUBLISH',string.sub(next,1,ARGV[3]),next)
return 1`

	leaveLua = `return redis.call('LREM',KEYS[1],1,ARGV[1])`
)

type grantClient struct {
	*rawClient
	enqueue, grant, leave string
	subscription          *redis.PubSub
	stopListening         context.CancelFunc

	mu      sync.Mutex
	waiting map[string]chan struct{} // by token; closed when it has the key
}

func openGrant(s settings) (client, error) {
	raw, err := newRaw(s, direct)
	if err != nil {
		return nil, err
	}
	hashes, err := load(raw.rdb, enqueueLua, grantLua, leaveLua)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &grantClient{rawClient: raw, enqueue: hashes[0], grant: hashes[1], leave: hashes[2], stopListening: cancel,
		waiting: map[string]chan struct{}{}}
	c.subscription = c.rdb.Subscribe(ctx, c.tokens.process)
	if _, err := c.subscription.Receive(ctx); err != nil {
		return nil, err
	}
	go c.listen(ctx)
	return c, nil
}

func (c *grantClient) listen(ctx context.Context) {
	for {
		m, err := c.subscription.ReceiveMessage(ctx)
		if err != nil {
			return
		}
		if granted := c.forget(m.Payload); granted != nil {
			close(granted)
		}
	}
}

// forget returns who waits with the token, and lets go of it.
func (c *grantClient) forget(token string) chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	granted := c.waiting[token]
	delete(c.waiting, token)
	return granted
}

func (c *grantClient) tryAcquire(ctx context.Context, key string) (handle, error) {
	h, err := c.set(ctx, key)
	if err != nil {
		return nil, err
	}
	return &grantHandle{c, key, h.token}, nil
}

func (c *grantClient) acquire(ctx context.Context, key string) (handle, error) {
	h := &grantHandle{c, key, c.tokens.next()}
	granted := make(chan struct{})
	c.mu.Lock()
	c.waiting[h.token] = granted
	c.mu.Unlock()
	defer c.forget(h.token)
	taken, err := c.rdb.EvalSha(ctx, c.enqueue, h.keys(), h.token, c.ttl.Milliseconds()).Int64()
	if err != nil {
		return nil, err
	}
	if taken == 1 {
		return h, nil
	}
	select {
	case <-granted:
		return h, nil
	case <-ctx.Done():
		h.giveUp()
		return nil, ctx.Err()
	}
}

func (c *grantClient) close() error {
	c.stopListening()
	_ = c.subscription.Close()
	return c.rawClient.close()
}

type grantHandle struct {
	client     *grantClient
	key, token string
}

func (h *grantHandle) keys() []string { return []string{h.key, h.key + ":line"} }

func (h *grantHandle) release(ctx context.Context) error {
	return wasOne(h.client.rdb.EvalSha(ctx, h.client.grant, h.keys(), h.token, h.client.ttl.Milliseconds(), processLength))
}

// giveUp leaves the line, and passes the key on if it has been granted just now.
func (h *grantHandle) giveUp() {
	ctx := context.Background()
	if n, err := h.client.rdb.EvalSha(ctx, h.client.leave, h.keys()[1:], h.token).Int64(); err == nil && n == 0 {
		_ = h.release(ctx)
	}
}
