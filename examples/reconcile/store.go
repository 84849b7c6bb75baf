package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"modernc.org/sqlite"               // the driver "sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/redislease/redislease/sqlfence"
)

// errDatabase marks an error of the database: without it a replica cannot know what is done, so it stops.
var errDatabase = errors.New("database")

// source says where the database is: a PostgreSQL server, or else a SQLite file.
type source struct{ dsn, file string }

// store is the database that all replicas share. A lease says who may work on a day now; the database says what is done,
// and refuses whoever has not heard yet that somebody else may.
type store struct {
	db     *sql.DB
	guard  *sqlfence.Guard
	fenced bool // false: nobody asks the guard
	dollar bool // PostgreSQL's placeholders
}

// entry is the row of a day: how far it is, and what was found so far. It is read and written as a whole.
type entry struct {
	Day        string
	Replica    int // the last one that wrote it
	Parts      int // how many are done
	Orders     int
	Payments   int
	Matched    int // orders
	Mismatches []mismatch
}

// with returns the entry after one more part.
func (e entry) with(replica int, p part) entry {
	found := match(p.orders, p.payments)
	e.Replica = replica
	e.Parts++
	e.Orders += len(p.orders)
	e.Payments += len(p.payments)
	e.Matched += len(p.orders)
	for _, m := range found {
		if m.Owed != nil {
			e.Matched--
		}
	}
	e.Mismatches = append(e.Mismatches[:len(e.Mismatches):len(e.Mismatches)], found...)
	return e
}

// tables are all but that of the fences. The cents of an account are added to by every part of every day.
var tables = []string{
	`CREATE TABLE IF NOT EXISTS reconcile_books (one INTEGER PRIMARY KEY, id TEXT NOT NULL)`,
	`CREATE TABLE IF NOT EXISTS reconcile_days (
		day TEXT NOT NULL PRIMARY KEY,
		replica INTEGER NOT NULL,
		parts INTEGER NOT NULL,
		orders INTEGER NOT NULL,
		payments INTEGER NOT NULL,
		matched INTEGER NOT NULL,
		mismatches TEXT NOT NULL
	)`,
	`CREATE TABLE IF NOT EXISTS reconcile_accounts (
		currency TEXT NOT NULL PRIMARY KEY,
		owed BIGINT NOT NULL,
		received BIGINT NOT NULL
	)`,
}

// openStore connects to the database. It sends nothing.
func openStore(from source, fenced bool) (s *store, err error) {
	s = &store{fenced: fenced, dollar: from.dsn != ""}
	dialect, driver, dsn := sqlfence.PostgreSQL, "pgx", from.dsn
	if from.dsn == "" {
		// A transaction takes the write lock when it begins, and waits for it: see the documentation of sqlfence.
		file := url.URL{Scheme: "file", Path: filepath.ToSlash(from.file), OmitHost: true}
		file.RawQuery = "_txlock=immediate&_pragma=busy_timeout(30000)"
		dialect, driver, dsn = sqlfence.SQLite, "sqlite", file.String()
	}
	if s.guard, err = sqlfence.New(dialect, "reconcile_fences"); err != nil {
		return nil, err
	}
	if s.db, err = sql.Open(driver, dsn); err != nil {
		return nil, err
	}
	s.db.SetMaxOpenConns(1) // a replica does one thing at a time
	return s, nil
}

func (s *store) close() error { return s.db.Close() }

// create makes the tables if they are not there, afresh if asked to. It returns the prefix of the leases that protect
// these books: who shares the database shares the leases, and nobody else is disturbed.
func (s *store) create(ctx context.Context, afresh bool) (keyPrefix string, err error) {
	var statements []string
	if s.dollar { // two runs may get here at once
		statements = append(statements, "SELECT pg_advisory_xact_lock(20260301)")
	} else if err := s.useWriteAheadLog(ctx); err != nil {
		return "", fmt.Errorf("%w: %w", errDatabase, err)
	}
	if afresh {
		for _, table := range []string{"books", "days", "accounts", "fences"} {
			statements = append(statements, "DROP TABLE IF EXISTS reconcile_"+table)
		}
	}
	statements = append(append(statements, tables...), s.guard.Schema())
	err = s.transaction(ctx, func(tx *sql.Tx) error {
		for _, statement := range statements {
			if _, err := tx.ExecContext(ctx, statement); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx,
			s.query(`INSERT INTO reconcile_books (one, id) VALUES (1, ?) ON CONFLICT (one) DO NOTHING`), rand.Text())
		if err != nil {
			return err
		}
		return tx.QueryRowContext(ctx, `SELECT 'books:' || id || ':' FROM reconcile_books`).Scan(&keyPrefix)
	})
	return keyPrefix, err
}

