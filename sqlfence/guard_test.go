package sqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/sqlfence"
)

// patience is how long a test waits for what has to happen. It is no assertion about speed.
const patience = 20 * time.Second

func TestAGuardAdmitsFencesThatDoNotFall(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		for _, step := range []struct {
			name  string
			fence int64
			seen  int64 // 0: admitted
		}{
			{"the first", 5, 0},
			{"the same again", 5, 0},
			{"a greater one", 7, 0},
			{"a smaller one", 6, 7},
			{"the smallest", 1, 7},
			{"the same after one was refused", 7, 0},
			{"a number above 2^53", 1<<53 + 1, 0},
			{"one less", 1 << 53, 1<<53 + 1},
			{"the greatest", math.MaxInt64, 0},
			{"the greatest again", math.MaxInt64, 0},
			{"one less than the greatest", math.MaxInt64 - 1, math.MaxInt64},
		} {
			err := w.admit(t, "orders", step.fence)
			if step.seen == 0 {
				require.NoError(t, err, step.name)
				require.Equal(t, step.fence, w.stored(t, "orders"), step.name)
				continue
			}
			requireStale(t, err, "orders", step.fence, step.seen)
			require.Equal(t, step.seen, w.stored(t, "orders"), step.name)
		}
	})
}

func TestTheFirstFenceMayBeTheGreatestOrTheSmallest(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		require.NoError(t, w.admit(t, "great", math.MaxInt64))
		requireStale(t, w.admit(t, "great", 1), "great", 1, math.MaxInt64)
		require.NoError(t, w.admit(t, "small", 1))
		require.NoError(t, w.admit(t, "small", 2))
	})
}

func TestATransactionMayBeAdmittedMoreThanOnce(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		tx := w.begin(t)
		for _, resource := range []string{"a", "b", "a", "b"} {
			require.NoError(t, w.guard.Admit(t.Context(), tx, resource, 5))
		}
		require.NoError(t, w.guard.Admit(t.Context(), tx, "a", 6))
		requireStale(t, w.guard.Admit(t.Context(), tx, "a", 5), "a", 5, 6)
		require.NoError(t, tx.Rollback())
		require.Zero(t, w.stored(t, "a"))
	})
}

func TestWhatARefusedTransactionWroteIsNotThere(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		w.exec(t, "CREATE TABLE "+w.table+"_books (line INT)")
		require.NoError(t, w.admit(t, "a", 5))

		tx := w.begin(t)
		_, err := tx.ExecContext(t.Context(), "INSERT INTO "+w.table+"_books VALUES (1)")
		require.NoError(t, err)
		requireStale(t, w.guard.Admit(t.Context(), tx, "a", 4), "a", 4, 5)
		require.NoError(t, tx.Rollback())

		var lines int
		require.NoError(t, w.db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM "+w.table+"_books").Scan(&lines))
		require.Zero(t, lines)
	})
}

func TestARefusedFenceChangesNothingEvenIfItIsCommitted(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		require.NoError(t, w.admit(t, "a", 5))
		tx := w.begin(t)
		requireStale(t, w.guard.Admit(t.Context(), tx, "a", 4), "a", 4, 5)
		require.NoError(t, tx.Commit())
		require.EqualValues(t, 5, w.stored(t, "a"))
	})
}

func TestARollbackLeavesNothingRecorded(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		tx := w.begin(t)
		require.NoError(t, w.guard.Admit(t.Context(), tx, "a", 9))
		require.NoError(t, tx.Rollback())
		require.NoError(t, w.admit(t, "a", 3), "the first was rolled back")

		tx = w.begin(t)
		require.NoError(t, w.guard.Admit(t.Context(), tx, "a", 9))
		require.NoError(t, tx.Rollback())
		require.NoError(t, w.admit(t, "a", 4), "the second was rolled back")
	})
}

func TestResourcesAreComparedByteByByte(t *testing.T) {
	t.Parallel()
	names := []string{
		"a", "A", "a ", " a", "a\t", "ä", "a\u0308", "Ä", "ss", "ß", "%", "_", "'", `"`, "`", `\`, `\'`, "?", "$1", "1", "01", "1e0",
		"\uFEFFa", "\u200ba", "🔒", "漢", strings.Repeat("x", sqlfence.MaxResource), strings.Repeat("x", sqlfence.MaxResource-1) + "y",
	}
	everywhere(t, func(t *testing.T, w *world) {
		for i, name := range names {
			require.NoErrorf(t, w.admit(t, name, int64(1000-i)), "%q", name)
		}
		for i, name := range names {
			require.EqualValuesf(t, 1000-i, w.stored(t, name), "%q", name)
			requireStale(t, w.admit(t, name, int64(999-i)), name, int64(999-i), int64(1000-i))
		}
	})
}

