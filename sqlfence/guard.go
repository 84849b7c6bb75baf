package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxResource is how many bytes the name of a resource may have.
const MaxResource = 255

// A Guard admits transactions by their fences. It holds nothing but its statements, needs no closing, and is safe for
// concurrent use. All that write under the leases of a resource must use one table.
type Guard struct {
	dialect Dialect
	schema  string
	admit   string
}

// New returns a Guard that keeps the fences in the table, "fences" or "schema.fences". It sends nothing: the table has
// to be there when Admit is called (see [Guard.Schema]).
//
// Table and schema are quoted, so reserved words will do; they consist of ASCII letters, digits and underscores, do not
// begin with a digit and have at most 63 bytes. PostgreSQL takes quoted names literally: a table that was made without
// quotes has a name in lower case.
func New(dialect Dialect, table string) (*Guard, error) {
	s := dialect.sql()
	if s == nil {
		return nil, fmt.Errorf("sqlfence: new: %v is none of PostgreSQL, MySQL and SQLite", dialect)
	}
	quoted, err := s.table(table)
	if err != nil {
		return nil, fmt.Errorf("sqlfence: new: table %q: %w", table, err)
	}
	return &Guard{
		dialect: dialect,
		schema:  fmt.Sprintf(s.schema, quoted),
		admit:   fmt.Sprintf(s.admit, quoted),
	}, nil
}

// Schema returns the CREATE TABLE IF NOT EXISTS statement of the Guard's table, for a migration or for db.Exec.
func (g *Guard) Schema() string { return g.schema }

// Admit lets the transaction go on if no greater fence has been seen for the resource, and records the fence as part of
// it. nil: nobody with a smaller or greater fence is admitted until the transaction ends. It waits for an admitted
// transaction of the same resource (on SQLite for any that writes) as long as ctx and the database allow.
//
// A smaller fence than one that was seen: a [*StaleError], which matches [ErrStale]; the same once more is the same
// holder writing again, nil. A fence below 1 is that of a lease taken without redislease.WithFencing, and an error that
// says so. The resource, usually the key of the lease, is compared byte by byte; it must not be empty, longer than
// [MaxResource] or other than UTF-8 without NUL. These two are found out before anything is sent. All else is an error
// of the database (see Errors in the package comment) or of ctx, joined with its cause.
//
// Roll back after any error. Call Admit before the transaction reads or writes anything else.
func (g *Guard) Admit(ctx context.Context, tx *sql.Tx, resource string, fence int64) error {
	if err := g.check(tx, resource, fence); err != nil {
		return fmt.Errorf("sqlfence: admit %w", err)
	}
	seen, err := g.record(ctx, tx, resource, fence)
	switch {
	case err != nil:
		return fmt.Errorf("sqlfence: admit %q: %w", resource, withCause(ctx, err))
	case seen > fence:
		return &StaleError{Resource: resource, Fence: fence, Seen: seen}
	case seen < fence:
		const why = "not a table as Schema makes it, or a client that changes results"
		return fmt.Errorf("sqlfence: admit %q: fence %d was written and %d came back: %s", resource, fence, seen, why)
	}
	return nil
}

// withCause joins err with the cause of ctx, the loss of a lease for one. A cause that is the refusal of another
// transaction is left out: it would make this one look refused.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if cause == nil || errors.Is(err, cause) || errors.Is(cause, ErrStale) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// check finds out what can be found out without the database.
func (g *Guard) check(tx *sql.Tx, resource string, fence int64) error {
	switch {
	case g == nil || g.admit == "":
		return fmt.Errorf("%q: the Guard was not made by New", shortened(resource))
	case tx == nil:
		return fmt.Errorf("%q: the transaction is nil", shortened(resource))
	case resource == "":
		return errors.New(`"": the resource must not be empty`)
	case len(resource) > MaxResource:
		const rule = "the resource must not be longer than %d bytes, and this has %d"
		return fmt.Errorf("%q: "+rule, shortened(resource), MaxResource, len(resource))
	case !utf8.ValidString(resource):
		return fmt.Errorf("%q: the resource must be valid UTF-8", resource)
	case strings.ContainsRune(resource, 0):
		return fmt.Errorf("%q: the resource must not contain NUL", resource)
	case fence < 1:
		return fmt.Errorf("%q: fence %d: the lease was taken without redislease.WithFencing", resource, fence)
	}
	return nil
}

// shortened keeps messages readable.
func shortened(resource string) string {
	const enough = 64
	if len(resource) <= enough {
		return resource
	}
	return resource[:enough] + "…"
}

// record writes the fence unless a greater one is there, and returns the one that is there then.
func (g *Guard) record(ctx context.Context, tx *sql.Tx, resource string, fence int64) (int64, error) {
	if g.dialect == MySQL {
		result, err := tx.ExecContext(ctx, g.admit, resource, fence, fence)
		if err != nil {
			return 0, err
		}
		return result.LastInsertId()
	}
	rows, err := tx.QueryContext(ctx, g.admit, resource, fence)
	if err != nil {
		return 0, err
	}
	defer func() { _ = rows.Close() }() // at the end of the rows it is closed, and Err has what there was
	var seen int64
	for rows.Next() { // to the end: an error may come after the row
		if err := rows.Scan(&seen); err != nil {
			return 0, err
		}
	}
	return seen, rows.Err()
}
