package redislease

import (
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func resolved(t testing.TB, change func(*config)) *config {
	c := defaults
	change(&c)
	require.NoError(t, c.resolve())
	return &c
}

func TestTheScheduleOfALease(t *testing.T) {
	const s = time.Second
	for _, test := range []struct {
		name   string
		change func(*config)
		steps  func(*schedule)
		now    time.Duration
		inFly  int
		free   time.Duration
		due    bool
		wake   time.Duration
		end    time.Duration
		capped bool
	}{
		{name: "nothing is due at first", now: 2 * s, wake: 11 * s, end: 28 * s},
		{name: "a renewal is due an interval after the send", now: 11 * s, due: true, wake: 11 * s, end: 28 * s},
		{name: "and as late as trust lasts", now: 28*s - 1, due: true, wake: 11 * s, end: 28 * s},
		{name: "but not after it", now: 28 * s, wake: 11 * s, end: 28 * s},
		{name: "full jitter makes the first by half an interval earlier",
			steps: func(sc *schedule) { sc.confirm(s, 1) }, now: 6 * s, due: true, wake: 6 * s, end: 28 * s},
		{name: "and the others by an eighth",
			steps: func(sc *schedule) { sc.count = 1; sc.confirm(s, 1) }, now: 9*s + 750*time.Millisecond, due: true, wake: 9*s + 750*time.Millisecond, end: 28 * s},
		{name: "a silent one is joined after a tenth of the TTL",
			steps: func(sc *schedule) { sc.begin(11 * s) }, now: 12 * s, inFly: 1, wake: 14 * s, end: 28 * s},
		{name: "three are enough",
			steps: func(sc *schedule) { sc.begin(11 * s) }, now: 20 * s, inFly: 3, wake: 28 * s, end: 28 * s},
		{name: "until one of them is as old as a TTL",
			steps: func(sc *schedule) { sc.begin(11 * s) }, now: 20 * s, inFly: 3, free: 21 * s, wake: 21 * s, end: 28 * s},
		{name: "and the next is due",
			steps: func(sc *schedule) { sc.begin(11 * s) }, now: 12 * s, inFly: 3, free: 13 * s, wake: 14 * s, end: 28 * s},
		{name: "a failed one is repeated soon",
			steps: func(sc *schedule) { sc.begin(11 * s); sc.failed(11*s, 0) }, now: 11 * s, wake: 11*s + 30*s/320, end: 28 * s},
		{name: "or sooner",
			steps: func(sc *schedule) { sc.begin(11 * s); sc.failed(11*s, 1) }, now: 11 * s, wake: 11*s + 30*s/640, end: 28 * s},
		{name: "and never later than after a twentieth of the TTL",
			steps: func(sc *schedule) {
				for range 1000 {
					sc.begin(11 * s)
					sc.failed(11*s, 0)
				}
			}, now: 11 * s, wake: 11*s + 30*s/20, end: 28 * s},
		{name: "and never for more than half of the trust that is left",
			steps: func(sc *schedule) {
				for range 10 {
					sc.begin(27*s + 600*time.Millisecond)
					sc.failed(27*s+600*time.Millisecond, 0)
				}
			}, now: 27*s + 600*time.Millisecond, wake: 27*s + 800*time.Millisecond, end: 28 * s},
		{name: "another that fails meanwhile puts nothing off",
			steps: func(sc *schedule) { sc.begin(11 * s); sc.failed(11*s, 0); sc.failed(11*s+1, 0) }, now: 11*s + 1,
			wake: 11*s + 30*s/320, end: 28 * s},
		{name: "a confirmed one moves trust and starts the pauses anew",
			steps: func(sc *schedule) {
				sc.failed(11*s, 0)
				sc.failed(11*s, 0)
				sc.confirm(12*s, 0)
				sc.failed(13*s, 0)
			},
			now: 13 * s, wake: 13*s + 30*s/320, end: 39 * s},
		{name: "an older answer moves nothing back",
			steps: func(sc *schedule) { sc.confirm(12*s, 0); sc.confirm(5*s, 0) }, now: 13 * s, wake: 22 * s, end: 39 * s},
		{name: "no renewal is due when the caller's context has ended",
			steps: func(sc *schedule) { sc.stopped = true }, now: 20 * s, wake: 28 * s, end: 28 * s},
		{name: "what need not be exact is moved to the grid",
			steps: func(sc *schedule) {
				sc.config.tick, sc.offset = 500*time.Millisecond, 300*time.Millisecond
				sc.confirm(2*s, 0.1)
			},
			now: 11*s + 200*time.Millisecond, due: true, wake: 11*s + 200*time.Millisecond, end: 29 * s},
		{name: "a silent one is joined at a moment of the grid, too",
			steps: func(sc *schedule) {
				sc.config.tick, sc.offset = 500*time.Millisecond, 300*time.Millisecond
				sc.begin(11 * s)
			},
			now: 12 * s, inFly: 1, wake: 13*s + 700*time.Millisecond, end: 28 * s},
		{name: "a late answer is not followed at once by another, if one is on its way",
			steps: func(sc *schedule) { sc.count = 1; sc.begin(11 * s); sc.begin(18 * s); sc.confirm(7*s, 0) }, now: 18 * s, inFly: 1,
			wake: 21 * s, end: 34 * s},
		{name: "but while trust lasts",
			steps: func(sc *schedule) { sc.count = 1; sc.begin(11 * s); sc.begin(26 * s); sc.confirm(7*s, 0) }, now: 26 * s, inFly: 1,
			wake: 27*s + 250*time.Millisecond, end: 34 * s},
		{name: "trust ends when it ends",
			steps: func(sc *schedule) {
				sc.config.tick, sc.offset, sc.stopped = 500*time.Millisecond, 300*time.Millisecond, true
				sc.confirm(s+1, 0)
			}, now: 27 * s, wake: 28*s + 1, end: 28*s + 1},
		{name: "the longest hold ends a lease that is trusted",
			change: func(c *config) { c.maxHold = 15 * s }, now: 15 * s, due: true, wake: 11 * s, end: 16 * s},
		{name: "and at its end nothing is due",
			change: func(c *config) { c.maxHold = 15 * s }, now: 16 * s, wake: 16 * s, end: 16 * s, capped: true},
		{name: "a hold shorter than the interval is renewed never",
			change: func(c *config) { c.maxHold = 1 }, now: s, wake: s + 1, end: s + 1},
		{name: "the most renewals cap it",
			change: func(c *config) { c.maxRenewals = 2 }, steps: func(sc *schedule) { sc.count = 2 },
			now: 12 * s, wake: 28 * s, end: 28 * s, capped: true},
		{name: "none is allowed",
			change: func(c *config) { c.maxRenewals = 0 }, now: 11 * s, wake: 28 * s, end: 28 * s, capped: true},
		{name: "without a longest hold there is no end but trust's",
			change: func(c *config) { c.maxHold = NoMaxHold }, now: 1000 * time.Hour, steps: func(sc *schedule) { sc.confirm(1000*time.Hour, 0) },
			wake: 1000*time.Hour + 10*s, end: 1000*time.Hour + 27*s},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.change == nil {
				test.change = func(*config) {}
			}
			sc := schedule{config: resolved(t, test.change), start: s}
			sc.config.tick = 1
			sc.confirm(s, 0)
			if test.steps != nil {
				test.steps(&sc)
			}
			if test.free == 0 {
				test.free = forever
			}
			require.Equal(t, test.due, sc.due(test.now, test.inFly), "due")
			require.Equal(t, test.wake, sc.wake(test.now, test.inFly, test.free), "wake")
			require.Equal(t, test.end, sc.end(), "end")
			require.Equal(t, test.capped, sc.capped(test.now), "capped")
		})
	}
}