func TestAFenceBelowOneIsThatOfALeaseWithoutWithFencing(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		for _, fence := range []int64{0, -1, math.MinInt64} {
			err := w.admit(t, "a", fence)
			require.ErrorContains(t, err, "the lease was taken without redislease.WithFencing")
			require.ErrorContains(t, err, `"a"`)
			require.NotErrorIs(t, err, sqlfence.ErrStale)
			require.Zero(t, w.stored(t, "a"))
		}
	})
}

func TestAnImpossibleResourceIsRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, settings[len(settings)-1])
	for _, tt := range []struct{ name, resource, rule string }{
		{"empty", "", "must not be empty"},
		{"too long", strings.Repeat("x", sqlfence.MaxResource+1), "must not be longer than 255 bytes, and this has 256"},
		{"too long in bytes only", strings.Repeat("ä", 128), "must not be longer than 255 bytes, and this has 256"},
		{"not UTF-8", "a\xff", "must be valid UTF-8"},
		{"half a surrogate pair", "\xed\xa0\x80", "must be valid UTF-8"},
		{"with NUL", "a\x00b", "must not contain NUL"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tx := w.begin(t)
			require.NoError(t, tx.Rollback()) // the database would answer with sql.ErrTxDone
			err := w.guard.Admit(t.Context(), tx, tt.resource, 1)
			require.ErrorContains(t, err, tt.rule)
			require.NotErrorIs(t, err, sql.ErrTxDone)
			require.NotErrorIs(t, err, sqlfence.ErrStale)
			require.Less(t, len(err.Error()), 250)
		})
	}
}

func TestAGuardRefusesANilTransaction(t *testing.T) {
	t.Parallel()
	guard, err := sqlfence.New(sqlfence.SQLite, "fences")
	require.NoError(t, err)
	require.ErrorContains(t, guard.Admit(t.Context(), nil, "a", 1), "the transaction is nil")
}

func TestAGuardThatNewDidNotMakeIsAnError(t *testing.T) {
	t.Parallel()
	w := newWorld(t, settings[len(settings)-1])
	tx := w.begin(t)
	require.ErrorContains(t, (&sqlfence.Guard{}).Admit(t.Context(), tx, "a", 1), "not made by New")
	require.ErrorContains(t, (*sqlfence.Guard)(nil).Admit(t.Context(), tx, "a", 1), "not made by New")
}

func TestAnEndedTransactionIsAnError(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		tx := w.begin(t)
		require.NoError(t, tx.Commit())
		err := w.guard.Admit(t.Context(), tx, "a", 1)
		require.ErrorIs(t, err, sql.ErrTxDone)
		require.NotErrorIs(t, err, sqlfence.ErrStale)
	})
}

func TestAContextThatHasEndedIsAnErrorWithItsCause(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		lost := errors.New("lease lost")
		ctx, cancel := context.WithCancelCause(t.Context())
		tx := w.begin(t)
		cancel(lost)
		err := w.guard.Admit(ctx, tx, "a", 1)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, lost)
		require.NotErrorIs(t, err, sqlfence.ErrStale)
		require.NoError(t, tx.Rollback())
		require.Zero(t, w.stored(t, "a"))
	})
}

func TestTheRefusalOfAnotherTransactionAsTheCauseOfAContextIsNotThisOnes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, settings[len(settings)-1])
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(&sqlfence.StaleError{Resource: "b", Fence: 1, Seen: 2})
	err := w.guard.Admit(ctx, w.begin(t), "a", 1)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, sqlfence.ErrStale)
}

func TestAMissingTableIsAnErrorOfTheDatabase(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		guard, err := sqlfence.New(w.dialect, w.table+"_missing")
		require.NoError(t, err)
		err = guard.Admit(t.Context(), w.begin(t), "a", 1)
		require.ErrorContains(t, err, w.table+"_missing")
		require.ErrorContains(t, err, `sqlfence: admit "a": `)
		require.NotErrorIs(t, err, sqlfence.ErrStale)
		require.Empty(t, again(err))
	})
}

