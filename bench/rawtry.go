package main

import (
	"container/list"
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// raw-try is the leanest form of what redislease does: a line per process and key, whose head tries when a release is
// published, and once a second. It has no watchdog, no context, no word for a lost answer.

const (
	// settleLua is what a try has to be if the one before it may have been executed unseen: it recognises earlier
	// tokens. It also tells for how long the key will live.
	settleLua = `if ARGV[#ARGV]=='0' then return redis.error_reply('ERR withdrawn') end
local held=redis.pcall('GET',KEYS[1])
if held then
for i=1,#ARGV-1 do if held==ARGV[i] then return {1,i} end end
return {0,redis.pcall('PTTL',KEYS[1])}
end
redis.call('SET',KEYS[1],ARGV[#ARGV-1],'PX',ARGV[#ARGV])
return {1,0}`

	deleteAndTellLua = `if redis.call('GET',KEYS[1])~=ARGV[1] then return 0 end
redis.call('DEL',KEYS[1])
redis.call('PUBLISH',KEYS[1],'')
return 1`

	tryAgainAfter = time.Second
)

type tryClient struct {
	*rawClient
	settle        string
	subscription  *redis.PubSub
	stopListening context.CancelFunc

	mu    sync.Mutex
	lines map[string]*tryLine // by key
}

// tryLine is the waiters for one key.
type tryLine struct {
	waiters  list.List     // of chan struct{}, closed when its waiter becomes the head
	released chan struct{} // filled when a release is heard of
}

func openTry(s settings) (client, error) {
	raw, err := newRaw(s, direct)
	if err != nil {
		return nil, err
	}
	hashes, err := load(raw.rdb, settleLua, deleteAndTellLua)
	if err != nil {
		return nil, err
	}
	raw.delete = hashes[1]
	ctx, cancel := context.WithCancel(context.Background())
	c := &tryClient{rawClient: raw, settle: hashes[0], stopListening: cancel, lines: map[string]*tryLine{}}
	c.subscription = c.rdb.Subscribe(ctx, "raw-try:none") // opens the connection
	if _, err := c.subscription.Receive(ctx); err != nil {
		return nil, err
	}
	go c.listen(ctx)
	return c, nil
}

func (c *tryClient) listen(ctx context.Context) {
	for {
		heard, err := c.subscription.Receive(ctx)
		if err != nil {
			return
		}
		switch m := heard.(type) {
		case *redis.Message:
			c.hear(m.Channel)
		case *redis.Subscription: // what was published before was not heard
			c.hear(m.Channel)
		}
	}
}

func (c *tryClient) hear(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.lines[key]; l != nil {
		select {
		case l.released <- struct{}{}:
		default:
		}
	}
}

func (c *tryClient) acquire(ctx context.Context, key string) (handle, error) {
	line, place, head, err := c.join(ctx, key)
	if err != nil {
		return nil, err
	}
	defer c.leave(line, place)
	if !head { // whoever was before has the key now, and its release will be heard of
		select {
		case <-place.Value.(chan struct{}):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	timer := time.NewTimer(tryAgainAfter)
	defer timer.Stop()
	for tries := 0; ; {
		if head {
			h, err := c.try(ctx, key, tries)
			if err != errHeld {
				return h, err
			}
			tries++
		}
		head = true
		timer.Reset(tryAgainAfter)
		select {
		case <-line.released:
		case <-timer.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// join takes the last place in the line for a key. head: it is the first.
func (c *tryClient) join(ctx context.Context, key string) (line *tryLine, place *list.Element, head bool, err error) {
	c.mu.Lock()
	line = c.lines[key]
	unheard := line == nil
	if unheard {
		line = &tryLine{released: make(chan struct{}, 1)}
		c.lines[key] = line
	}
	place = line.waiters.PushBack(make(chan struct{}))
	head = line.waiters.Front() == place
	c.mu.Unlock()
	if unheard {
		err = c.subscription.Subscribe(ctx, key)
	}
	return line, place, head, err
}

func (c *tryClient) leave(line *tryLine, place *list.Element) {
	c.mu.Lock()
	defer c.mu.Unlock()
	head := line.waiters.Front() == place
	line.waiters.Remove(place)
	if next := line.waiters.Front(); head && next != nil {
		close(next.Value.(chan struct{}))
	}
}

// try is a plain SET the first time, and the settling script afterwards.
func (c *tryClient) try(ctx context.Context, key string, tries int) (handle, error) {
	if tries == 0 {
		return c.tryAcquire(ctx, key)
	}
	h := &rawHandle{client: c.rawClient, key: key, token: c.tokens.next()}
	answer, err := c.rdb.EvalSha(ctx, c.settle, []string{key}, h.token, c.ttl.Milliseconds()).Int64Slice()
	if err != nil {
		return nil, err
	}
	if answer[0] != 1 {
		return nil, errHeld
	}
	return h, nil
}

func (c *tryClient) close() error {
	c.stopListening()
	_ = c.subscription.Close()
	return c.rawClient.close()
}
