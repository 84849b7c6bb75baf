package sqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"

	"github.com/redislease/redislease/sqlfence"
	"github.com/redislease/redislease/sqlfence/internal/dbtest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	dbtest.Stop()
	os.Exit(code)
}

// setting is a database as somebody may have set it up.
type setting struct {
	name    string
	dialect sqlfence.Dialect
	level   sql.IsolationLevel
	open    func(t testing.TB) (driver, source string)
}

var settings = []setting{
	{"postgresql", sqlfence.PostgreSQL, sql.LevelDefault, postgres("")},
	{"postgresql by the simple protocol", sqlfence.PostgreSQL, sql.LevelDefault, postgres("&default_query_exec_mode=simple_protocol")},
	{"postgresql at read committed", sqlfence.PostgreSQL, sql.LevelReadCommitted, postgres("")},
	{"postgresql at repeatable read", sqlfence.PostgreSQL, sql.LevelRepeatableRead, postgres("")},
	{"postgresql at serializable", sqlfence.PostgreSQL, sql.LevelSerializable, postgres("")},
	{"mariadb", sqlfence.MySQL, sql.LevelDefault, mariadb("")},
	{"mariadb with clientFoundRows", sqlfence.MySQL, sql.LevelDefault, mariadb("clientFoundRows=true")},
	{"mariadb with interpolateParams", sqlfence.MySQL, sql.LevelDefault, mariadb("interpolateParams=true")},
	{"mariadb with snapshot isolation", sqlfence.MySQL, sql.LevelDefault, mariadb("innodb_snapshot_isolation=1")},
	{"mariadb at read uncommitted", sqlfence.MySQL, sql.LevelReadUncommitted, mariadb("")},
	{"mariadb at read committed", sqlfence.MySQL, sql.LevelReadCommitted, mariadb("")},
	{"mariadb at serializable", sqlfence.MySQL, sql.LevelSerializable, mariadb("")},
	{"sqlite", sqlfence.SQLite, sql.LevelDefault, file("_pragma=journal_mode(DELETE)")},
	{"sqlite with a write-ahead log", sqlfence.SQLite, sql.LevelDefault, file("_pragma=journal_mode(WAL)")},
	{"sqlite with immediate transactions", sqlfence.SQLite, sql.LevelDefault, file("_pragma=journal_mode(WAL)&_txlock=immediate")},
}

func postgres(params string) func(testing.TB) (string, string) {
	return func(t testing.TB) (string, string) {
		return "pgx", "postgres://postgres@" + dbtest.PostgreSQL(t) + "/postgres?sslmode=disable" + params
	}
}

func mariadb(params string) func(testing.TB) (string, string) {
	return func(t testing.TB) (string, string) {
		return "mysql", "root@tcp(" + dbtest.MariaDB(t) + ")/test?" + params
	}
}

func file(params string) func(testing.TB) (string, string) {
	return func(t testing.TB) (string, string) {
		return "sqlite", "file:" + filepath.Join(t.TempDir(), "db") + "?_pragma=busy_timeout(20000)&_pragma=synchronous(OFF)&" + params
	}
}

// everywhere runs a test on all of the settings, with tables of its own on each.
func everywhere(t *testing.T, test func(t *testing.T, w *world)) {
	for _, s := range settings {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			test(t, newWorld(t, s))
		})
	}
}

// world is a database with a Guard and its table.
type world struct {
	setting
	db    *sql.DB
	guard *sqlfence.Guard
	table string
}

var tables atomic.Int64

func newWorld(t testing.TB, s setting) *world {
	t.Helper()
	driver, source := s.open(t)
	db, err := sql.Open(driver, source)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	w := &world{setting: s, db: db, table: fmt.Sprintf("fences_%d", tables.Add(1))}
	w.guard, err = sqlfence.New(s.dialect, w.table)
	require.NoError(t, err)
	w.exec(t, w.guard.Schema())
	return w
}

func (w *world) exec(t testing.TB, statement string, args ...any) {
	t.Helper()
	_, err := w.db.ExecContext(t.Context(), w.bind(statement), args...)
	require.NoError(t, err, statement)
}

// bind puts the dialect's parameters for the question marks.
func (w *world) bind(statement string) string {
	if w.dialect != sqlfence.PostgreSQL {
		return statement
	}
	var b strings.Builder
	for i, part := range strings.Split(statement, "?") {
		if i > 0 {
			fmt.Fprintf(&b, "$%d", i)
		}
		b.WriteString(part)
	}
	return b.String()
}

func (w *world) begin(t testing.TB) *sql.Tx {
	t.Helper()
	tx, err := w.db.BeginTx(context.Background(), &sql.TxOptions{Isolation: w.level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// admit admits a transaction of its own, and commits it unless it is refused.
func (w *world) admit(t testing.TB, resource string, fence int64) error {
	t.Helper()
	tx := w.begin(t)
	if err := w.guard.Admit(t.Context(), tx, resource, fence); err != nil {
		require.NoError(t, tx.Rollback())
		return err
	}
	require.NoError(t, tx.Commit())
	return nil
}

// stored returns the fence in the table, and 0 if there is none.
func (w *world) stored(t testing.TB, resource string) (fence int64) {
	t.Helper()
	err := w.db.QueryRowContext(t.Context(), w.bind("SELECT fence FROM "+w.table+" WHERE resource = ?"), resource).Scan(&fence)
	if !errors.Is(err, sql.ErrNoRows) {
		require.NoError(t, err)
	}
	return fence
}

func requireStale(t testing.TB, err error, resource string, fence, seen int64) {
	t.Helper()
	require.ErrorIs(t, err, sqlfence.ErrStale)
	var stale *sqlfence.StaleError
	require.ErrorAs(t, err, &stale)
	require.Equal(t, sqlfence.StaleError{Resource: resource, Fence: fence, Seen: seen}, *stale)
}

// again returns what the database calls an error after which the whole transaction is to be tried once more, and "" if
// it is none.
func again(err error) string {
	var pg *pgconn.PgError
	var my *mysql.MySQLError
	var lite *sqlite.Error
	switch {
	case errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "40P01"):
		return pg.Code
	case errors.As(err, &my) && (my.Number == 1213 || my.Number == 1205 || my.Number == 1020):
		return fmt.Sprint(my.Number)
	case errors.As(err, &lite) && lite.Code()&0xff == 5:
		return fmt.Sprintf("SQLITE_BUSY(%d)", lite.Code())
	}
	return ""
}
