package main

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAQuantileIsOneOfTheValues(t *testing.T) {
	values := []time.Duration{40, 10, 30, 20}
	require.EqualValues(t, 20, quantile(values, 0.5))
	require.EqualValues(t, 30, quantile(values, 0.51))
	require.EqualValues(t, 40, quantile(values, 0.99))
	require.EqualValues(t, 40, quantile(values, 1))
	require.EqualValues(t, 10, quantile(values, 0))
	require.Zero(t, quantile(nil, 0.5))
}

func TestAMedianOfAnEvenNumberIsTheMeanOfTheMiddleTwo(t *testing.T) {
	require.EqualValues(t, 2, median([]float64{3, 1, 2}))
	require.EqualValues(t, 2.5, median([]float64{4, 3, 1, 2}))
	require.True(t, math.IsNaN(median(nil)))
}

func TestNumbersHaveThreeDigits(t *testing.T) {
	for v, text := range map[float64]string{0: "0", 1: "1", 0.0123: "0.012", 0.5: "0.50", 1.234: "1.23", 12.34: "12.3",
		123.4: "123", 12345: "12345", 123456: "123k"} {
		require.Equal(t, text, number(v))
	}
}

func TestRatiosAreThoseOfTheSameRound(t *testing.T) {
	table := table{scenario: uncontended, columns: []string{columnCycles}}
	for round, v := range []float64{100, 10, 1000} {
		for adapter, factor := range map[string]float64{"raw": 1, "redislease": float64(round + 1)} {
			table.add(result{"cell", adapter, round, map[string]float64{columnCycles: v * factor, columnAllocs: math.NaN()}, ""})
		}
	}
	rows := table.rows("cell")
	require.Equal(t, "raw", rows[0].adapter)
	require.EqualValues(t, 100, rows[0].values[columnCycles])
	require.EqualValues(t, 1, rows[0].ratios[columnCycles])
	require.EqualValues(t, 100, rows[1].values[columnCycles])
	require.EqualValues(t, 2, rows[1].ratios[columnCycles])
	require.Equal(t, "100 x2", rows[1].text(columnCycles))
	require.Equal(t, "-", rows[1].text(columnAllocs))
}

// at is a moment, in milliseconds.
func at(ms int) time.Time { return time.UnixMilli(int64(ms)) }

func TestAHandoffIsATurnOfAnother(t *testing.T) {
	var o outcome
	last := o.fold([]reply{
		{Turns: []turn{{1, at(0), at(12), at(15)}, {1, at(15), at(16), at(20)}}},
		{Turns: []turn{{2, at(5), at(21), at(30)}}, Waiting: []time.Duration{29 * time.Millisecond}, Failures: 1},
		{Turns: []turn{{3, at(40), at(641), at(650)}, {4, at(5), at(645), at(660)}}},
	}, at(10))
	require.Equal(t, at(645), last)
	require.Equal(t, 5, o.turns)
	require.Equal(t, 4, o.handoffs)
	ms := time.Millisecond
	require.Equal(t, []time.Duration{2 * ms, 1 * ms, 601 * ms, -5 * ms}, o.gaps, "from the release, or from the call if that is later")
	require.Equal(t, 1, o.late)
	require.Equal(t, 1, o.overlaps, "the fifth came before the fourth had released")
	require.Len(t, o.fairness, 1)
	require.InDelta(t, 635.0/20, o.fairness[0], 0.01, "waits: 2, 1, 11, 601, 635 and 29 ms")
	require.Contains(t, o.problem(), "1 overlaps, 1 failed")
}

func TestLatenessCountsFromTheRenewalBefore(t *testing.T) {
	w := watched{interval: 100 * time.Millisecond, from: at(1000), to: at(1200)}
	taken := []time.Time{at(950), at(950), at(500), at(990)}
	w.seen = []renewal{{0, at(1040)}, {1, at(1070)}, {2, at(1050)}, {0, at(1145)}, {2, at(1160)}, {9, at(1100)}}
	ms := time.Millisecond
	require.Equal(t, []time.Duration{
		0,       // 0: 90 ms after it was taken
		20 * ms, // 1: 120 ms
		5 * ms,  // 0: 105 ms
		10 * ms, // 2: 110 ms after a renewal that was the first seen
		30 * ms, // 1: it has not come for 130 ms
		110 * ms,
	}, w.lateness(taken))
}

func TestALineOfMonitorIsTakenApart(t *testing.T) {
	m, ok := parseMonitored("+1764460000.123456 [0 127.0.0.1:40000] \"SET\" \"bench:live:0000042\" \"x\"\r\n")
	require.True(t, ok)
	require.Equal(t, "set", m.name)
	require.False(t, m.inScript)
	require.EqualValues(t, 1764460000123456, m.at.UnixMicro())
	i, ok := liveIndex(m.line)
	require.True(t, ok)
	require.Equal(t, 42, i)
	require.Contains(t, m.line, liveKey(42))
	m, ok = parseMonitored("+1764460000.123456 [0 lua] \"GET\" \"key\"\r\n")
	require.True(t, ok)
	require.True(t, m.inScript)
	for _, line := range []string{"", "+OK\r\n", "+1764460000 [0 lua] \"get\"", "+x.y [0 lua] \"get\""} {
		_, ok := parseMonitored(line)
		require.False(t, ok, line)
	}
	require.True(t, ofConnections("client|setinfo"))
	require.False(t, ofConnections("evalsha"))
}

func TestTheReferenceIsAlwaysPicked(t *testing.T) {
	var names []string
	for _, a := range pick(contended, "redislease*,redsync") {
		names = append(names, a.name)
	}
	require.Equal(t, []string{"raw-try", "redislease", "redislease-ap", "redsync"}, names)
	require.Len(t, pick(live, ""), 7)
	_, err := adapterNamed("nobody")
	require.Error(t, err)
}

func TestFlagsChangeThePlan(t *testing.T) {
	p, err := flags{full: true, waiters: "8,9", leases: "5", rounds: 2, ttl: time.Second}.plan()
	require.NoError(t, err)
	require.Equal(t, []int{8, 9}, p.contended.waiters)
	require.Equal(t, full().contended.processes, p.contended.processes)
	require.Equal(t, livePlan{[]int{5}, time.Second, 2}, p.live)
	for _, bad := range []string{"x", "0", "1,"} {
		_, err := flags{processes: bad}.plan()
		require.Error(t, err)
	}
}

func TestACommandIsSharedBetweenClientsAndScripts(t *testing.T) {
	var s sources
	require.Empty(t, s.shares())
	for range 3 {
		s.add("set", true)
		s.add("get", true)
	}
	s.add("set", false)
	s.add("evalsha", false)
	require.Equal(t, map[string]float64{"set": 0.25, "get": 0}, s.shares())
}
