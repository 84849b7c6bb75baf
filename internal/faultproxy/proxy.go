// Package faultproxy is a TCP proxy for tests that makes the faults of a network and of a server between a Redis client
// and a Redis server: latency, lost, late and cut replies, partitions, refused and reset connections.
//
// Faults apply to the network as a whole (SetReplies, DelayReplies, BlackHole, Silence, ResetConns, Refuse, ...) or to
// single commands, by rules:
//
//	p := faultproxy.Start(t, server.Addr())
//	client := redis.NewClient(&redis.Options{Addr: p.Addr()})
//	p.On(faultproxy.Command("SET")).Times(1).Do(faultproxy.CloseAfter())
//
// It keeps to what TCP can do: bytes arrive in order, so a delayed reply delays the ones behind it, and behind a lost
// one nothing arrives on that connection any more.
//
// It understands RESP 2 and 3, pipelines and subscriptions, but no TLS, no CLIENT REPLY, no MONITOR and no replication.
package faultproxy

import (
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
)

// Flow is what happens to everything that goes in one direction.
type Flow int

const (
	// Pass delivers.
	Pass Flow = iota
	// Hold keeps everything back until the flow is Pass again, and then delivers it in order, requests also if their
	// client has closed its connection meanwhile.
	Hold
	// Drop loses everything. A connection that has lost something stays open, and silent in that direction for ever.
	Drop
)

type direction int

const (
	toServer direction = iota
	toClient
)

const relistenTimeout = 10 * time.Second

// Proxy stands between clients and one server. Its methods are safe for concurrent use.
type Proxy struct {
	t      testing.TB
	addr   string
	target string
	wg     sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener // nil: refusing
	closed   bool
	conns    map[int]*conn // open ones by id
	accepted int
	rules    []*Rule
	log      []*Request
	flows    [2]Flow
	delays   [2]func() time.Duration
	changed  chan struct{} // closed and replaced when a flow or the log changes
}

// Start runs a proxy to the server at target on a free port of 127.0.0.1. It is closed when the test ends.
func Start(t testing.TB, target string) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("faultproxy: %v", err)
	}
	p := &Proxy{
		t: t, addr: listener.Addr().String(), target: target,
		conns: map[int]*conn{}, changed: make(chan struct{}),
	}
	p.mu.Lock()
	p.listen(listener)
	p.mu.Unlock()
	t.Cleanup(p.Close)
	return p
}

// Addr returns host:port for clients. It never changes.
func (p *Proxy) Addr() string { return p.addr }

// Close ends all connections and returns when every goroutine of the proxy has ended. What is held is lost.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	conns := p.pick(nil)
	p.mu.Unlock()
	p.Refuse()
	for _, c := range conns {
		c.close()
	}
	p.wg.Wait()
}

// Clear takes all faults back: rules are removed, delays end for what arrives from now on, what is held is delivered,
// connections are accepted. Connections that have lost something stay silent.
func (p *Proxy) Clear() {
	p.mu.Lock()
	for _, rule := range p.rules {
		rule.release()
	}
	p.rules = nil
	p.flows = [2]Flow{}
	p.delays = [2]func() time.Duration{}
	p.notify()
	p.mu.Unlock()
	p.Accept()
}

// SetRequests sets what happens to all requests that have not been forwarded yet, and to those that follow.
func (p *Proxy) SetRequests(f Flow) { p.setFlow(f, toServer) }

// SetReplies sets what happens to all replies and messages that have not been delivered yet, and to those that follow.
func (p *Proxy) SetReplies(f Flow) { p.setFlow(f, toClient) }

// BlackHole drops everything in both directions. Connections are accepted, and nothing is answered on them.
func (p *Proxy) BlackHole() { p.setFlow(Drop, toServer, toClient) }

// DelayRequests makes every request that arrives from now on wait for f() before it is forwarded; nil: no delay. f is
// never called concurrently, and must not call the proxy.
func (p *Proxy) DelayRequests(f func() time.Duration) { p.setDelay(toServer, f) }

// DelayReplies is DelayRequests for replies and messages.
func (p *Proxy) DelayReplies(f func() time.Duration) { p.setDelay(toClient, f) }

// Silence makes open connections silent for ever: those with the given ids (Request.Conn), or all. They stay open, new
// ones work.
func (p *Proxy) Silence(ids ...int) { p.each(ids, (*conn).silence) }

// ResetConns resets the clients of open connections: those with the given ids, or all. Requests that were delayed or
// held still reach the server.
func (p *Proxy) ResetConns(ids ...int) { p.each(ids, func(c *conn) { c.endClient(resets) }) }

// CloseConns is ResetConns with an orderly end: the clients read EOF.
func (p *Proxy) CloseConns(ids ...int) { p.each(ids, func(c *conn) { c.endClient(closes) }) }

// Refuse makes dialling fail (connection refused) until Accept or Clear. Open connections go on.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	listener := p.listener
	p.listener = nil
	p.mu.Unlock()
	if listener != nil {
		_ = listener.Close()
	}
}

// Accept ends Refuse. It fails the test if somebody else has taken the port.
func (p *Proxy) Accept() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil || p.closed {
		return
	}
	// While nobody listened, the port may have been lent to an outgoing connection.
	deadline := time.Now().Add(relistenTimeout)
	listener, err := net.Listen("tcp", p.addr)
	for err != nil && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
		listener, err = net.Listen("tcp", p.addr)
	}
	if err != nil {
		p.t.Errorf("faultproxy: %v", err)
		return
	}
	p.listen(listener)
}

// Accepted returns how many connections have been accepted so far.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// listen is called with p.mu held.
func (p *Proxy) listen(listener net.Listener) {
	p.listener = listener
	p.wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err == nil {
				p.open(listener, client.(*net.TCPConn))
				continue
			}
			if !errors.Is(err, net.ErrClosed) {
				p.t.Errorf("faultproxy: accept: %v", err)
			}
			return
		}
	})
}

func (p *Proxy) open(listener net.Listener, client *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != listener || p.closed {
		// It was on its way when the listener was closed.
		_ = client.SetLinger(0)
		_ = client.Close()
		return
	}
	p.accepted++
	c := newConn(p, p.accepted, client)
	p.conns[c.id] = c
	p.wg.Go(func() {
		c.serve()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, c.id)
	})
}

func (p *Proxy) each(ids []int, do func(*conn)) {
	p.mu.Lock()
	conns := p.pick(ids)
	p.mu.Unlock()
	for _, c := range conns {
		do(c)
	}
}

// pick returns the open connections with the given ids, or all. It is called with p.mu held.
func (p *Proxy) pick(ids []int) []*conn {
	var conns []*conn
	for id, c := range p.conns {
		if len(ids) == 0 || slices.Contains(ids, id) {
			conns = append(conns, c)
		}
	}
	return conns
}

func (p *Proxy) setFlow(f Flow, dirs ...direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, dir := range dirs {
		p.flows[dir] = f
	}
	p.notify()
}

func (p *Proxy) setDelay(dir direction, f func() time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delays[dir] = f
}

// flow returns what happens in a direction, and a channel that is closed when that may have changed.
func (p *Proxy) flow(dir direction) (Flow, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.flows[dir], p.changed
}

// due returns when something that arrives now is to be delivered, given the delay that a rule adds.
func (p *Proxy) due(dir direction, extra func() time.Duration) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	due := time.Now()
	for _, delay := range []func() time.Duration{p.delays[dir], extra} {
		if delay != nil {
			due = due.Add(delay())
		}
	}
	return due
}

// notify is called with p.mu held.
func (p *Proxy) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}
