package faults_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// Two processes that acquire, renew and release the same keys as fast as they can never hold one at the same time,
// whatever happens to them, to the server and to the network between, as long as Redis keeps a key for its TTL. When it
// is over, nothing is left behind for longer than a TTL.
func TestTwoProcessesNeverHoldAKeyAtOnceWhateverHappens(t *testing.T) {
	const ttl = time.Second / 2
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		j := job{Does: "churn", TTL: ttl, Keys: []string{"orders:0", "orders:1", "orders:2"}, Journal: r.journal()}
		var children []*child
		var proxies []*faultproxy.Proxy
		for _, name := range []string{"first", "second"} {
			p := faultproxy.Start(r, s.Addr())
			j.Name, j.Server = name, single(p.Addr())
			children, proxies = append(children, r.start(j)), append(proxies, p)
		}
		for _, c := range children {
			c.await("acquired", 1)
		}
		stop := func(pause, resume func()) {
			pause()
			time.Sleep(rand.N(ttl * 3 / 2))
			resume()
		}
		late := func() time.Duration { return rand.N(ttl / 2) }
		happens := []func(c *child, p *faultproxy.Proxy){
			func(*child, *faultproxy.Proxy) { stop(s.Pause, s.Resume) },
			func(c *child, _ *faultproxy.Proxy) { stop(c.Pause, c.Resume) },
			func(_ *child, p *faultproxy.Proxy) { p.ResetConns() },
			func(_ *child, p *faultproxy.Proxy) { p.Silence() },
			func(_ *child, p *faultproxy.Proxy) { stop(p.BlackHole, p.Clear) },
			func(_ *child, p *faultproxy.Proxy) { stop(func() { p.SetReplies(faultproxy.Drop) }, p.Clear) },
			func(_ *child, p *faultproxy.Proxy) { stop(func() { p.SetRequests(faultproxy.Hold) }, p.Clear) },
			func(_ *child, p *faultproxy.Proxy) { stop(func() { p.SetReplies(faultproxy.Hold) }, p.Clear) },
			func(_ *child, p *faultproxy.Proxy) { stop(func() { p.DelayReplies(late) }, p.Clear) },
			func(_ *child, p *faultproxy.Proxy) { stop(func() { p.DelayRequests(late) }, p.Clear) },
			func(_ *child, p *faultproxy.Proxy) { stop(p.Refuse, p.Accept) },
			func(*child, *faultproxy.Proxy) {
				_, err := s.Do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
				require.NoError(r, err)
			},
		}
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
			i := rand.N(len(children))
			happens[rand.N(len(happens))](children[i], proxies[i])
			time.Sleep(rand.N(50 * time.Millisecond)) // in peace
		}
		for i, c := range children {
			proxies[i].Clear()
			c.tell("release")
			c.await("churned", 1)
		}
		client := r.operator(single(s.Addr()))
		left, err := client.PTTL(context.Background(), j.Keys[0]).Result()
		require.NoError(r, err)
		require.LessOrEqual(r, left, ttl)
		r.exclusive(j.Journal, j.Keys)
		require.Eventually(r, func() bool {
			n, err := client.Exists(context.Background(), j.Keys...).Result()
			return err == nil && n == 0
		}, patience, 10*time.Millisecond)
	})
}
