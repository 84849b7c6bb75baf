package redislease

import (
	"slices"
	"sync/atomic"
	"time"
)

// A Locker with tens of thousands of leases renews several each millisecond. A write, a read and a wake-up for each would
// cost it several times as much as one for some dozens of them. So a watchdog's renewal that comes close behind another
// one of its Locker is gathered with those that come after it, and they are sent at the same moment:
//
//	                         no
//	renewal ── close behind? ───▶ sent by itself
//	                │ yes
//	                ▼
//	            gathered ── batchWithin after the first ──▶ a *redis.Client: one pipeline
//	                                                        another client: each by itself
//
// A client that pipelines by itself makes the most of commands that come at the same moment. Only a plain *redis.Client
// is given a pipeline: a wrapper that has its methods by embedding may mean to see each command in Process, and in a
// Redis Cluster one node that hangs would hold up the answers of all.
//
// What goes wrong, and what follows:
//
//   - A lease ends while its renewal is gathered: it is not sent.
//   - A pipeline is not answered, or fails: each of its leases sends another renewal, which goes by itself, as does all
//     that follows a failed renewal, and what Renew asks for. go-redis gives an error to commands that were answered
//     before it, too. That can turn a Yes or a No into "unknown", and nothing into a Yes.
//   - An answer has an observer called: on another goroutine, so that it holds up no other answer.
type batches struct {
	behind   time.Duration           // how close behind another one a renewal is gathered,
	within   time.Duration           // and for how long
	pipeline pipeline                // nil: each by itself
	latest   atomic.Int64            // when the last renewal was due, by the wall clock in ns
	gathered atomic.Pointer[command] // newest first
}

const (
	batchWithin = 5 * time.Millisecond
	batchLeast  = 20 * batchWithin // the interval of a lease whose renewals may be late by that much
	batchMost   = 256              // commands in a pipeline
)

// add sends a renewal soon. It waits for nothing, and no lock is shared with other leases.
func (b *batches) add(c *command) {
	now := c.base.time.UnixNano() + int64(c.began)
	apart := now - b.latest.Swap(now)
	if apart < 0 || apart > int64(b.behind) || c.config.interval < batchLeast {
		go c.run()
		return
	}
	c.batched = true
	for {
		c.next = b.gathered.Load()
		if b.gathered.CompareAndSwap(c.next, c) {
			break
		}
	}
	if c.next == nil {
		c.locker.clock.afterFunc(b.within, b.send)
	}
}

// send sends what has been gathered and is still wanted, oldest first.
func (b *batches) send() {
	var list []*command
	for c := b.gathered.Swap(nil); c != nil; c = c.next {
		list = append(list, c)
	}
	slices.Reverse(list)
	list = slices.DeleteFunc(list, (*command).drop)
	if b.pipeline == nil || len(list) == 1 {
		for _, c := range list {
			go c.run()
		}
		return
	}
	for chunk := range slices.Chunk(list, batchMost) {
		go b.pipeline.run(chunk)
	}
}
