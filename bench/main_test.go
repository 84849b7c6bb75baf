package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// TestMain lets the test program be a worker, too: the harness runs itself.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == workerFlag {
		if err := work(); err != nil {
			fmt.Fprintln(os.Stderr, "worker:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// tiny is enough to see that everything works, and measures nothing.
func tiny() plan {
	return plan{
		uncontendedPlan{concurrency: []int{1, 4}, rounds: 2, slot: 10 * time.Millisecond, cycles: 20},
		contendedPlan{processes: []int{2}, waiters: []int{5}, holds: []time.Duration{0, time.Millisecond}, loops: true, rounds: 1,
			slot: 10 * time.Millisecond, arrivals: 10 * time.Millisecond, grow: 10 * time.Millisecond, idle: 50 * time.Millisecond},
		livePlan{leases: []int{50}, ttl: 2 * time.Second, rounds: 1},
		hangPlan{leases: 5, ttl: time.Second, parts: []float64{0.5, 3}, rounds: 1},
	}
}

func testHarness(t *testing.T) *harness {
	s := attach(redistest.Start(t).Addr())
	t.Cleanup(s.close)
	return &harness{server: s, log: t.Logf}
}

// complete checks that every adapter of a scenario has a row in every cell, ours without a problem, and that there are
// the columns.
func complete(t *testing.T, table *table, cells int, columns ...string) {
	t.Helper()
	require.Len(t, table.cells(), cells)
	for _, cell := range table.cells() {
		rows := table.rows(cell)
		require.Len(t, rows, len(pick(table.scenario, "")), cell)
		for _, r := range rows {
			if strings.HasPrefix(r.adapter, "redislease") {
				require.Empty(t, r.problems, "%s: %s", cell, r.adapter)
			}
		}
	}
	text := new(printed)
	require.NoError(t, table.print(text))
	for _, column := range columns {
		require.Contains(t, text.String(), column)
	}
}
