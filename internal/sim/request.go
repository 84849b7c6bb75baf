package sim

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// what a request is for.
type what uint8

const (
	whatOther what = iota // the handshake
	whatSet
	whatSettle
	whatRenew
	whatRelease
)

func (w what) String() string { return [...]string{"other", "set", "settle", "renew", "release"}[w] }

// mayTake: it may take the key.
func (w what) mayTake() bool { return w == whatSet || w == whatSettle }

// request is a command on the wire.
type request struct {
	args   []string
	what   what
	key    string
	tokens []string
	stamp  string // the last argument: the TTL in ms, or 0 for a command that nobody wants any more
	at     time.Time

	fenceKey string // where the fence is kept; empty: the request asks for none
	least    int64  // that a new fence may be
	clock    int64  // the caller's, in µs
	keep     string // for how long to keep the fence, in ms
	time     int64  // the server's clock when it is executed, in µs; 0: TIME is refused
}

// own is the token that a request carries for itself: the last.
func (r *request) own() string { return r.tokens[len(r.tokens)-1] }

func (r *request) ttl() time.Duration {
	return milliseconds(r.stamp)
}

func milliseconds(text string) time.Duration {
	ms, _ := strconv.Atoi(text)
	return time.Duration(ms) * time.Millisecond
}

// scriptOf tells the library's scripts apart by what they do.
func scriptOf(text string) what {
	switch {
	case strings.Contains(text, "PEXPIRE"):
		return whatRenew
	case strings.Contains(text, "'DEL'"):
		return whatRelease
	default:
		return whatSettle
	}
}

// parse takes the requests of one write apart. go-redis writes whole commands.
func parse(b []byte, at time.Time) (requests []*request) {
	for len(b) > 0 {
		n := 0
		n, b = number(b, '*')
		r := &request{args: make([]string, n), at: at}
		for i := range r.args {
			n, b = number(b, '$')
			r.args[i], b = string(b[:n]), b[n+2:]
		}
		switch a := r.args; strings.ToLower(a[0]) {
		case "set":
			r.what, r.key, r.tokens, r.stamp = whatSet, a[1], a[2:3], a[len(a)-1]
		case "eval":
			r.what, r.key, r.tokens, r.stamp = scriptOf(a[1]), a[3], a[4:len(a)-1], a[len(a)-1]
			if a[2] == "2" {
				r.fence(a[4:])
			}
		}
		requests = append(requests, r)
	}
	return requests
}

// subscribes: the commands are those of a subscription.
func subscribes(b []byte) bool {
	for _, command := range []string{"\r\nsubscribe\r\n", "\r\nunsubscribe\r\n", "\r\nping\r\n"} {
		if bytes.Contains(b, []byte(command)) {
			return true
		}
	}
	return false
}

// fence takes the rest of the arguments of a script with a fence apart.
func (r *request) fence(rest []string) {
	n := len(rest)
	r.fenceKey, r.tokens, r.keep = rest[0], rest[1:n-4], rest[n-2]
	r.least, _ = strconv.ParseInt(rest[n-4], 10, 64)
	r.clock, _ = strconv.ParseInt(rest[n-3], 10, 64)
}

// now is the clock that a fence is drawn by.
func (r *request) now() int64 {
	if r.time == 0 {
		return r.clock
	}
	return r.time
}

func number(b []byte, mark byte) (int, []byte) {
	line, rest, _ := bytes.Cut(b, []byte("\r\n"))
	if len(line) < 2 || line[0] != mark {
		panic(fmt.Sprintf("sim: not a request: %q", b))
	}
	n, err := strconv.Atoi(string(line[1:]))
	if err != nil {
		panic(err)
	}
	return n, rest
}

// Replies, besides int64, string and []any.
type (
	push   []any
	status string
	fault  string
	null   struct{}
)

// render writes a reply in RESP 2 or 3.
func render(b []byte, v any, resp3 bool) []byte {
	switch v := v.(type) {
	case status:
		return fmt.Appendf(b, "+%s\r\n", string(v))
	case fault:
		return fmt.Appendf(b, "-%s\r\n", string(v))
	case int64:
		return fmt.Appendf(b, ":%d\r\n", v)
	case string:
		return fmt.Appendf(b, "$%d\r\n%s\r\n", len(v), v)
	case null:
		if resp3 {
			return append(b, "_\r\n"...)
		}
		return append(b, "$-1\r\n"...)
	case push:
		if !resp3 {
			return render(b, []any(v), resp3)
		}
		b = fmt.Appendf(b, ">%d\r\n", len(v))
		for _, x := range v {
			b = render(b, x, resp3)
		}
		return b
	case []any:
		b = fmt.Appendf(b, "*%d\r\n", len(v))
		for _, x := range v {
			b = render(b, x, resp3)
		}
		return b
	}
	panic(fmt.Sprintf("sim: no reply: %T", v))
}
