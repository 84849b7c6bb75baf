package sqlfence_test

import (
	"context"
	"database/sql"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/sqlfence"
)

// BenchmarkAdmit compares a transaction of one UPDATE (bare) with the same one after Admit, on one connection to a
// server that does not wait for its disk: what is left is the round trips and the work of the processors. Each iteration
// is a round in which both take their turn, and the bare one twice: the distance of its two figures is the noise. What
// is reported are medians over the rounds. Read the ratios.
func BenchmarkAdmit(b *testing.B) {
	for _, s := range []setting{
		{"postgresql", sqlfence.PostgreSQL, sql.LevelDefault, postgres("")},
		{"mariadb", sqlfence.MySQL, sql.LevelDefault, mariadb("")},
		{"mariadb-interpolateParams", sqlfence.MySQL, sql.LevelDefault, mariadb("interpolateParams=true")},
		{"sqlite", sqlfence.SQLite, sql.LevelDefault, file("_pragma=journal_mode(WAL)&_txlock=immediate")},
	} {
		b.Run(s.name, func(b *testing.B) {
			w := newWorld(b, s)
			w.db.SetMaxOpenConns(1)
			w.exec(b, "CREATE TABLE "+w.table+"_state (id VARCHAR(64) PRIMARY KEY, n BIGINT NOT NULL)")
			w.exec(b, "INSERT INTO "+w.table+"_state VALUES ('a', 0)")
			update := "UPDATE " + w.table + "_state SET n = n + 1 WHERE id = 'a'"
			ctx := b.Context()
			transact := func(first func(*sql.Tx) error) time.Duration {
				began := time.Now()
				tx, err := w.db.BeginTx(ctx, nil)
				require.NoError(b, err)
				require.NoError(b, first(tx))
				_, err = tx.ExecContext(ctx, update)
				require.NoError(b, err)
				require.NoError(b, tx.Commit())
				return time.Since(began)
			}
			bare := func(*sql.Tx) error { return nil }
			fence := int64(0)
			admit := func(tx *sql.Tx) error {
				fence++
				return w.guard.Admit(context.Background(), tx, "reconcile:2026-03-14", fence)
			}

			var took [3][]time.Duration
			for b.Loop() {
				for i, first := range []func(*sql.Tx) error{bare, admit, bare} {
					took[i] = append(took[i], transact(first))
				}
			}
			var medians [3]float64
			for i := range took {
				slices.Sort(took[i])
				medians[i] = float64(took[i][len(took[i])/2]) / float64(time.Microsecond)
			}
			b.ReportMetric(0, "ns/op") // of a round, which says nothing
			b.ReportMetric(medians[0], "bare-µs")
			b.ReportMetric(medians[2], "bare#2-µs")
			b.ReportMetric(medians[1], "admit-µs")
			b.ReportMetric(medians[1]/medians[0], "admit/bare")
		})
	}
}