func TestATableMayBeInASchemaAndHaveAnyReservedName(t *testing.T) {
	t.Parallel()
	schemas := map[sqlfence.Dialect]string{sqlfence.PostgreSQL: "public", sqlfence.MySQL: "test", sqlfence.SQLite: "main"}
	seen := map[sqlfence.Dialect]bool{}
	for _, s := range settings {
		if seen[s.dialect] {
			continue
		}
		seen[s.dialect] = true
		t.Run(s.dialect.String(), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, s)
			for _, table := range []string{"select", "Order", "_1", "f", "excluded", strings.Repeat("n", 63), schemas[s.dialect] + ".values"} {
				guard, err := sqlfence.New(s.dialect, table)
				require.NoError(t, err, table)
				w.exec(t, guard.Schema())
				w.exec(t, guard.Schema()) // changes nothing
				w.guard = guard
				require.NoError(t, w.admit(t, "a", 2), table)
				requireStale(t, w.admit(t, "a", 1), "a", 1, 2)
			}
		})
	}
}

func TestNewRefusesNamesThatItCouldNotQuoteSafely(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ table, rule string }{
		{"", "must not be empty"},
		{"a.", "must not be empty"},
		{".a", "must not be empty"},
		{"a.b.c", "at most one dot"},
		{"1a", "must not begin with a digit"},
		{"a.1", "must not begin with a digit"},
		{strings.Repeat("n", 64), "must not be longer than 63 bytes, and this has 64"},
		{"a b", "without ' '"},
		{`a"b`, `without '"'`},
		{"a`b", "without '`'"},
		{"a'b", `without '\''`},
		{"a;b", "without ';'"},
		{"a-b", "without '-'"},
		{"a$b", "without '$'"},
		{"a%b", "without '%'"},
		{"a\x00", `without '\x00'`},
		{"ä", "without 'ä'"},
		{"a\xff", "without '\uFFFD'"},
	} {
		for _, dialect := range []sqlfence.Dialect{sqlfence.PostgreSQL, sqlfence.MySQL, sqlfence.SQLite} {
			guard, err := sqlfence.New(dialect, tt.table)
			require.Nil(t, guard)
			require.ErrorContains(t, err, tt.rule)
			require.ErrorContains(t, err, "sqlfence: new: table ")
		}
	}
}

func TestNewRefusesADialectThatIsNone(t *testing.T) {
	t.Parallel()
	for _, dialect := range []sqlfence.Dialect{0, -1, 4} {
		guard, err := sqlfence.New(dialect, "fences")
		require.Nil(t, guard)
		require.ErrorContains(t, err, dialect.String()+" is none of")
	}
}

func TestAStaleErrorHasTheResourceAndBothFences(t *testing.T) {
	t.Parallel()
	err := &sqlfence.StaleError{Resource: "orders", Fence: 41, Seen: 42}
	require.EqualError(t, err, `sqlfence: admit "orders": stale fence: 41, after 42 was seen`)
	require.ErrorIs(t, err, sqlfence.ErrStale)
}

// A later holder waits for one that was admitted before him, and an earlier one for a later one, whom he then finds.
func TestAnAdmittedTransactionHoldsUpTheOthersOfItsResource(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		for _, tt := range []struct {
			name          string
			before        int64 // committed before all; 0: nothing
			first, second int64
			commit        bool
			seen          int64 // 0: the second is admitted
		}{
			{"a later one, for the commit of an earlier one", 1, 5, 6, true, 0},
			{"a later one, for the first commit ever", 0, 5, 6, true, 0},
			{"the same, for its own commit", 1, 5, 5, true, 0},
			{"an earlier one, for the commit of a later one", 1, 6, 5, true, 6},
			{"an earlier one, for the first commit ever", 0, 6, 5, true, 6},
			{"a later one, for one that recorded nothing new", 5, 5, 6, true, 0},
			{"an earlier one, for the rollback of a later one", 1, 6, 5, false, 0},
			{"an earlier one, for the rollback of the first one ever", 0, 6, 5, false, 0},
		} {
			t.Run(tt.name, func(t *testing.T) {
				resource := tt.name
				if tt.before > 0 {
					require.NoError(t, w.admit(t, resource, tt.before))
				}
				first := w.begin(t)
				require.NoError(t, w.guard.Admit(t.Context(), first, resource, tt.first))

				var ended atomic.Bool
				result := make(chan error, 1)
				go func() {
					result <- w.untilAnswered(resource, tt.second, func(err error) {
						if !ended.Load() {
							t.Errorf("answered before the other transaction ended: %v", err)
						}
					})
				}()
				time.Sleep(30 * time.Millisecond) // the longer, the more could go wrong
				ended.Store(true)
				if tt.commit {
					require.NoError(t, first.Commit())
				} else {
					require.NoError(t, first.Rollback())
				}
				select {
				case err := <-result:
					if tt.seen == 0 {
						require.NoError(t, err)
					} else {
						requireStale(t, err, resource, tt.second, tt.seen)
					}
				case <-time.After(patience):
					t.Fatal("the second transaction still waits")
				}
			})
		}
	})
}

