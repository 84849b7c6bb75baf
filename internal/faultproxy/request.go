package faultproxy

import (
	"slices"
	"strings"
	"time"
)

// Request is one command that a client sent.
type Request struct {
	Seq  int      // its number among all requests of the proxy, from 1
	Conn int      // the number of its connection, from 1 in the order of their arrival
	N    int      // its number on its connection, from 1
	Args []string // the name first; not to be changed

	At        time.Time // when it arrived
	Forwarded time.Time // when it was sent on to the server; zero: not yet, or never
	Replied   time.Time // when the server's reply arrived at the proxy, so it has been executed; zero: not yet, or never
}

// Name returns the command in upper case: "SET".
func (r Request) Name() string {
	if len(r.Args) == 0 {
		return ""
	}
	return strings.ToUpper(r.Args[0])
}

// Matcher says whether a request is meant. A matcher is never called concurrently and must not call the proxy.
type Matcher func(Request) bool

// Any matches every request.
func Any() Matcher { return func(Request) bool { return true } }

// Command matches the requests of one of the given commands, in any case.
func Command(names ...string) Matcher {
	return func(r Request) bool {
		return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, r.Name()) })
	}
}

// ArgContains matches the requests with an argument (the name is none) that contains text. It tells scripts apart:
// Command("EVAL").And(ArgContains("PEXPIRE")).
func ArgContains(text string) Matcher {
	return func(r Request) bool {
		return len(r.Args) > 1 &&
			slices.ContainsFunc(r.Args[1:], func(arg string) bool { return strings.Contains(arg, text) })
	}
}

// OnConn matches the requests of one connection.
func OnConn(conn int) Matcher { return func(r Request) bool { return r.Conn == conn } }

// Not matches what m does not.
func Not(m Matcher) Matcher { return func(r Request) bool { return !m(r) } }

// And matches what m and every one of others match.
func (m Matcher) And(others ...Matcher) Matcher {
	return func(r Request) bool {
		return m(r) && !slices.ContainsFunc(others, func(other Matcher) bool { return !other(r) })
	}
}

// Forwarded matches, in Count and WaitFor, the requests that were sent on to the server.
func Forwarded(r Request) bool { return !r.Forwarded.IsZero() }

// Replied matches, in Count and WaitFor, the requests that the server has answered, so executed, whatever became of
// the reply.
func Replied(r Request) bool { return !r.Replied.IsZero() }
