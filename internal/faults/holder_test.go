package faults_test

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// Faults of the holder's own process.

// line is one line of a journal, in the order in which the writes landed.
type line struct {
	name, what, key string
	before, after   time.Time
}

// journal makes a file for children to append to.
func (r *round) journal() string {
	r.Helper()
	f, err := os.CreateTemp(r.TempDir(), "journal")
	require.NoError(r, err)
	require.NoError(r, f.Close())
	return f.Name()
}

func (r *round) lines(journal string) (lines []line) {
	r.Helper()
	text, err := os.ReadFile(journal)
	require.NoError(r, err)
	for s := range strings.Lines(string(text)) {
		if !strings.HasSuffix(s, "\n") {
			continue // cut by a kill
		}
		f := strings.Fields(s)
		require.Len(r, f, 5, s)
		lines = append(lines, line{f[0], f[1], f[2], r.time(f[3]), r.time(f[4])})
	}
	return lines
}

func (r *round) time(text string) time.Time {
	r.Helper()
	ns, err := strconv.ParseInt(text, 10, 64)
	require.NoError(r, err)
	return time.Unix(0, ns)
}

func count(lines []line, name, key string) (n int) {
	for _, l := range lines {
		if l.name == name && l.key == key && l.what == "write" {
			n++
		}
	}
	return n
}

// awaitWrites waits until a child has written n lines about each of its keys that it has not lost.
func (c *child) awaitWrites(n int) {
	c.r.Helper()
	require.Eventually(c.r, func() bool {
		lines := c.r.lines(c.Journal)
		for _, key := range c.Keys {
			if count(lines, c.Name, key) < n && len(c.said("ended", key)) == 0 {
				return false
			}
		}
		return true
	}, patience, 50*time.Millisecond, "the writes of %s: %s", c.Name, c.summary())
}

// A process that was stopped for longer than its lease lived runs code before its timers fire. Err reads the clock
// itself, so that no write goes out whose check began after another holder had begun. What Err cannot stop is the one
// write whose check came before the stop and which lands after it: that is for the place where it lands to refuse.
func TestAHolderIsStoppedAndAnotherBegins(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		j := job{Does: "write", Name: "first", Server: single(s.Addr()), Keys: []string{"orders:0", "orders:1", "orders:2"}, TTL: time.Second, Journal: r.journal()}
		first := r.start(j)
		first.await("acquired", 1)
		j.Name, j.Wait = "second", true
		second := r.start(j)
		first.awaitWrites(20)
		time.Sleep(rand.N(time.Second)) // anywhere between two renewals

		first.Pause()
		second.await("acquired", 1)
		second.awaitWrites(10)
		first.Resume()
		first.await("ended", 1)
		second.awaitWrites(30)
		for _, rec := range first.said("ended", "") {
			require.Contains(r, []string{"unconfirmed", "taken"}, rec.Reason, rec.Err)
		}
		second.lostToLateness()
		second.Kill()
		r.checkJournal(j.Journal, j.Keys)
	})
}

// checkJournal checks that the first holder wrote nothing of which it had begun to ask after the second had begun.
func (r *round) checkJournal(journal string, keys []string) {
	r.Helper()
	lines := r.lines(journal)
	for _, key := range keys {
		wrong, gaps := lateWrites(lines, key)
		require.Empty(r, wrong, "%s: checked after another holder had begun, and allowed", key)
		require.LessOrEqual(r, len(gaps), 1, "%s: between a check and its write there is one write", key)
		for _, l := range gaps {
			r.Logf("%s: a write landed in the gap between check and write: checked at %v", key, l.before)
		}
		require.Positive(r, count(lines, "second", key), "%s: the second holder never wrote", key)
		total.add(func(t *totals) { t.gaps += len(gaps); t.writes += count(lines, "first", key) })
	}
}

// lateWrites returns the writes of the first holder that landed after the second had begun: the wrong ones, whose check
// began after that, too, and those in the gap, whose check began before.
func lateWrites(lines []line, key string) (wrong, gaps []line) {
	var begun time.Time // the second
	for _, l := range lines {
		switch {
		case l.key != key:
		case l.name == "second" && l.what == "begin":
			begun = l.after
		case l.name != "first" || begun.IsZero():
		case l.before.After(begun):
			wrong = append(wrong, l)
		default:
			gaps = append(gaps, l)
		}
	}
	return wrong, gaps
}