// untilAnswered tries a whole transaction until the database has no reason to have it tried again. It tells of each
// answer.
func (w *world) untilAnswered(resource string, fence int64, answered func(error)) (err error) {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		var tx *sql.Tx
		if tx, err = w.db.BeginTx(context.Background(), &sql.TxOptions{Isolation: w.level}); err == nil {
			err = w.guard.Admit(context.Background(), tx, resource, fence)
			if answered(err); err == nil {
				err = tx.Commit()
			}
			_ = tx.Rollback()
		}
		if again(err) == "" {
			return err
		}
	}
	return err
}

// On SQLite all wait for all.
func TestOtherResourcesAreNotHeldUp(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		if w.dialect == sqlfence.SQLite {
			t.Skip("one transaction writes at a time")
		}
		for _, resource := range []string{"a", "b", "c"} {
			require.NoError(t, w.admit(t, resource, 1))
		}
		first := w.begin(t)
		require.NoError(t, w.guard.Admit(t.Context(), first, "b", 2))
		for _, resource := range []string{"a", "c"} {
			require.NoError(t, w.admit(t, resource, 2))
		}
		require.NoError(t, first.Commit())
	})
}

// What a transaction has read before its Admit fixes, at some levels, what it sees.
func TestAnOldSnapshotAdmitsNothingStale(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		switch w.name {
		case "mariadb at serializable", "sqlite", "sqlite with immediate transactions":
			t.Skip("the other transaction would wait for the one that reads")
		}
		for resource, before := range map[string]int64{"of the row": 1, "from before the row": 0} {
			if before > 0 {
				require.NoError(t, w.admit(t, resource, before))
			}
			tx := w.begin(t)
			var rows int
			require.NoError(t, tx.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM "+w.table).Scan(&rows))
			require.NoError(t, w.admit(t, resource, 7))

			err := w.guard.Admit(t.Context(), tx, resource, 6)
			require.NoError(t, tx.Rollback())
			if code := again(err); code != "" {
				t.Log(resource, "is to be tried again:", code)
				err = w.admit(t, resource, 6)
			}
			requireStale(t, err, resource, 6, 7)
		}
	})
}

func TestAWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		if w.dialect == sqlfence.SQLite {
			t.Skip("the driver waits for as long as busy_timeout says")
		}
		first := w.begin(t)
		require.NoError(t, w.guard.Admit(t.Context(), first, "a", 1))
		second := w.begin(t)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		err := w.guard.Admit(ctx, second, "a", 2)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, sqlfence.ErrStale)
		_ = second.Rollback()
		require.NoError(t, first.Commit())
		require.NoError(t, w.admit(t, "a", 2))
	})
}

func TestADatabaseThatGivesUpWaitingSaysSo(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		first := w.begin(t)
		require.NoError(t, w.guard.Admit(t.Context(), first, "a", 1))
		limits := map[sqlfence.Dialect]string{
			sqlfence.PostgreSQL: "SET lock_timeout = 20",
			sqlfence.MySQL:      "SET innodb_lock_wait_timeout = 1",
			sqlfence.SQLite:     "PRAGMA busy_timeout = 20",
		}
		conn, err := w.db.Conn(t.Context())
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		_, err = conn.ExecContext(t.Context(), limits[w.dialect])
		require.NoError(t, err)
		second, err := conn.BeginTx(t.Context(), &sql.TxOptions{Isolation: w.level})
		if err == nil {
			err = w.guard.Admit(t.Context(), second, "a", 2)
			defer func() { _ = second.Rollback() }()
		} else {
			require.Equal(t, "sqlite with immediate transactions", w.name)
		}
		require.Error(t, err)
		require.NotErrorIs(t, err, sqlfence.ErrStale)
		if w.dialect == sqlfence.PostgreSQL {
			require.ErrorContains(t, err, "55P03")
		} else {
			require.NotEmpty(t, again(err), err)
		}
		require.NoError(t, first.Commit())
	})
}