func TestTheScheduleOfExtremeDurations(t *testing.T) {
	extremes := []time.Duration{minTTL, minTTL + 1, 7 * time.Second, time.Hour, 100 * 365 * 24 * time.Hour, math.MaxInt64 / 2, math.MaxInt64}
	for _, ttl := range extremes {
		for _, hold := range []time.Duration{1, time.Millisecond, time.Hour, math.MaxInt64} {
			c := resolved(t, func(c *config) { c.ttl, c.maxHold = ttl, hold })
			for _, sent := range []time.Duration{0, 1, time.Hour, math.MaxInt64 / 2, math.MaxInt64 - 1, math.MaxInt64} {
				for i, spread := range []float64{0, 0.5, math.Nextafter(1, 0)} {
					offset := []time.Duration{0, -time.Hour, math.MaxInt64}[i]
					sc := schedule{config: c, start: sent, offset: offset}
					sc.confirm(sent, spread)
					require.GreaterOrEqual(t, sc.end(), sent, "no overflow")
					require.GreaterOrEqual(t, sc.renewAt, sent)
					for range 70 {
						sc.failed(sent, spread)
						require.GreaterOrEqual(t, sc.renewAt, sent)
						require.LessOrEqual(t, sc.renewAt-sent, max(c.ttl/20, time.Millisecond))
						if sent < math.MaxInt64 {
							require.Greater(t, sc.renewAt, sent, "never a tight loop")
						}
					}
					sc.begin(sent)
					require.GreaterOrEqual(t, sc.wake(sent, 1, forever), min(sent, sc.end()))
				}
			}
		}
	}
}