// useWriteAheadLog changes the SQLite file, which stays so: looks do not wait for writes, and each write for the disk only
// once. The change needs the file for itself for a moment, and busy_timeout does not wait for that.
func (s *store) useWriteAheadLog(ctx context.Context) error {
	for {
		_, err := s.db.ExecContext(ctx, "PRAGMA journal_mode = WAL")
		var busy *sqlite.Error
		if !errors.As(err, &busy) || busy.Code()&0xff != sqlite3.SQLITE_BUSY {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// enter reads how far a day is, for the holder of its lease. It does so after the fence was admitted: from then on nobody
// who held the day before can write, so that what was read stays true for as long as nobody comes after.
func (s *store) enter(ctx context.Context, resource string, fence int64, day string) (e entry, err error) {
	err = s.admitted(ctx, resource, fence, func(tx *sql.Tx) error {
		e, err = s.readDay(ctx, tx, day)
		return err
	})
	return e, err
}

// look reads how far a day is, for whoever wants to know.
func (s *store) look(ctx context.Context, day string) (entry, error) {
	e, err := s.readDay(ctx, s.db, day)
	if err != nil {
		err = fmt.Errorf("%w: %w", errDatabase, err)
	}
	return e, err
}

// readDay returns the row of a day; that of one that nobody has begun says so.
func (s *store) readDay(ctx context.Context, from queryer, day string) (entry, error) {
	entries, err := s.read(ctx, from, day)
	if err != nil || len(entries) == 0 {
		return entry{Day: day}, err
	}
	return entries[0], nil
}

// write adds a part to the accounts and writes the day's row as it is after it, both or nothing. Without a fence it
// believes what it is told: a late write puts the row back, and what follows is added once more.
func (s *store) write(ctx context.Context, resource string, fence int64, e entry, p part) error {
	mismatches, err := json.Marshal(e.Mismatches)
	if err != nil {
		return err
	}
	sums := accounts{}
	sums.post(p)
	return s.admitted(ctx, resource, fence, func(tx *sql.Tx) error {
		for _, currency := range sums.currencies() { // in this order everywhere, so that nobody waits for each other
			_, err := tx.ExecContext(ctx, s.query(`INSERT INTO reconcile_accounts AS a (currency, owed, received) VALUES (?, ?, ?)
				ON CONFLICT (currency) DO UPDATE SET owed = a.owed + EXCLUDED.owed, received = a.received + EXCLUDED.received`),
				currency, sums[currency].Owed, sums[currency].Received)
			if err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, s.query(`INSERT INTO reconcile_days
				(day, replica, parts, orders, payments, matched, mismatches) VALUES (?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (day) DO UPDATE SET replica = EXCLUDED.replica, parts = EXCLUDED.parts, orders = EXCLUDED.orders,
				payments = EXCLUDED.payments, matched = EXCLUDED.matched, mismatches = EXCLUDED.mismatches`),
			e.Day, e.Replica, e.Parts, e.Orders, e.Payments, e.Matched, string(mismatches))
		return err
	})
}

// admitted runs do in a transaction that goes on only if nobody with a greater fence was here, and holds off everybody
// else of the resource until it ends.
func (s *store) admitted(ctx context.Context, resource string, fence int64, do func(*sql.Tx) error) error {
	return s.transaction(ctx, func(tx *sql.Tx) error {
		if s.fenced {
			if err := s.guard.Admit(ctx, tx, resource, fence); err != nil {
				return err
			}
		}
		return do(tx)
	})
}

// transaction commits what do has done if it returns nil.
func (s *store) transaction(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err == nil {
		defer tx.Rollback() // changes nothing after Commit
		if err = do(tx); err == nil {
			err = tx.Commit()
		}
	}
	if err != nil && !errors.Is(err, sqlfence.ErrStale) {
		err = fmt.Errorf("%w: %w", errDatabase, err)
	}
	return err
}

// entries returns the rows of all days that were begun.
func (s *store) entries(ctx context.Context) ([]entry, error) {
	entries, err := s.read(ctx, s.db, "")
	if err != nil {
		err = fmt.Errorf("%w: %w", errDatabase, err)
	}
	return entries, err
}

// queryer is a *sql.DB or a *sql.Tx.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// read returns the row of a day, or of all days if it is empty.
func (s *store) read(ctx context.Context, from queryer, day string) (entries []entry, err error) {
	rows, err := from.QueryContext(ctx, s.query(`SELECT day, replica, parts, orders, payments, matched, mismatches
		FROM reconcile_days WHERE ? IN (day, '') ORDER BY day`), day)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var e entry
		var mismatches string
		if err := rows.Scan(&e.Day, &e.Replica, &e.Parts, &e.Orders, &e.Payments, &e.Matched, &mismatches); err != nil {
			return nil, err
		}
		if err := json.Unmarshal([]byte(mismatches), &e.Mismatches); err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
	return entries, rows.Err()
}

// accounts returns the sums of everything that was ever posted.
func (s *store) accounts(ctx context.Context) (accounts, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT currency, owed, received FROM reconcile_accounts`)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDatabase, err)
	}
	defer rows.Close()
	sums := accounts{}
	for rows.Next() {
		var currency string
		var of account
		if err := rows.Scan(&currency, &of.Owed, &of.Received); err != nil {
			return nil, fmt.Errorf("%w: %w", errDatabase, err)
		}
		sums[currency] = of
	}
	return sums, rows.Err()
}

// query writes placeholders as the database wants them. No text in a query of this program has a question mark.
func (s *store) query(text string) string {
	if !s.dollar {
		return text
	}
	parts := strings.Split(text, "?")
	for i := range parts[1:] {
		parts[i] += "$" + strconv.Itoa(i+1)
	}
	return strings.Join(parts, "")
}
