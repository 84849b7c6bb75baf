package faultproxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Log returns all requests so far, in the order of their arrival.
func (p *Proxy) Log() []Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	log := make([]Request, len(p.log))
	for i, req := range p.log {
		log[i] = *req
	}
	return log
}

// Count returns how many requests so far match: Count(Command("SET")), Count(Command("SET").And(Forwarded)).
func (p *Proxy) Count(m Matcher) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, req := range p.log {
		if m(*req) {
			n++
		}
	}
	return n
}

// WaitFor returns the first request that matches: one that has been seen already, or else the next. It fails the test
// if there is none within timeout.
func (p *Proxy) WaitFor(t testing.TB, m Matcher, timeout time.Duration) Request {
	t.Helper()
	return p.WaitForN(t, m, 1, timeout)
}

// WaitForN is WaitFor for the n-th request that matches, counted from 1 and from the start of the proxy.
func (p *Proxy) WaitForN(t testing.TB, m Matcher, n int, timeout time.Duration) Request {
	t.Helper()
	var found Request
	seen := 0
	ok := p.wait(timeout, func() bool {
		seen = 0
		for _, req := range p.log {
			if m(*req) {
				if seen++; seen == n {
					found = *req
					return true
				}
			}
		}
		return false
	})
	if !ok {
		t.Fatalf("faultproxy: %d requests matched within %v, want %d; %s", seen, timeout, n, p.summary())
	}
	return found
}

// wait returns whether done, called with p.mu held, becomes true within timeout.
func (p *Proxy) wait(timeout time.Duration, done func() bool) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		p.mu.Lock()
		ok, changed := done(), p.changed
		p.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-timer.C:
			return false
		}
	}
}

// summary lists the commands seen, for the message of a failed wait.
func (p *Proxy) summary() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	counts := map[string]int{}
	for _, req := range p.log {
		counts[req.Name()]++
	}
	var parts []string
	for name, n := range counts {
		parts = append(parts, fmt.Sprintf("%s %d", name, n))
	}
	slices.Sort(parts)
	return "seen: " + strings.Join(parts, ", ")
}

// arrive logs a request and asks the rules what is to happen to it.
func (p *Proxy) arrive(req Request) (*Request, plan) {
	p.mu.Lock()
	defer p.mu.Unlock()
	req.Seq, req.At = len(p.log)+1, time.Now()
	logged := &req
	p.log = append(p.log, logged)
	defer p.notify()
	for _, rule := range p.rules {
		if pl, ok := rule.apply(req); ok {
			return logged, pl
		}
	}
	return logged, plan{}
}

func (p *Proxy) markForwarded(req *Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if req.Forwarded.IsZero() {
		req.Forwarded = time.Now()
		p.notify()
	}
}

func (p *Proxy) markReplied(req *Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !req.Replied.IsZero() {
		return // a further confirmation of a subscription
	}
	req.Replied = time.Now()
	if req.Forwarded.IsZero() {
		req.Forwarded = req.Replied // the reply was faster than the goroutine that sent the request
	}
	p.notify()
}
