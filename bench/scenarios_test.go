package main

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type printed struct{ strings.Builder }

func TestEveryAdapterAcquiresAndReleases(t *testing.T) {
	t.Parallel()
	table, err := testHarness(t).uncontended(tiny().uncontended)
	require.NoError(t, err)
	complete(t, table, 3, columnCycleP50, columnCycles, columnAllocs, columnSent)
	for _, r := range table.rows("one cycle of acquire and release") {
		if strings.HasPrefix(r.adapter, "raw") || strings.HasPrefix(r.adapter, "redislease") {
			require.EqualValues(t, 2, r.values[columnSent], r.adapter)
		}
	}
}

func TestEveryAdapterHandsOver(t *testing.T) {
	t.Parallel()
	table, err := testHarness(t).contended(tiny().contended)
	require.NoError(t, err)
	complete(t, table, 4, columnHandoffs, columnGapP99, columnIdle, columnFairness, columnUnserved, columnCommands)
	for _, cell := range table.cells() {
		for _, r := range table.rows(cell) {
			if !strings.HasPrefix(cell, "drain") {
				continue // it is too short for those that poll
			}
			require.Positive(t, r.values[columnHandoffs], "%s: %s", cell, r.adapter)
			if strings.HasPrefix(r.adapter, "redislease") {
				require.Zero(t, r.values[columnUnserved])
			}
		}
	}
}

func TestOnlyDrainsAreRunToFindWaitersLeftAsleep(t *testing.T) {
	t.Parallel()
	p, err := flags{drains: 7, waiters: "4", processes: "1,2"}.plan()
	require.NoError(t, err)
	h := testHarness(t)
	h.globs = "redislease"
	table, err := h.contended(p.contended)
	require.NoError(t, err)
	require.Len(t, table.cells(), 2)
	for _, cell := range table.cells() {
		rows := table.rows(cell)
		require.Len(t, rows, 2, "and the reference")
		require.EqualValues(t, 7, rows[1].values[columnDrains])
		require.Zero(t, rows[1].values[columnUnserved])
	}
}

func TestEveryAdapterKeepsItsLeases(t *testing.T) {
	t.Parallel()
	table := testHarness(t).live(tiny().live)
	complete(t, table, 1, columnTake, columnHeapStack, columnClientCPU, columnLateP99, columnLost, columnRelease)
	for _, r := range table.rows(table.cells()[0]) {
		require.Positive(t, r.values[columnRenewals], r.adapter)
	}
}

func TestWhoIsToldInTimeThatRedisHangs(t *testing.T) {
	t.Parallel()
	table := testHarness(t).hang(tiny().hang)
	complete(t, table, 2, columnTold, columnTooLong, columnLost)
}

func TestWhoIsToldAfterAKeyCouldExpireHasBelievedTooLong(t *testing.T) {
	now := time.Now()
	until := []time.Time{now, now, now, now}
	heard := reply{Told: []time.Time{now.Add(-2 * time.Millisecond), now, now.Add(3 * time.Millisecond), now.Add(-time.Millisecond)}}
	require.Equal(t, map[string]float64{columnHeld: 4, columnTold: 0.75, columnTooLong: 3, columnEarly: 2}, judged(heard, until, true))
	never := reply{Told: []time.Time{now, {}}, At: now.Add(5 * time.Millisecond)}
	require.Equal(t, map[string]float64{columnHeld: 2, columnTold: 0.5, columnTooLong: 5, columnEarly: 0}, judged(never, until, true))
	require.Equal(t, map[string]float64{columnHeld: 2, columnLost: 1}, judged(never, until, false))
}

func TestTheServerEndsWithTheRun(t *testing.T) {
	testHarness(t) // skips without a server
	s, err := startServer("redis-server")
	require.NoError(t, err)
	require.NotEqual(t, "6379", s.addr[strings.LastIndex(s.addr, ":")+1:])
	require.NoError(t, s.ping())
	s.close()
	_, err = net.Dial("tcp", s.addr)
	require.Error(t, err)
	_, err = startServer("no-such-server")
	require.Error(t, err)
}