func TestAnAcquisitionsTimesFollowTheTTL(t *testing.T) {
	for _, test := range []struct {
		ttl, silence, haste, patience, grace, release time.Duration
	}{
		{100 * time.Millisecond, 50 * time.Millisecond, 50 * time.Millisecond, 90 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond},
		{3 * time.Second, 300 * time.Millisecond, 300 * time.Millisecond, 2700 * time.Millisecond, 100 * time.Millisecond, 1500 * time.Millisecond},
		{30 * time.Second, 3 * time.Second, time.Second, 5 * time.Second, 100 * time.Millisecond, 2 * time.Second},
		{math.MaxInt64, time.Duration(math.MaxInt64).Truncate(time.Millisecond) / 10, time.Second, 5 * time.Second, 100 * time.Millisecond, 2 * time.Second},
	} {
		c := resolved(t, func(c *config) { c.ttl = test.ttl })
		require.Equal(t, test.silence, c.silence())
		require.Equal(t, test.haste, c.haste())
		require.Equal(t, test.patience, c.patience())
		require.Equal(t, test.grace, c.grace())
		require.Equal(t, test.release, c.releaseBound())
	}
}

func TestTheDefaultBackoffGrowsWithJitterAndHasAnEnd(t *testing.T) {
	for _, random := range []float64{0, 0.5, math.Nextafter(1, 0)} {
		k := &Locker{clock: clock{random: func() float64 { return random }}}
		a := asking{acquisition: &acquisition{target: &target{locker: k, config: resolved(t, func(*config) {})}}}
		for attempt := range 200 {
			d := a.pause()
			require.LessOrEqual(t, d, pollMost)
			require.GreaterOrEqual(t, d, min(pollFirst<<min(attempt, 10), pollMost)/2)
		}
		a.held, a.pttl = true, 100*time.Millisecond
		require.LessOrEqual(t, a.pause(), 100*time.Millisecond+pollFirst, "never later than the holder's TTL and a tick")
		require.GreaterOrEqual(t, a.pause(), 100*time.Millisecond)
	}
}

