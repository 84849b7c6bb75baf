package faults_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// Servers that not everybody may talk to.

// least are the rights that a Locker needs without waking others at a release, on keys that begin with "app:".
var least = []string{"ACL", "SETUSER", "least", "on", ">secret", "resetchannels", "~app:*", "-@all", "+set", "+eval", "+get", "+pttl", "+pexpire", "+del"}

// asLeast starts a child that works as the user with the least rights.
func (r *round) asLeast() (*redistest.Server, *child, *observer) {
	r.Helper()
	s := redistest.Start(r)
	_, err := s.Do(least...)
	require.NoError(r, err)
	e := single(s.Addr())
	e.Username, e.Password = "least", "secret"
	c := r.hold(e, func(j *job) { j.Prefix = "app:" })
	o := r.observe(c, single(s.Addr()))
	c.steady()
	return s, c, o
}

// Six rights on the keys with the prefix are enough for a whole life.
func TestAUserWithTheLeastRightsHoldsLeases(t *testing.T) {
	rounds(t, func(r *round) {
		_, c, _ := r.asLeast()
		c.outlast()
		require.Empty(r, c.said("unrenewed", ""))
		c.kept()
	})
}

// A user who is taken away, with his connections, for half a TTL loses nothing.
func TestAUserIsTakenAwayForHalfATTL(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.asLeast()
		_, err := s.Do("ACL", "DELUSER", "least")
		require.NoError(r, err)
		time.Sleep(ttl / 2)
		_, err = s.Do(least...)
		require.NoError(r, err)
		c.outlast()
		require.NotEmpty(r, c.said("unrenewed", ""))
		c.kept()
	})
}

// A user who is taken away for good loses the lease at the end of its trust.
func TestAUserIsTakenAway(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, o := r.asLeast()
		_, err := s.Do("ACL", "DELUSER", "least")
		require.NoError(r, err)
		c.await("ended", 1)
		o.inTime(c, "unconfirmed")
		c.endedBecause("WRONGPASS")
	})
}

// overTLS starts a child that works over TLS, and an observer that does not.
func (r *round) overTLS() (*redistest.TLS, *child, *observer) {
	r.Helper()
	s := redistest.StartTLS(r)
	c := r.hold(endpoint{Kind: "single", Addrs: []string{s.TLSAddr()}, CA: s.CA})
	o := r.observe(c, single(s.Addr()))
	c.steady()
	return s, c, o
}

// TLS changes nothing. Connections that are killed are replaced, with a new handshake.
func TestLeasesOverTLSOutliveTheirConnections(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, _ := r.overTLS()
		for end := time.Now().Add(2 * ttl); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			_, err := s.Do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			require.NoError(r, err)
		}
		c.kept()
	})
}

// A server that stands still answers no handshake either.
func TestAServerIsStoppedUnderLeasesOverTLS(t *testing.T) {
	rounds(t, func(r *round) {
		s, c, o := r.overTLS()
		_, err := s.Do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") // new connections have to be made
		require.NoError(r, err)
		s.Pause()
		c.await("ended", 1)
		s.Resume()
		o.inTime(c, "unconfirmed")
	})
}

// A server whose certificate is not trusted gets no command: the acquisition fails with that error, and is neither
// held by another nor unknown.
func TestAServerThatIsNotTrustedGetsNoLease(t *testing.T) {
	rounds(t, func(r *round) {
		s, other := redistest.StartTLS(r), redistest.StartTLS(r)
		c := r.start(job{Does: "hold", Server: endpoint{Kind: "single", Addrs: []string{s.TLSAddr()}, CA: other.CA}, Keys: []string{"orders"}, TTL: ttl})
		c.await("failed", 1)
		failed := c.said("failed", "")[0]
		require.Equal(r, "other", failed.Reason, failed.Err)
		require.Contains(r, failed.Err, "certificate")
		require.Equal(r, time.Duration(-2), s.PTTL("orders"))
	})
}
