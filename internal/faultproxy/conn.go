package faultproxy

import (
	"bufio"
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// conn is a client's connection and the one to the server behind it. Four goroutines serve it: one that reads
// requests, one that delivers them, one that reads replies, one that delivers those.
type conn struct {
	p      *Proxy
	id     int
	ctx    context.Context
	cancel context.CancelFunc
	client *net.TCPConn

	requests   *link
	replies    *link
	subscribed atomic.Bool // messages can come
	wg         sync.WaitGroup

	// Held from the arrival of a request until it is queued: whoever has seen it arrive and then ends the client's
	// side must not overtake it.
	arrival sync.Mutex
	arrived int  // requests so far
	cut     bool // the client's side was ended: what it still sends does not arrive

	mu     sync.Mutex
	server *net.TCPConn // nil until the first request is delivered
	closed bool
}

func newConn(p *Proxy, id int, client *net.TCPConn) *conn {
	c := &conn{p: p, id: id, client: client}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.requests = newLink(p, toServer, c.ctx)
	c.replies = newLink(p, toClient, c.ctx)
	return c
}

// serve returns when both sides have ended the connection, or close was called.
func (c *conn) serve() {
	c.wg.Go(c.readRequests)
	c.wg.Go(c.deliverRequests)
	c.wg.Go(func() { c.replies.run(c.deliverReply) })
	c.wg.Wait()
	c.close()
}

// close ends both sides at once; what is under way is lost.
func (c *conn) close() {
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	_ = c.client.Close()
	if c.server != nil {
		_ = c.server.Close()
	}
}

func (c *conn) readRequests() {
	// The end of the client's stream comes behind its last request: one that is held must still reach the server.
	defer c.requests.finish(closes)
	r := bufio.NewReader(c.client)
	for {
		f, err := readRequest(r)
		if errors.Is(err, errProtocol) {
			c.endClient(resets)
		}
		if err != nil {
			return
		}
		if len(f.items) > 0 {
			c.request(f)
		}
	}
}

// request sends one request on its way and takes its place in the order of the replies.
func (c *conn) request(f frame) {
	c.arrival.Lock()
	defer c.arrival.Unlock()
	if c.cut {
		return
	}
	c.arrived++
	req, plan := c.p.arrive(Request{Conn: c.id, N: c.arrived, Args: f.items})
	place := &entry{fate: plan.reply, req: req}
	if plan.local {
		place.data = plan.answer
		place.due = c.p.due(toClient, plan.reply.delay)
		c.replies.add(place)
		return
	}
	place.awaiting = 1
	if name := strings.ToLower(f.items[0]); slices.Contains(subscriptions, name) {
		c.subscribed.Store(true)
		place.confirms = name
		place.awaiting = max(1, len(f.items)-1)
	}
	// Before the request, which can be answered as soon as it is in the queue.
	c.replies.add(place)
	c.requests.add(&entry{
		fate: plan.request, req: req, data: f.raw, due: c.p.due(toServer, plan.request.delay),
	})
}

func (c *conn) deliverRequests() {
	c.requests.run(c.deliverRequest)
	if c.server == nil {
		c.replies.finish(closes) // nobody else will
	}
}

func (c *conn) deliverRequest(e *entry) {
	if e.end != goesOn {
		if c.server != nil {
			// Closing it whole would reset it if replies are unread, and with it the requests that the server has
			// not read yet.
			_ = c.server.CloseWrite()
		}
		return
	}
	if c.server == nil && !c.dial() {
		c.replies.finish(resets)
		c.requests.silent.Store(true)
		return
	}
	if _, err := c.server.Write(e.data); err != nil {
		c.requests.silent.Store(true)
		return
	}
	c.p.markForwarded(e.req)
}

// dial connects to the server. It waits for the first request, so that a connection made while nothing passes looks
// the same whether there is a server or not.
func (c *conn) dial() bool {
	var d net.Dialer
	nc, err := d.DialContext(c.ctx, "tcp", c.p.target)
	if err != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = nc.Close()
		return false
	}
	c.server = nc.(*net.TCPConn)
	c.wg.Go(func() { c.readReplies(nc) })
	return true
}

func (c *conn) readReplies(server net.Conn) {
	r := bufio.NewReader(server)
	resp3 := false
	for {
		f, err := readFrame(r)
		switch {
		case errors.Is(err, syscall.ECONNRESET), errors.Is(err, errProtocol):
			c.replies.finish(resets)
			return
		case err != nil:
			c.replies.finish(closes)
			return
		}
		resp3 = resp3 || f.kind == '>' || f.kind == '%' // the answer to HELLO 3 is a map
		c.pair(f, f.classify(resp3, c.subscribed.Load()))
	}
}

// pair finds out which request a frame answers. It goes in front of that request's place, as does a message: behind
// what the server has sent before it.
func (c *conn) pair(f frame, class replyClass) {
	place := c.replies.firstAwaiting()
	if place == nil || class == message || class == confirmation && place.confirms != f.items[0] {
		c.replies.insert(place, &entry{data: f.raw, due: c.p.due(toClient, nil)})
		return
	}
	c.p.markReplied(place.req)
	c.replies.insert(place, &entry{
		fate: place.fate, req: place.req, data: f.raw, due: c.p.due(toClient, place.fate.delay),
	})
	owed := 1
	if class == reply {
		owed = place.awaiting // an error: there will be no confirmations
	}
	c.replies.answered(place, owed)
}

func (c *conn) deliverReply(e *entry) {
	if e.end != goesOn {
		c.endClient(e.end)
		return
	}
	if _, err := c.client.Write(e.data); err != nil {
		c.replies.silent.Store(true)
	}
}

// endClient ends the client's side now. Requests that are under way still reach the server.
func (c *conn) endClient(end ending) {
	c.arrival.Lock()
	defer c.arrival.Unlock()
	c.cut = true
	if end == resets {
		_ = c.client.SetLinger(0)
		_ = c.client.Close()
	} else {
		// Closing it whole would reset it if requests are unread. readRequests waits until the client closes it too.
		_ = c.client.CloseWrite()
	}
	// Not before: the server may close in answer to it, and that would pass for an orderly end of a reset connection.
	c.requests.finish(closes)
}

// silence loses everything that would arrive from now on, in both directions.
func (c *conn) silence() {
	c.requests.silent.Store(true)
	c.replies.silent.Store(true)
}
