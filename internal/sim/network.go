package sim

import (
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// fate is what becomes of one message.
type fate struct {
	kind  fateKind
	delay time.Duration
}

type fateKind uint8

const (
	arrives   fateKind = iota
	cutBefore          // the connection is reset when the message would have arrived
	cutAfter           // the message arrives, then the connection is reset
	vanishes           // and so does everything after it in its direction; the connection stays open
)

// conn is the client's end of a connection. The server's end is no more than an order of messages: what the client
// writes is handed to the server when it arrives, and the server's replies go to land.
//
// What becomes of a message depends on the seed, the connection, the direction and the number of the message, and on
// nothing else.
type conn struct {
	w     *world
	p     *process
	id    string
	place uint64
	resp3 bool // the server's

	mu       sync.Mutex
	cond     *sync.Cond
	in       []landed // not yet read
	reset    bool
	last     bool // the message that is arriving is followed by a reset
	closed   bool
	deadline time.Time
	timer    *time.Timer // wakes a reader at the deadline
	held     []func()    // what arrived while the process stood still
	listens  bool        // it is a subscription
	unsent   [][]byte    // what a subscription would have written meanwhile
	catching bool        // that is being handed over: a reader gets what has arrived before it is told the time

	// One for each direction, up first.
	sent    [2]uint64
	arrival [2]time.Time // of the latest message: a connection keeps the order
	broken  [2]bool      // nothing that is written from now on arrives
	silent  bool         // broken, and nobody has been told

	pending []*request // the server's: arrived, not executed
}

// landed is a message that has arrived.
type landed struct {
	b  []byte
	at time.Time
}

const (
	up   = 0
	down = 1
)

func (w *world) dial(p *process) *conn {
	p.mu.Lock()
	p.dials++
	n := p.dials
	p.mu.Unlock()
	c := &conn{w: w, p: p, id: fmt.Sprintf("%s/%d", p.name, n)}
	c.place = uint64(*from(p.place, name("conn"), n))
	c.cond = sync.NewCond(&c.mu)
	w.mu.Lock()
	w.conns = append(w.conns, c)
	w.mu.Unlock()
	return c
}

// Write implements [net.Conn].
func (c *conn) Write(b []byte) (int, error) {
	if subscribes(b) {
		c.mu.Lock()
		c.listens = true
		dead := c.closed || c.reset
		c.mu.Unlock()
		// go-redis writes these under a mutex that whoever reads from the subscription needs: no time may pass. So who reads
		// is told of a reset; else go-redis would connect anew.
		if dead || c.postponed(b) {
			return len(b), nil
		}
	} else {
		c.p.gate()
	}
	return c.write(b)
}

// postponed keeps what a process that stands still would write, until it goes on, in order.
func (c *conn) postponed(b []byte) bool {
	left := c.p.left()
	c.mu.Lock()
	defer c.mu.Unlock()
	if left == 0 && len(c.unsent) == 0 {
		return false
	}
	if c.unsent = append(c.unsent, append([]byte(nil), b...)); len(c.unsent) == 1 {
		time.AfterFunc(left+c.salt(), c.writeUnsent)
	}
	return true
}

func (c *conn) writeUnsent() {
	if left := c.p.left(); left > 0 {
		time.AfterFunc(left+c.salt(), c.writeUnsent)
		return
	}
	c.mu.Lock()
	unsent := c.unsent
	c.unsent = nil
	c.mu.Unlock()
	for _, b := range unsent {
		_, _ = c.write(b)
	}
}

func (c *conn) write(b []byte) (int, error) {
	now := time.Now()
	c.mu.Lock()
	dead := c.closed || c.reset
	c.mu.Unlock()
	if dead {
		return 0, &net.OpError{Op: "write", Net: "sim", Err: syscall.EPIPE}
	}
	for _, r := range parse(b, now) {
		c.w.oracle.written(c.p, r)
		c.send(up, func() { c.w.server.arrived(c, r) }, func() string { return c.describe(r) })
	}
	return len(b), nil
}

func (c *conn) describe(r *request) string {
	return fmt.Sprintf("%s > %s %s %d %s", c.id, r.what, r.key, len(r.tokens), r.stamp)
}

// reply sends what the server answers. landed is called when it has reached the client.
func (c *conn) reply(b []byte, landed ...func()) {
	c.send(down, func() { c.land(b, landed) }, func() string { return fmt.Sprintf("%s < %q", c.id, b) })
}

// send decides about a message, and has it arrive.
func (c *conn) send(direction int, arrive func(), describe func() string) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	r := from(c.place, uint64(direction), c.sent[direction])
	c.sent[direction]++
	if c.broken[direction] {
		return
	}
	f := c.w.weather.fate(c.w, c.p, direction, r, now)
	at := now.Add(f.delay)
	if !at.After(c.arrival[direction]) {
		at = c.arrival[direction].Add(r.between(1, time.Microsecond))
	}
	c.arrival[direction] = at
	switch f.kind {
	case cutBefore, cutAfter:
		c.broken = [2]bool{true, true}
	case vanishes:
		c.broken[direction], c.silent = true, true
		return
	}
	epoch := c.w.epoch.Load()
	time.AfterFunc(at.Sub(now), func() {
		deliver := func() {
			if c.w.epoch.Load() != epoch { // the server that it was sent to, or by, is gone
				return
			}
			c.w.record(describe())
			c.mu.Lock()
			c.last = f.kind == cutAfter
			c.mu.Unlock()
			if f.kind != cutBefore {
				arrive()
			}
			if f.kind != arrives {
				c.w.record(c.id + " reset")
				c.cut()
			}
		}
		if direction == down {
			c.toProcess(deliver)
		} else {
			deliver()
		}
	})
}