func TestAWriteInTheGapIsToldFromAWrongAnswer(t *testing.T) {
	at := func(ms int64) time.Time { return time.UnixMilli(ms) }
	lines := []line{
		{"first", "begin", "k", at(0), at(0)},
		{"first", "write", "k", at(1), at(2)},
		{"second", "begin", "k", at(10), at(10)},
		{"first", "write", "k", at(9), at(11)},  // the check itself was stopped
		{"first", "write", "k", at(12), at(13)}, // wrong
		{"first", "write", "other", at(14), at(15)},
	}
	wrong, gaps := lateWrites(lines, "k")
	require.Equal(t, lines[4:5], wrong)
	require.Equal(t, lines[3:4], gaps)
}

// A stop that ends while trust lasts costs nothing: the renewal that was due goes out, and work goes on.
func TestAHolderIsStoppedForAQuarterOfATTL(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		c := r.hold(single(s.Addr()))
		c.steady()
		c.Pause()
		time.Sleep(ttl / 4)
		c.Resume()
		c.awaitRenewal()
		c.outlast()
		c.kept()
	})
}

// A holder that is stopped and finds, when it goes on, that its key has been taken, leaves it alone: neither the
// renewals that were on their way nor its release touch it.
func TestAStoppedHoldersReleaseLeavesTheNextHoldersKey(t *testing.T) {
	rounds(t, func(r *round) {
		_, c, o := r.begin()
		c.Pause()
		for _, key := range c.Keys {
			o.awaitThat("the next holder of "+key, func() bool { return o.last(key) == next })
		}
		c.Resume()
		c.await("ended", 1)
		c.tell("release")
		c.await("released", 1)
		for _, rec := range c.said("released", "") {
			require.Contains(r, []string{"unconfirmed", "taken"}, rec.Reason, rec.Err)
		}
		o.undisturbed(c)
	})
}

// kill kills a child and returns when the server has executed all that had come from it.
func (r *round) kill(c *child, client redis.UniversalClient) time.Time {
	r.Helper()
	c.Kill()
	for range 2 { // what was there before the first is executed before the second
		require.NoError(r, client.Ping(context.Background()).Err())
	}
	return time.Now()
}

// The key of a holder that is killed lapses within a TTL, since nothing renews it, and whoever waits for it gets it then.
func TestAHolderIsKilled(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		e := single(s.Addr())
		c := r.hold(e)
		c.steady()
		k, err := redislease.New(r.operator(e), redislease.WithTTL(ttl))
		require.NoError(r, err)
		watched := r.watch(c, e)

		killed := r.kill(c, r.operator(e))
		lease, err := k.Acquire(context.Background(), c.Keys[0])
		require.NoError(r, err)
		r.Logf("acquired %v after the holder was killed", time.Since(killed))
		require.NoError(r, lease.Release())
		for _, key := range c.Keys {
			watched.awaitThat("the end of "+key, func() bool { return watched.last(key) == "" })
			token := c.said("acquired", key)[0].Token
			for _, seen := range watched.seen(key) {
				if seen.value == token && seen.sent.After(killed) {
					require.False(r, seen.sent.Add(seen.pttl).After(killed.Add(ttl)), "%s lives for longer than a TTL", key)
				}
			}
		}
	})
}

// Whatever a process was doing when it was killed, acquiring, renewing or releasing, what it leaves behind is gone within
// a TTL.
func TestAHolderIsKilledAtAnyMoment(t *testing.T) {
	rounds(t, func(r *round) {
		s := redistest.Start(r)
		e := single(s.Addr())
		client := r.operator(e)
		left := 0
		for range 5 {
			c := r.start(job{Does: "churn", Name: "churn", Server: e, Keys: []string{"orders:0", "orders:1", "orders:2"}, TTL: ttl / 4, Journal: r.journal()})
			c.await("acquired", 1)
			time.Sleep(rand.N(50 * time.Millisecond))
			killed := r.kill(c, client)
			for _, key := range c.Keys {
				sent := time.Now()
				pttl, err := client.PTTL(context.Background(), key).Result()
				require.NoError(r, err)
				require.NotEqual(r, time.Duration(-1), pttl, "a key without a TTL")
				require.False(r, sent.Add(pttl).After(killed.Add(ttl/4)), "%s lives for longer than a TTL", key)
			}
			n, err := client.Exists(context.Background(), c.Keys...).Result()
			require.NoError(r, err)
			left += int(n)
			require.Eventually(r, func() bool {
				n, err := client.Exists(context.Background(), c.Keys...).Result()
				return err == nil && n == 0
			}, patience, time.Millisecond)
		}
		r.Logf("%d keys were left behind, and lapsed", left)
	})
}