func TestElapsedTimeIsTheGreaterUnlessAThirdClockDecides(t *testing.T) {
	const tolerance = 100 * time.Millisecond
	for _, test := range []struct {
		name                  string
		monotonic, wall, boot time.Duration
		noBoot                bool
		want                  time.Duration
	}{
		{name: "all the same", monotonic: 10, wall: 10, boot: 10, want: 10},
		{name: "the wall clock is a little ahead", monotonic: 10, wall: 10 + tolerance, want: 10 + tolerance},
		{name: "the wall clock is a little behind", monotonic: 10 + tolerance, wall: 10, want: 10 + tolerance},
		{name: "suspended", monotonic: 10, wall: time.Hour, boot: time.Hour, want: time.Hour},
		{name: "the wall clock was set forward", monotonic: 10, wall: time.Hour, boot: 11, want: 11},
		{name: "the wall clock was set back", monotonic: 10, wall: -time.Hour, boot: 11, want: 11},
		{name: "the third clock is never believed to be slower", monotonic: 10, wall: time.Hour, boot: 9, want: 10},
		{name: "suspended, without a third clock", monotonic: 10, wall: time.Hour, noBoot: true, want: time.Hour},
		{name: "set back, without a third clock", monotonic: 10, wall: -time.Hour, noBoot: true, want: 10},
		{name: "suspended while the wall clock was set back", monotonic: 10, wall: -time.Hour, boot: time.Minute, want: time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := clock{
				since: func(*instant) (time.Duration, time.Duration, time.Time) { return test.monotonic, test.wall, time.Now() },
				boot:  func() (time.Duration, bool) { return 7*time.Hour + test.boot, !test.noBoot },
			}
			var ahead atomic.Int64
			require.Equal(t, test.want, c.elapsed(&instant{boot: 7 * time.Hour}, tolerance, &ahead))
		})
	}
}

func TestReadingsNeverFallWhateverTheWallClockDoes(t *testing.T) {
	var monotonic, wall time.Duration
	c := clock{
		since: func(*instant) (time.Duration, time.Duration, time.Time) { return monotonic, wall, time.Now() },
		boot:  func() (time.Duration, bool) { return 0, false },
	}
	var ahead atomic.Int64
	last := time.Duration(0)
	for _, step := range []time.Duration{0, 15 * time.Second, -15 * time.Second, 50 * time.Millisecond, -time.Hour, 2 * time.Hour, -time.Hour} {
		monotonic += time.Second
		wall += time.Second + step
		reading := c.elapsed(&instant{}, 100*time.Millisecond, &ahead)
		require.GreaterOrEqual(t, reading-last, time.Second, "at least what the monotonic clock counted")
		last = reading
	}
}

func TestTheSystemsClocksAgree(t *testing.T) {
	var anchor atomic.Pointer[instant]
	base := systemClock.now(&anchor)
	time.Sleep(20 * time.Millisecond)
	monotonic, wall, _ := systemClock.since(&base)
	require.GreaterOrEqual(t, monotonic, 20*time.Millisecond)
	require.InDelta(t, monotonic, wall, float64(time.Second))
	if boot, ok := systemClock.boot(); ok {
		require.GreaterOrEqual(t, boot-base.boot, 20*time.Millisecond)
	}
}

func TestTheBootClockIsReckonedUntilTheOthersPart(t *testing.T) {
	// What passed is kept here: a suspend stops the monotonic clock, a step is of the wall clock.
	var monotonic, wall, boot time.Duration
	var reads int
	c := clock{
		since: func(base *instant) (time.Duration, time.Duration, time.Time) { return monotonic, wall, time.Now() },
		boot:  func() (time.Duration, bool) { reads++; return boot, true },
	}
	var anchor atomic.Pointer[instant]
	now := func() time.Duration {
		before := anchor.Load()
		at := c.now(&anchor)
		require.LessOrEqual(t, at.boot, boot, "it may be taken for longer ago than it is, never for shorter")
		if anchor.Load() != before { // the readings are since then
			monotonic, wall = 0, 0
		}
		return boot - at.boot
	}
	pass := func(d time.Duration) { monotonic, wall, boot = monotonic+d, wall+d, boot+d }
	suspend := func(d time.Duration) { wall, boot = wall+d, boot+d }

	require.Zero(t, now())
	require.Equal(t, 1, reads)
	for range 1000 {
		pass(time.Minute)
		require.Zero(t, now())
	}
	require.Equal(t, 1, reads)
	suspend(time.Hour)
	require.Zero(t, now())
	require.Equal(t, 2, reads)
	wall -= time.Hour
	require.Zero(t, now())
	require.Equal(t, 3, reads)
	for range 3 { // they add up
		suspend(400 * time.Microsecond)
		require.Less(t, now(), anchorDrift)
	}
	require.Equal(t, 4, reads)
	suspend(time.Hour)
	wall -= time.Hour
	require.Equal(t, time.Hour, now(), "hidden")
	require.Equal(t, 4, reads)
}
