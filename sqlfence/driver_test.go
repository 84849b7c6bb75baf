package sqlfence_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/sqlfence"
)

// answers is a driver that answers every statement with the same rows of one number, then an error, io.EOF if there is
// none, or with the same LastInsertId.
type answers struct {
	rows []int64
	err  error
	id   int64
}

func (a answers) Connect(context.Context) (driver.Conn, error)                 { return a, nil }
func (a answers) Driver() driver.Driver                                        { return nil }
func (a answers) Prepare(string) (driver.Stmt, error)                          { return a, nil }
func (a answers) Close() error                                                 { return nil }
func (a answers) Begin() (driver.Tx, error)                                    { return a, nil }
func (a answers) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return a, nil }
func (a answers) Commit() error                                                { return nil }
func (a answers) Rollback() error                                              { return nil }
func (a answers) NumInput() int                                                { return -1 }
func (a answers) Exec([]driver.Value) (driver.Result, error)                   { return a, a.err }
func (a answers) LastInsertId() (int64, error)                                 { return a.id, nil }
func (a answers) RowsAffected() (int64, error)                                 { return 1, nil }
func (a answers) Query([]driver.Value) (driver.Rows, error)                    { return &a, nil }
func (a answers) Columns() []string                                            { return []string{"fence"} }

func (a *answers) Next(dest []driver.Value) error {
	if len(a.rows) == 0 {
		return a.err
	}
	dest[0], a.rows = a.rows[0], a.rows[1:]
	return nil
}

// Drivers differ in when they find out about an error, and proxies and tables in what they make of a statement.
func TestOnlyTheFenceItselfIsTakenForAYes(t *testing.T) {
	t.Parallel()
	broken := errors.New("connection reset")
	for _, tt := range []struct {
		name    string
		dialect sqlfence.Dialect
		answers answers
		err     error  // matched
		message string // contained; none of both: admitted
	}{
		{"the fence", sqlfence.PostgreSQL, answers{rows: []int64{5}, err: io.EOF}, nil, ""},
		{"a greater one", sqlfence.PostgreSQL, answers{rows: []int64{6}, err: io.EOF}, sqlfence.ErrStale, ""},
		{"a smaller one", sqlfence.PostgreSQL, answers{rows: []int64{4}, err: io.EOF}, nil, "fence 5 was written and 4 came back"},
		{"no row", sqlfence.PostgreSQL, answers{err: io.EOF}, nil, "fence 5 was written and 0 came back"},
		{"an error after the fence", sqlfence.PostgreSQL, answers{rows: []int64{5}, err: broken}, broken, ""},
		{"an error instead of it", sqlfence.SQLite, answers{err: broken}, broken, ""},
		{"the fence as the id", sqlfence.MySQL, answers{id: 5}, nil, ""},
		{"a greater id", sqlfence.MySQL, answers{id: 6}, sqlfence.ErrStale, ""},
		{"no id", sqlfence.MySQL, answers{}, nil, "fence 5 was written and 0 came back"},
		{"an error and the id", sqlfence.MySQL, answers{id: 5, err: broken}, broken, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db := sql.OpenDB(tt.answers)
			defer func() { require.NoError(t, db.Close()) }()
			guard, err := sqlfence.New(tt.dialect, "fences")
			require.NoError(t, err)
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			defer func() { require.NoError(t, tx.Rollback()) }()

			err = guard.Admit(t.Context(), tx, "a", 5)
			switch {
			case tt.err != nil:
				require.ErrorIs(t, err, tt.err)
				require.Equal(t, tt.err == sqlfence.ErrStale, errors.Is(err, sqlfence.ErrStale))
			case tt.message != "":
				require.ErrorContains(t, err, tt.message)
				require.NotErrorIs(t, err, sqlfence.ErrStale)
			default:
				require.NoError(t, err)
			}
		})
	}
}
