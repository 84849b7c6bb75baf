package sim

import (
	"slices"
	"strings"
	"sync"
	"time"
)

// server is the simulated Redis: a store, and what can happen to it.
type server struct {
	w     *world
	place uint64

	mu      sync.Mutex
	store   store
	hung    time.Time // until when it executes nothing
	refuses time.Time // until when it answers everything with refusal
	refusal string
	undo    []change      // oldest first, for a failover
	clock   time.Duration // by how much it is off

	listeners map[string][]*conn // by channel
	released  []*conn            // that have to be told of what is being executed
	served    uint64
}

// change is one write, as a replica that has not seen it would take it back.
type change struct {
	at     time.Time
	key    string
	before item
}

// releasedSuffix is that of the channel that tells of a key's release.
const releasedSuffix = ":released"

// replicaLag is how far behind a replica may be.
const replicaLag = time.Second

// notExecuted are the error replies that say that nothing was done.
var notExecuted = []string{
	"LOADING Redis is loading the dataset in memory",
	"READONLY You can't write against a read only replica.",
	"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
	"CLUSTERDOWN The cluster is down",
	"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
	"NOPERM this user has no permissions to run the command",
	"NOREPLICAS Not enough good replicas to write.",
	"MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.",
	"OOM command not allowed when used memory > 'maxmemory'.",
	"TRYAGAIN Multiple keys request during rehashing of slot",
}

// arrived takes a request off the network.
func (s *server) arrived(c *conn, r *request) {
	left := s.hangs()
	c.mu.Lock()
	if left == 0 && len(c.pending) == 0 {
		c.mu.Unlock()
		s.serve(c, r)
		return
	}
	c.pending = append(c.pending, r)
	first := len(c.pending) == 1
	c.mu.Unlock()
	if first {
		time.AfterFunc(left+c.salt(), func() { s.goOn(c) })
	}
}

// goOn serves what arrived on a connection while the server hung.
func (s *server) goOn(c *conn) {
	if left := s.hangs(); left > 0 {
		time.AfterFunc(left+c.salt(), func() { s.goOn(c) })
		return
	}
	c.mu.Lock()
	pending := c.pending
	c.pending = nil
	if c.reset {
		pending = nil
	}
	c.mu.Unlock()
	for _, r := range pending {
		s.serve(c, r)
	}
}

func (s *server) hangs() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(0, time.Until(s.hung))
}

// serve executes a request and answers it.
func (s *server) serve(c *conn, r *request) {
	switch {
	case r.args[0] == "subscribe" || r.args[0] == "unsubscribe" || r.args[0] == "ping":
		s.listen(c, r)
		return
	case r.what == whatOther:
		c.reply(s.greet(c, r))
		return
	}
	s.mu.Lock()
	s.served++
	x := from(s.place, c.place, s.served)
	reply := s.refuse(x)
	odd := false
	if reply == nil && s.w.weather.garbles > 0 && !s.w.healed(time.Now()) && r.stamp != "0" {
		odd = x.hits(s.w.weather.garbles)
	}
	switch {
	case reply != nil:
	case !odd:
		reply = s.execute(c, r)
	default:
		s.w.count("reply that nobody understands")
		if x.hits(0.5) {
			s.execute(c, r)
		}
		reply = fault("ERR proxy: upstream is gone")
		if shapes := []any{"1", null{}, status("OK"), []any{int64(1)}, int64(7)}; r.what != whatSet {
			if i := x.below(len(shapes) + 1); i < len(shapes) {
				reply = shapes[i]
			}
		}
	}
	released := s.released
	s.released = nil
	s.mu.Unlock()
	c.reply(render(nil, reply, c.resp3))
	for _, l := range released {
		l.reply(render(nil, push{"message", r.key + releasedSuffix, ""}, l.resp3), func() { s.w.oracle.heard(l.p, r.key) })
	}
}

// listen answers the commands of a subscription.
func (s *server) listen(c *conn, r *request) {
	if r.args[0] == "ping" {
		if c.resp3 {
			c.reply(render(nil, status("PONG"), true))
		} else {
			c.reply(render(nil, []any{"pong", ""}, false))
		}
		return
	}
	if s.w.weather.deaf && !s.w.healed(time.Now()) {
		s.w.count("subscription refused")
		c.reply(render(nil, fault("NOPERM this user has no permissions to access one of the channels used as arguments"), c.resp3))
		return
	}
	s.mu.Lock()
	var replies []byte
	var landed []func()
	for i, channel := range r.args[1:] {
		s.listeners[channel] = slices.DeleteFunc(s.listeners[channel], func(other *conn) bool { return other == c })
		if r.args[0] == "subscribe" {
			s.listeners[channel] = append(s.listeners[channel], c)
			landed = append(landed, func() { s.w.oracle.heard(c.p, strings.TrimSuffix(channel, releasedSuffix)) })
		}
		replies = render(replies, push{r.args[0], channel, int64(i + 1)}, c.resp3)
	}
	s.mu.Unlock()
	c.reply(replies, landed...)
}

