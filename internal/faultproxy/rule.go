package faultproxy

import (
	"slices"
	"testing"
	"time"
)

// Rule says what happens to the requests that match. It is made by Proxy.On and takes effect with Do:
//
//	lost := p.On(faultproxy.Command("SET")).Times(1).Do(faultproxy.DropReply())
type Rule struct {
	p     *Proxy
	match Matcher

	// Guarded by p.mu.
	actions []Action
	skip    int
	times   int // negative: no limit
	hits    int
	gate    chan struct{} // closed and replaced by release
}

// On begins a rule for the requests that m matches. Of several rules the first to match in the order of their Do
// decides, unless its Times are used up.
func (p *Proxy) On(m Matcher) *Rule {
	return &Rule{p: p, match: m, times: -1, gate: make(chan struct{})}
}

// Times limits the rule to the next n requests that match; later ones are left to the rules behind it.
func (r *Rule) Times(n int) *Rule {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.times = n
	return r
}

// Skip leaves the first n requests that match to the rules behind it.
func (r *Rule) Skip(n int) *Rule {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.skip = n
	return r
}

// Do makes the rule take effect, for requests that arrive from now on.
func (r *Rule) Do(actions ...Action) *Rule {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.actions = actions
	if !slices.Contains(r.p.rules, r) {
		r.p.rules = append(r.p.rules, r)
	}
	return r
}

// Hits returns to how many requests the rule has been applied.
func (r *Rule) Hits() int {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	return r.hits
}

// WaitHits waits until the rule has been applied to n requests, and fails the test if that takes longer than timeout.
func (r *Rule) WaitHits(t testing.TB, n int, timeout time.Duration) {
	t.Helper()
	if !r.p.wait(timeout, func() bool { return r.hits >= n }) {
		t.Fatalf("faultproxy: %d hits of the rule within %v, want %d; %s", r.Hits(), timeout, n, r.p.summary())
	}
}

// Release lets go on what HoldRequest and HoldReply have kept back so far. What arrives later is held anew.
func (r *Rule) Release() {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.release()
}

// Remove ends the rule and releases what it holds. Other effects on requests that it was applied to remain.
func (r *Rule) Remove() {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.p.rules = slices.DeleteFunc(r.p.rules, func(other *Rule) bool { return other == r })
	r.release()
}

func (r *Rule) release() {
	close(r.gate)
	r.gate = make(chan struct{})
}

// apply returns the plan for a request, and whether the rule has one for it.
func (r *Rule) apply(req Request) (plan, bool) {
	if r.times == 0 || !r.match(req) {
		return plan{}, false
	}
	if r.skip > 0 {
		r.skip--
		return plan{}, false
	}
	if r.times > 0 {
		r.times--
	}
	r.hits++
	pl := plan{gate: r.gate}
	for _, action := range r.actions {
		action(&pl)
	}
	return pl, true
}
