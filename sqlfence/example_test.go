package sqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/redislease/redislease/sqlfence"
)

// lease stands for a *redislease.Lease taken with redislease.WithFencing.
type lease struct{ fence int64 }

func (l lease) Key() string  { return "reconcile:2026-03-14" }
func (l lease) Fence() int64 { return l.fence }
func (l lease) Err() error   { return nil }

// openSQLite opens an empty database.
func openSQLite() (db *sql.DB, remove func()) {
	dir, err := os.MkdirTemp("", "sqlfence")
	if err != nil {
		log.Fatal(err)
	}
	db, err = sql.Open("sqlite", "file:"+filepath.Join(dir, "books.db")+"?_txlock=immediate&_pragma=busy_timeout(5000)")
	if err != nil {
		log.Fatal(err)
	}
	return db, func() {
		if err := errors.Join(db.Close(), os.RemoveAll(dir)); err != nil {
			log.Print(err)
		}
	}
}

// Two replicas write the books of a day. The first one was stopped in the middle, its lease ran out, and a second one
// took over, with a greater fence. When the first goes on, the database refuses what it writes.
func ExampleGuard_Admit() {
	db, remove := openSQLite()
	defer remove()
	ctx := context.Background()

	guard, err := sqlfence.New(sqlfence.SQLite, "fences")
	if err != nil {
		log.Fatal(err)
	}
	for _, statement := range []string{guard.Schema(), `CREATE TABLE books (day TEXT PRIMARY KEY, total INTEGER)`} {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			log.Fatal(err)
		}
	}

	write := func(ctx context.Context, lease lease, total int) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // changes nothing after Commit
		if err := guard.Admit(ctx, tx, lease.Key(), lease.Fence()); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO books VALUES (?, ?)`, "2026-03-14", total); err != nil {
			return err
		}
		if err := lease.Err(); err != nil { // may it still land?
			return err
		}
		return tx.Commit()
	}

	first, second := lease{fence: 41}, lease{fence: 42}
	fmt.Println("first:", write(ctx, first, 100))
	fmt.Println("second:", write(ctx, second, 250))
	err = write(ctx, first, 110)
	fmt.Println("first, late:", err)
	fmt.Println("stale:", errors.Is(err, sqlfence.ErrStale))
	fmt.Println("without fencing:", write(ctx, lease{fence: -1}, 120))

	var total int
	if err := db.QueryRowContext(ctx, `SELECT total FROM books`).Scan(&total); err != nil {
		log.Fatal(err)
	}
	fmt.Println("in the books:", total)
	// Output:
	// first: <nil>
	// second: <nil>
	// first, late: sqlfence: admit "reconcile:2026-03-14": stale fence: 41, after 42 was seen
	// stale: true
	// without fencing: sqlfence: admit "reconcile:2026-03-14": fence -1: the lease was taken without redislease.WithFencing
	// in the books: 250
}

// The statement that makes the table, for a migration.
func ExampleGuard_Schema() {
	for _, dialect := range []sqlfence.Dialect{sqlfence.PostgreSQL, sqlfence.MySQL, sqlfence.SQLite} {
		guard, err := sqlfence.New(dialect, "fences")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%v:\n%s\n", dialect, guard.Schema())
	}
	// Output:
	// PostgreSQL:
	// CREATE TABLE IF NOT EXISTS "fences" (
	// 	resource text COLLATE "C" NOT NULL PRIMARY KEY,
	// 	fence bigint NOT NULL
	// )
	// MySQL:
	// CREATE TABLE IF NOT EXISTS `fences` (
	// 	resource VARBINARY(255) NOT NULL PRIMARY KEY,
	// 	fence BIGINT NOT NULL
	// ) ENGINE=InnoDB
	// SQLite:
	// CREATE TABLE IF NOT EXISTS "fences" (
	// 	resource TEXT COLLATE BINARY NOT NULL PRIMARY KEY,
	// 	fence INTEGER NOT NULL
	// ) WITHOUT ROWID
}

// A row that carries its own fence needs no Guard, if that row is all that is written.
func Example_fenceInYourOwnTable() {
	db, remove := openSQLite()
	defer remove()
	ctx := context.Background()
	for _, statement := range []string{
		`CREATE TABLE accounts (id TEXT PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL)`,
		`INSERT INTO accounts VALUES ('alice', 0, 0)`,
	} {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			log.Fatal(err)
		}
	}

	write := func(id string, balance, fence int64) error {
		if fence < 1 {
			return errors.New("the lease was taken without fencing")
		}
		const update = `UPDATE accounts SET balance = ?, fence = ? WHERE id = ? AND fence <= ?`
		result, err := db.ExecContext(ctx, update, balance, fence, id, fence)
		if err != nil {
			return err
		}
		n, err := result.RowsAffected()
		if err != nil || n == 1 {
			return err
		}
		var seen int64
		if err := db.QueryRowContext(ctx, `SELECT fence FROM accounts WHERE id = ?`, id).Scan(&seen); err != nil {
			return fmt.Errorf("account %q: %w", id, err) // sql.ErrNoRows: there is none
		}
		return fmt.Errorf("account %q: fence %d is stale, %d has written", id, fence, seen)
	}

	fmt.Println(write("alice", 100, 41))
	fmt.Println(write("alice", 250, 42))
	fmt.Println(write("alice", 110, 41))
	fmt.Println(write("bob", 10, 42))
	fmt.Println(write("alice", 120, -1))
	// Output:
	// <nil>
	// <nil>
	// account "alice": fence 41 is stale, 42 has written
	// account "bob": sql: no rows in result set
	// the lease was taken without fencing
}
