package sim

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// store is what a server keeps, and executes its commands on: a stub of the library's scripts, which is fast, or
// miniredis, which runs them.
type store interface {
	do(r *request) any
	get(key string) item
	put(key string, i item)
	jump(d time.Duration) // of the server's clock
	close()
}

// item is what a key holds; the zero item is no key.
type item struct {
	value   string
	list    bool      // not a string
	expires time.Time // by the bubble's clock; zero: never
}

const listed = "a list" // the value of an item that is a list

// stub is the fast store.
type stub struct {
	items map[string]item
}

func newStub() *stub { return &stub{items: map[string]item{}} }

func (s *stub) get(key string) item {
	i, ok := s.items[key]
	if ok && !i.expires.IsZero() && !time.Now().Before(i.expires) {
		delete(s.items, key)
		return item{}
	}
	return i
}

func (s *stub) put(key string, i item) {
	if i == (item{}) {
		delete(s.items, key)
		return
	}
	s.items[key] = i
}

// jump: what is kept is a time by the server's clock, so it comes nearer by as much as that jumps.
func (s *stub) jump(d time.Duration) {
	for key, i := range s.items {
		if !i.expires.IsZero() {
			i.expires = i.expires.Add(-d)
			s.items[key] = i
		}
	}
}

func (s *stub) close() {}

func (s *stub) do(r *request) any {
	if r.stamp == "0" {
		if r.what == whatSet {
			return fault("ERR invalid expire time in set")
		}
		return fault("ERR withdrawn")
	}
	held := s.get(r.key)
	exists := held != item{}
	mine := -1
	for i, t := range r.tokens {
		if exists && !held.list && held.value == t {
			mine = i
		}
	}
	expires := time.Now().Add(r.ttl())
	switch r.what {
	case whatSet:
		if exists {
			return null{}
		}
		s.put(r.key, item{value: r.own(), expires: expires})
		return status("OK")
	case whatSettle:
		last, spoilt := s.fence(r)
		switch {
		case mine >= 0 && r.fenceKey != "":
			return []any{int64(1), int64(mine + 1), last}
		case mine >= 0:
			return []any{int64(1), int64(mine + 1)}
		case exists:
			pttl := int64(-1)
			if !held.expires.IsZero() {
				pttl = time.Until(held.expires).Milliseconds()
			}
			return []any{int64(0), pttl}
		}
		if r.fenceKey == "" {
			s.put(r.key, item{value: r.own(), expires: expires})
			return []any{int64(1), int64(0)}
		}
		if spoilt {
			return fault(spoiltFence)
		}
		fence := max(last+1, r.least, r.now())
		s.put(r.fenceKey, item{value: strconv.FormatInt(fence, 10), expires: time.Now().Add(milliseconds(r.keep))})
		s.put(r.key, item{value: r.own(), expires: expires})
		return []any{int64(1), int64(0), fence}
	case whatRenew:
		switch {
		case !exists:
			return int64(0)
		case mine < 0:
			return int64(-1)
		}
		s.put(r.key, item{value: held.value, expires: expires})
		return int64(1)
	case whatRelease:
		switch {
		case !exists:
			return int64(0)
		case mine < 0:
			return int64(-1)
		}
		s.put(r.key, item{})
		return int64(1)
	}
	return fault("ERR unknown command")
}

// spoiltFence is the error reply where the latest fence should be kept and something else is.
const spoiltFence = "FENCE what is kept as the latest fence is no integer below 9007199254740992"

// fence returns the latest fence of a key, or -1.
func (s *stub) fence(r *request) (last int64, spoilt bool) {
	i := s.get(r.fenceKey)
	last, err := strconv.ParseInt(i.value, 10, 64)
	if i.list || err != nil {
		return -1, i != item{}
	}
	return last, false
}

// lua is the store that runs the real scripts.
type lua struct {
	m    *miniredis.Miniredis
	conn net.Conn
	in   *bufio.Reader
}

func newLua() (*lua, error) {
	l := &lua{m: miniredis.NewMiniRedis()}
	l.m.ClockTTL(true)
	var err error
	if l.conn, err = l.m.Dial(); err != nil {
		return nil, err
	}
	l.in = bufio.NewReader(l.conn)
	return l, nil
}

func (l *lua) close() {
	_ = l.conn.Close()
	l.m.Close()
}

func (l *lua) get(key string) (i item) {
	if !l.m.Exists(key) {
		return item{}
	}
	if ttl := l.m.TTL(key); ttl > 0 {
		i.expires = time.Now().Add(ttl)
	}
	if i.list = l.m.Type(key) != "string"; i.list {
		i.value = listed
	} else {
		i.value, _ = l.m.Get(key)
	}
	return i
}

func (l *lua) put(key string, i item) {
	l.m.Del(key)
	switch {
	case i == item{}:
		return
	case i.list:
		_, _ = l.m.Push(key, i.value)
	default:
		_ = l.m.Set(key, i.value)
	}
	if !i.expires.IsZero() {
		l.m.SetTTL(key, time.Until(i.expires))
	}
}

// jump: miniredis keeps what is left of a TTL, so that is what changes.
func (l *lua) jump(d time.Duration) {
	for _, key := range l.m.Keys() {
		i := l.get(key)
		if i.expires.IsZero() {
			continue
		}
		if i.expires = i.expires.Add(-d); !time.Now().Before(i.expires) {
			i = item{}
		}
		l.put(key, i)
	}
}

func (l *lua) do(r *request) any {
	seconds, micros := r.time/1e6, r.time%1e6
	clock := fmt.Sprintf("{'%d', '%d'}", seconds, micros)
	if r.time == 0 {
		clock = "{err = 'NOPERM this user has no permissions to run the command'}"
	}
	b := fmt.Appendf(nil, "*%d\r\n", len(r.args))
	for _, a := range r.args {
		a = strings.ReplaceAll(a, "redis.pcall('TIME')", clock) // miniredis has no clock of its own
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := l.conn.Write(b); err != nil {
		panic(err)
	}
	v, err := readReply(l.in)
	if err != nil {
		panic(err)
	}
	return v
}

func readReply(in *bufio.Reader) (any, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	text := line[1:]
	switch line[0] {
	case '+':
		return status(text), nil
	case '-':
		return fault(text), nil
	case ':':
		return strconv.ParseInt(text, 10, 64)
	}
	n, err := strconv.Atoi(text)
	switch {
	case err != nil:
		return nil, err
	case n < 0:
		return null{}, nil
	case line[0] == '$':
		b := make([]byte, n+2)
		_, err := io.ReadFull(in, b)
		return string(b[:n]), err
	case line[0] == '*':
		array := make([]any, n)
		for i := range array {
			if array[i], err = readReply(in); err != nil {
				return nil, err
			}
		}
		return array, nil
	}
	return nil, fmt.Errorf("sim: no reply: %q", line)
}