// toProcess has f happen as soon as the process runs, in order.
func (c *conn) toProcess(f func()) {
	left := c.p.left()
	c.mu.Lock()
	if left == 0 && len(c.held) == 0 {
		c.mu.Unlock()
		f()
		return
	}
	c.held = append(c.held, f)
	first := len(c.held) == 1
	c.mu.Unlock()
	if first {
		time.AfterFunc(left+c.salt(), c.unhold)
	}
}

func (c *conn) unhold() {
	if left := c.p.left(); left > 0 {
		time.AfterFunc(left+c.salt(), c.unhold)
		return
	}
	c.mu.Lock()
	held := c.held
	c.held, c.catching = nil, true
	listens := c.listens
	c.mu.Unlock()
	for i, f := range held {
		if listens && i > 0 { // what is heard at one instant is followed by one try or by two
			time.AfterFunc(time.Duration(i)*20*time.Microsecond, f)
			continue
		}
		f()
	}
	c.mu.Lock()
	c.catching = false
	c.cond.Broadcast()
	c.mu.Unlock()
}

// salt keeps what was held up together from happening at one instant.
func (c *conn) salt() time.Duration {
	return from(c.place, uint64(time.Now().UnixNano())).between(1, time.Millisecond)
}

// land hands bytes to the client. If they are the last, its next write finds the connection reset, however soon it is.
func (c *conn) land(b []byte, then []func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	for _, f := range then {
		f()
	}
	c.in = append(c.in, landed{b, time.Now()})
	c.reset = c.reset || c.last
	c.cond.Broadcast()
}

// cut resets the connection, as seen by both ends.
func (c *conn) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reset, c.broken, c.silent = true, [2]bool{true, true}, false
	c.cond.Broadcast()
}

// Read implements [net.Conn].
func (c *conn) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, net.ErrClosed
		case len(c.in) > 0 && c.listens && c.in[0].at.Before(time.Now()):
			// Who was to hear it did something else, and what that was goes on at this instant.
			at := c.in[0].at
			late := from(c.place, uint64(at.UnixNano())).between(1, 20*time.Microsecond)
			c.mu.Unlock()
			time.Sleep(late)
			c.mu.Lock()
			if len(c.in) > 0 && c.in[0].at.Equal(at) {
				c.in[0].at = time.Now()
			}
			continue
		case len(c.in) > 0:
			n := copy(b, c.in[0].b)
			if c.in[0].b = c.in[0].b[n:]; len(c.in[0].b) == 0 {
				c.in = c.in[1:]
			}
			return n, nil
		case c.reset:
			return 0, &net.OpError{Op: "read", Net: "sim", Err: syscall.ECONNRESET}
		case !c.deadline.IsZero() && !time.Now().Before(c.deadline) && len(c.held) == 0 && !c.catching && c.p.left() == 0:
			return 0, &net.OpError{Op: "read", Net: "sim", Err: os.ErrDeadlineExceeded}
		}
		c.cond.Wait()
	}
}

// Close implements [net.Conn]. What is on its way up arrives all the same.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	if c.timer != nil {
		c.timer.Stop()
	}
	c.cond.Broadcast()
	c.mu.Unlock()
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	for i, other := range c.w.conns {
		if other == c {
			c.w.conns = append(c.w.conns[:i], c.w.conns[i+1:]...)
			break
		}
	}
	return nil
}

// SetReadDeadline implements [net.Conn].
func (c *conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	if !t.IsZero() && !c.closed {
		c.timer = time.AfterFunc(time.Until(t)+from(c.place, 2, c.sent[up]).between(1, time.Microsecond), func() {
			c.toProcess(func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.cond.Broadcast()
			})
		})
	}
	c.cond.Broadcast()
	return nil
}

// SetDeadline implements [net.Conn]. Writes never wait.
func (c *conn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// SetWriteDeadline implements [net.Conn].
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// LocalAddr implements [net.Conn].
func (c *conn) LocalAddr() net.Addr { return address(c.id) }

// RemoteAddr implements [net.Conn].
func (c *conn) RemoteAddr() net.Addr { return address("server") }

type address string

func (address) Network() string  { return "sim" }
func (a address) String() string { return string(a) }
