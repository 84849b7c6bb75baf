package redistest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ioTimeout bounds a call of Do. It is long because a busy machine must not fail a test, and only a server that is
// paused or hung ever uses it up.
const ioTimeout = 5 * time.Second

// ReplyError is an error reply of the server, without the leading "-": the command was answered, unlike with any other
// error of Do.
type ReplyError string

func (e ReplyError) Error() string { return string(e) }

// Do sends one command on a connection of the server's own, past every proxy and client under test, and returns its
// reply: a string, an int64, nil, or a []any of these. An error reply is a ReplyError (inside an array: an element);
// every other error is one of the connection, and then the server may execute the command later, or may have done so.
func (s *Server) Do(args ...string) (any, error) {
	return s.conn.do(s.Addr(), args...)
}

// Get returns the value of a string key, "" if there is none. It fails the test if it cannot tell.
func (s *Server) Get(key string) string {
	s.t.Helper()
	reply, err := s.Do("GET", key)
	if err != nil {
		s.t.Errorf("redistest: GET %s: %v", key, err)
	}
	value, _ := reply.(string)
	return value
}

// PTTL returns how long the key will still live: -1 (one nanosecond) if it has no expiry, -2 if there is no such key.
// It fails the test if it cannot tell.
func (s *Server) PTTL(key string) time.Duration {
	s.t.Helper()
	reply, err := s.Do("PTTL", key)
	if err != nil {
		s.t.Errorf("redistest: PTTL %s: %v", key, err)
	}
	ms, _ := reply.(int64)
	if ms < 0 {
		return time.Duration(ms)
	}
	return time.Duration(ms) * time.Millisecond
}

// conn is a RESP 2 connection that dials when it is needed. The zero value is ready for use.
type conn struct {
	mu sync.Mutex
	nc net.Conn // nil: not connected
	br *bufio.Reader
}

func (c *conn) do(addr string, args ...string) (any, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	reply, err := c.roundTrip(addr, args)
	if err != nil {
		// A late reply would be taken for the answer to the next command.
		c.closeLocked()
		return nil, fmt.Errorf("redis at %s: %s: %w", addr, args[0], err)
	}
	if refused, ok := reply.(ReplyError); ok {
		return nil, refused
	}
	return reply, nil
}

func (c *conn) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeLocked()
}

func (c *conn) closeLocked() {
	if c.nc != nil {
		_ = c.nc.Close()
		c.nc = nil
	}
}

func (c *conn) roundTrip(addr string, args []string) (any, error) {
	deadline := time.Now().Add(ioTimeout)
	if c.nc == nil {
		nc, err := net.DialTimeout("tcp", addr, ioTimeout)
		if err != nil {
			return nil, err
		}
		c.nc, c.br = nc, bufio.NewReader(nc)
	}
	if err := c.nc.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c.nc, encode(args)); err != nil {
		return nil, err
	}
	return readReply(c.br)
}

func encode(args []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, arg := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(arg), arg)
	}
	return b.String()
}

func readReply(r *bufio.Reader) (any, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	if line == "" {
		return nil, errors.New("empty reply")
	}
	rest := line[1:]
	switch line[0] {
	case '+':
		return rest, nil
	case '-':
		return ReplyError(rest), nil
	case ':':
		return strconv.ParseInt(rest, 10, 64)
	case '$', '*':
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 {
			return nil, err
		}
		if line[0] == '*' {
			return readArray(r, n)
		}
		return readBulk(r, n)
	}
	return nil, fmt.Errorf("unexpected reply %q", line)
}

func readBulk(r *bufio.Reader, n int) (any, error) {
	body := make([]byte, n+len("\r\n"))
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return string(body[:n]), nil
}

func readArray(r *bufio.Reader, n int) (any, error) {
	items := make([]any, 0, n)
	for range n {
		item, err := readReply(r)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	return items, nil
}
