// Package sqlfence refuses, in a SQL database, what somebody writes whose lease is over.
//
// No lease can stop a write that is already on its way, or outlast a failover that lost its key. But its fence (taken
// with redislease.WithFencing, read with Lease.Fence) grows with every acquisition, so the place where a write lands can
// tell who came later. A [Guard] does that in the transaction of the write:
//
//	guard, err := sqlfence.New(sqlfence.PostgreSQL, "fences") // once; guard.Schema() makes the table
//	…
//	tx, err := db.BeginTx(ctx, nil)
//	if err != nil {
//		return err
//	}
//	defer tx.Rollback() // changes nothing after Commit
//	if err := guard.Admit(ctx, tx, lease.Key(), lease.Fence()); err != nil {
//		return err // errors.Is(err, sqlfence.ErrStale): a later holder was here
//	}
//	if _, err := tx.ExecContext(ctx, `UPDATE …`); err != nil {
//		return err
//	}
//	if err := lease.Err(); err != nil {
//		return err
//	}
//	return tx.Commit()
//
// First Admit, then read and write, then look at lease.Err, then Commit.
//
// # What it promises
//
// From its Admit to its end a transaction is the only admitted one of its resource, and those that commit do so in the
// order of their fences. Once a fence was committed, every smaller one is refused, whatever the isolation level, and
// also if the two are the first ever for the resource. Admit takes the lock of the resource's row (on SQLite that of
// the database) for this and keeps it to the end of the transaction.
//
// The number of the fence and the writes are in one database and one transaction. What a crash, a failover or a restored
// backup takes from the one it takes from the other.
//
// # What it does not
//
//   - An earlier holder is not refused before the later one's first Admit. What he writes until then comes before
//     everything that the later one does, who sees it if he reads after his Admit and not before.
//   - A transaction that was admitted holds up later holders until it ends, even if its lease is lost meanwhile. That is
//     the right order, its writes come first; but keep such transactions short, and bound the waiting (a deadline on
//     ctx, lock_timeout, innodb_lock_wait_timeout, busy_timeout).
//   - Only what is in the transaction is guarded. Before an Admit in another transaction, or after it outside of any,
//     everything may happen: there it proves nothing.
//   - A rollback to a savepoint from before Admit takes the admission back, and on MySQL and MariaDB so does a statement
//     that commits by itself (CREATE TABLE and its like).
//   - On clusters that write on several nodes (Galera, Group Replication) a row's lock is one node's own: send all of a
//     resource to one node.
//   - Writes of the same transaction that come before Admit are undone with it when it is refused. But what was read
//     before it may be out of date by the time it returns, and locks taken before it may end in a deadlock.
//   - It does not make a job run once, and it does not tell apart writes with the same fence: those are one holder's.
//     What must never happen twice belongs under a unique constraint.
//   - If fences fall back (see redislease.WithFencing for when they can), a rightful holder is refused until they have
//     caught up, or until an operator deletes the resource's row.
//
// # Errors
//
// Roll back on any error of Admit. [ErrStale] means that trying again is of no use. What the database reports as its own
// is found with errors.As; of these some mean that the whole transaction is to be tried again from the start, with the
// same fence, if lease.Err is still nil:
//
//   - PostgreSQL: 40001 (serialization failure), from Commit too, 40P01 (deadlock), and 55P03 (lock_timeout). At
//     REPEATABLE READ and SERIALIZABLE whoever began before the other had committed gets 40001, whether his fence is
//     stale or not; the next try says which it is.
//   - MySQL, MariaDB: 1213 (deadlock), 1205 (lock wait timeout), and 1020 (record has changed) with
//     innodb_snapshot_isolation, if something was read before Admit. First inserts of a resource that are rolled back
//     can end in a deadlock of those who waited for them.
//   - SQLite: SQLITE_BUSY, and SQLITE_BUSY_SNAPSHOT if something was read before Admit and somebody else has written
//     since. A busy_timeout helps against the first, _txlock=immediate (in the drivers' data source names) against both.
//
// # Isolation
//
// Admit is one statement, an upsert that writes the greater of the two numbers and returns it, and so works on the
// newest committed row at every level. On PostgreSQL, READ COMMITTED, the default, is the level with the fewest retries.
// On MySQL and MariaDB, at REPEATABLE READ, the default, the snapshot is taken by the first plain SELECT: after Admit it
// shows everything that earlier holders have committed, before it does not.
//
// # The table
//
// A row per resource, and two columns. [Guard.Schema] is the statement that makes it; who writes his own needs
//
//   - resource: the primary key, compared byte by byte, of at least [MaxResource] bytes. TEXT COLLATE "C" on
//     PostgreSQL, VARBINARY(255) on MySQL and MariaDB (where text is compared without regard to case and to spaces at
//     the end), TEXT on SQLite
//   - fence: BIGINT NOT NULL (INTEGER on SQLite)
//
// and, on MySQL and MariaDB, InnoDB and no AUTO_INCREMENT column: Admit hands its result back as LAST_INSERT_ID. Columns
// of your own need defaults. The user of the database needs SELECT, INSERT and UPDATE.
//
// PostgreSQL has to be 9.5 or later, SQLite 3.35 or later. The tests run on Debian's PostgreSQL and MariaDB, through pgx
// and go-sql-driver/mysql, and on modernc.org/sqlite; not on MySQL, which documents what Admit needs of it.
//
// Rows are small and stay. Without its row a resource admits any fence, so delete one only when nobody can still be at
// work under it. Fences of redislease are at least the time of their acquisition in microseconds since 1970, so those
// below last month's time are a month old.
//
// # A fence in your own table
//
// If everything that a lease protects is one row, that row can carry the fence, without a Guard:
//
//	UPDATE accounts SET balance = ?, fence = ? WHERE id = ? AND fence <= ?
//
// with the same fence twice. One row changed: written. None: stale, or there is no such row; a SELECT of the fence tells
// which, afterwards, outside of the transaction (inside it may see an old snapshot). The comparison has to be in the
// statement that writes: a SELECT before it proves nothing. Refuse fences below 1, those of a lease without
// redislease.WithFencing, yourself. New rows are inserted with the fence, and rows are not deleted but marked: whoever
// inserts a deleted row anew admits any fence. PostgreSQL reports 40001 at REPEATABLE READ and above, as with Admit.
// MySQL and MariaDB count, unless the driver is told clientFoundRows=true, a row that already had these values as none.
package sqlfence
