package faults_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// Faults of the network between a holder and a server that is well. The observer is on the server's side of them.

// beyond is begin with a proxy between the child and the server.
func (r *round) beyond() (*faultproxy.Proxy, *child, *observer) {
	r.Helper()
	s := redistest.Start(r)
	p := faultproxy.Start(r, s.Addr())
	c := r.hold(single(p.Addr()))
	o := r.observe(c, single(s.Addr()))
	c.steady()
	return p, c, o
}

// Nothing arrives, in one direction or in both, and connections stay open: trust runs out. Where only replies get lost
// renewals are executed to the end, and others wait the longer.
func TestTheNetworkIsABlackHole(t *testing.T) {
	for name, fault := range map[string]func(*faultproxy.Proxy){
		"for requests": func(p *faultproxy.Proxy) { p.SetRequests(faultproxy.Drop) },
		"for replies":  func(p *faultproxy.Proxy) { p.SetReplies(faultproxy.Drop) },
		"for both":     (*faultproxy.Proxy).BlackHole,
	} {
		t.Run(name, func(t *testing.T) {
			rounds(t, func(r *round) {
				p, c, o := r.beyond()
				fault(p)
				c.await("ended", 1)
				o.inTime(c, "unconfirmed")
			})
		})
	}
}

// What was held back arrives in the end, under another holder, and changes nothing of it.
func TestTheNetworkDeliversLate(t *testing.T) {
	rounds(t, func(r *round) {
		p, c, o := r.beyond()
		p.SetRequests(faultproxy.Hold)
		c.await("ended", 1)
		o.awaitTaken(c)
		p.Clear()
		n := p.Count(faultproxy.Command("EVAL"))
		p.WaitForN(r, faultproxy.Command("EVAL").And(faultproxy.Forwarded), n, patience)
		o.inTime(c, "unconfirmed")
	})
}

// Renewals that are silent on connections that have fallen silent for ever are joined by others, on new ones.
func TestOpenConnectionsAreSilentForEverWhileNewOnesWork(t *testing.T) {
	rounds(t, func(r *round) {
		p, c, _ := r.beyond()
		p.Silence()
		before := p.Accepted()
		c.outlast()
		c.kept()
		require.Greater(r, p.Accepted(), before)
	})
}

// A connection that is reset costs the command on it, which another follows.
func TestConnectionsAreResetAtRandom(t *testing.T) {
	rounds(t, func(r *round) {
		p, c, _ := r.beyond()
		before := p.Accepted()
		for end := time.Now().Add(2 * ttl); time.Now().Before(end); {
			p.ResetConns()
			time.Sleep(20*time.Millisecond + rand.N(130*time.Millisecond))
		}
		c.kept()
		require.Greater(r, p.Accepted(), before+leases)
	})
}