// refuse returns an error reply if this command, or every command for now, gets one.
func (s *server) refuse(x *chance) any {
	switch {
	case s.w.healed(time.Now()):
	case time.Now().Before(s.refuses):
		s.w.count("command refused for a while")
		return fault(s.refusal)
	case x.hits(s.w.weather.refuses):
		s.w.count("command refused")
		return fault(notExecuted[x.below(len(notExecuted))])
	}
	return nil
}

// execute runs a request on the store and tells the oracle.
func (s *server) execute(c *conn, r *request) any {
	if !s.w.weather.noTime {
		r.time = time.Now().Add(s.clock).UnixMicro()
	}
	before, kept := s.store.get(r.key), s.store.get(r.fenceKey)
	reply := s.store.do(r)
	after, keeps := s.store.get(r.key), s.store.get(r.fenceKey)
	if kept != keeps {
		s.undo = append(s.undo, change{time.Now(), r.fenceKey, kept})
	}
	if before != after {
		s.undo = append(s.undo, change{time.Now(), r.key, before})
	}
	if r.what == whatRelease && before != after {
		s.released = slices.Clone(s.listeners[r.key+releasedSuffix])
	}
	s.w.oracle.executed(c.p, r, before, after, reply)
	if r.fenceKey != "" {
		s.w.oracle.fenced(r, before != after, kept, keeps, reply)
	}
	if kept != keeps && !s.w.healed(time.Now()) && from(s.place, c.place, s.served, name("evicts")).hits(s.w.weather.evicts) {
		s.w.count("fence evicted")
		s.changeLocked(r.fenceKey, item{})
	}
	return reply
}

func (s *server) greet(c *conn, r *request) []byte {
	if r.args[0] != "hello" {
		return render(nil, fault("ERR unknown command"), c.resp3)
	}
	c.resp3 = len(r.args) > 1 && r.args[1] == "3"
	if c.resp3 {
		return []byte("%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n")
	}
	return []byte("*4\r\n+server\r\n+redis\r\n+proto\r\n:2\r\n")
}

// change has an operator, or a disaster, put something else under a key.
func (s *server) change(key string, to item) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changeLocked(key, to)
}

func (s *server) changeLocked(key string, to item) {
	before := s.store.get(key)
	if before == to {
		return
	}
	s.undo = append(s.undo, change{time.Now(), key, before})
	s.store.put(key, to)
	s.w.oracle.overruled(key, before, to)
}

// restart loses everything and resets all connections.
func (s *server) restart() {
	s.mu.Lock()
	for _, k := range s.w.all() {
		s.changeLocked(k, item{})
	}
	s.undo, s.listeners = nil, map[string][]*conn{}
	s.mu.Unlock()
	s.w.resetAll()
}

// failover goes on with a replica that has not seen the latest writes.
func (s *server) failover(lag time.Duration) {
	s.mu.Lock()
	since := time.Now().Add(-lag)
	was := map[string]item{}
	for i := len(s.undo) - 1; i >= 0 && s.undo[i].at.After(since); i-- {
		was[s.undo[i].key] = s.undo[i].before
	}
	for _, key := range s.w.all() {
		before, ok := was[key]
		if !ok {
			continue
		}
		if !before.expires.IsZero() && !time.Now().Before(before.expires) {
			before = item{}
		}
		s.changeLocked(key, before)
	}
	s.undo, s.listeners = nil, map[string][]*conn{}
	s.mu.Unlock()
	s.w.resetAll()
}

// jump sets the server's clock.
func (s *server) jump(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := map[string]item{}
	for _, key := range s.w.all() {
		before[key] = s.store.get(key)
	}
	s.clock += d
	s.store.jump(d)
	for _, key := range s.w.all() {
		if after := s.store.get(key); after != before[key] {
			s.w.oracle.overruled(key, before[key], after)
		}
	}
}

// forget drops changes that no failover takes back any more.
func (s *server) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.undo) > 0 && time.Since(s.undo[0].at) > replicaLag {
		s.undo = s.undo[1:]
	}
}
