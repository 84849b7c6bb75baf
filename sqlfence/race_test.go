package sqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/sqlfence"
)

// admission is how a transaction of the race is admitted: by the Guard or, for the form without one, by its own write.
type admission func(ctx context.Context, tx *sql.Tx, resource string, fence int64) error

// race is a number of holders that all believe they hold a lease. Fences are handed out in order, and nothing but the
// database keeps the holders apart. Each admitted transaction reads a count and writes it back increased, with its
// fence, and adds a line to a journal whose numbers are given out when the line is inserted.
type race struct {
	*world
	admit    admission
	handed   map[string]*atomic.Int64 // the last fence of each resource
	greatest map[string]*atomic.Int64 // the greatest that was committed

	mu        sync.Mutex
	committed map[string]int // transactions by resource
	stale     int
	retried   map[string]int // by what the database called it
	refusals  []*sqlfence.StaleError
}

func newRace(t testing.TB, w *world, resources ...string) *race {
	t.Helper()
	id := map[sqlfence.Dialect]string{
		sqlfence.PostgreSQL: "BIGSERIAL PRIMARY KEY",
		sqlfence.MySQL:      "BIGINT AUTO_INCREMENT PRIMARY KEY",
		sqlfence.SQLite:     "INTEGER PRIMARY KEY AUTOINCREMENT",
	}[w.dialect]
	w.exec(t, "CREATE TABLE "+w.table+"_state (resource VARCHAR(64) PRIMARY KEY, fence BIGINT NOT NULL, n BIGINT NOT NULL)")
	w.exec(t, "CREATE TABLE "+w.table+"_journal (id "+id+", resource VARCHAR(64) NOT NULL, fence BIGINT NOT NULL, n BIGINT NOT NULL)")
	r := &race{
		world: w, admit: w.guard.Admit,
		handed: map[string]*atomic.Int64{}, greatest: map[string]*atomic.Int64{},
		committed: map[string]int{}, retried: map[string]int{},
	}
	for _, resource := range resources {
		w.exec(t, "INSERT INTO "+w.table+"_state VALUES (?, 0, 0)", resource)
		r.handed[resource], r.greatest[resource] = new(atomic.Int64), new(atomic.Int64)
	}
	return r
}

// hold is one holder: a fence, and some transactions with it, each tried until it is committed or refused.
func (r *race) hold(t testing.TB, conn *sql.Conn, resource string, writes int, giveUp bool) {
	fence := r.handed[resource].Add(1)
	for range writes {
		for deadline := time.Now().Add(time.Minute); ; {
			pause()
			err := r.write(conn, resource, fence, giveUp)
			if err == nil || errors.Is(err, errGivenUp) {
				break
			}
			var refused *sqlfence.StaleError
			if errors.As(err, &refused) {
				r.mu.Lock()
				r.stale++
				r.refusals = append(r.refusals, refused)
				r.mu.Unlock()
				return
			}
			code := again(err)
			if code == "" || time.Now().After(deadline) {
				t.Errorf("neither done nor refused: %v", err)
				return
			}
			r.mu.Lock()
			r.retried[code]++
			r.mu.Unlock()
		}
	}
}

var errGivenUp = errors.New("given up")

// write is one transaction.
func (r *race) write(conn *sql.Conn, resource string, fence int64, giveUp bool) (err error) {
	ctx := context.Background()
	before := r.greatest[resource].Load() // committed before this transaction began
	tx, err := conn.BeginTx(ctx, &sql.TxOptions{Isolation: r.level})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := r.admit(ctx, tx, resource, fence); err != nil {
		return err
	}
	if before > fence {
		return fmt.Errorf("fence %d was admitted after %d had been committed", fence, before)
	}
	pause()
	if giveUp {
		return errGivenUp
	}
	var n, last int64
	row := tx.QueryRowContext(ctx, r.bind("SELECT n, fence FROM "+r.table+"_state WHERE resource = ?"), resource)
	if err := row.Scan(&n, &last); err != nil {
		return err
	}
	if last > fence {
		return fmt.Errorf("fence %d was admitted and sees what %d has written", fence, last)
	}
	pause()
	if _, err := tx.ExecContext(ctx, r.bind("INSERT INTO "+r.table+"_journal (resource, fence, n) VALUES (?, ?, ?)"), resource, fence, n+1); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, r.bind("UPDATE "+r.table+"_state SET n = ?, fence = ? WHERE resource = ?"), n+1, fence, resource); err != nil {
		return err
	}
	pause()
	if err := tx.Commit(); err != nil {
		return err
	}
	r.mu.Lock()
	r.committed[resource]++
	r.mu.Unlock()
	for g := r.greatest[resource].Load(); g < fence && !r.greatest[resource].CompareAndSwap(g, fence); g = r.greatest[resource].Load() {
	}
	return nil
}

// pause is none in most cases, and sometimes long enough for others to take over.
func pause() {
	switch rand.IntN(8) {
	case 0:
		time.Sleep(rand.N(2 * time.Millisecond))
	case 1:
		time.Sleep(rand.N(100 * time.Microsecond))
	}
}

// check looks at what the database has in the end.
func (r *race) check(t testing.TB) {
	t.Helper()
	type line struct{ fence, n int64 }
	journal := map[string][]line{}
	rows, err := r.db.QueryContext(t.Context(), "SELECT resource, fence, n FROM "+r.table+"_journal ORDER BY id")
	require.NoError(t, err)
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var resource string
		var l line
		require.NoError(t, rows.Scan(&resource, &l.fence, &l.n))
		journal[resource] = append(journal[resource], l)
	}
	require.NoError(t, rows.Err())

	fences := map[string]map[int64]bool{}
	for resource := range r.handed {
		lines := journal[resource]
		fences[resource] = map[int64]bool{}
		last := line{}
		for _, l := range lines {
			require.GreaterOrEqual(t, l.fence, last.fence, "%s: a stale write after a newer one", resource)
			require.Equal(t, last.n+1, l.n, "%s: a lost update", resource)
			fences[resource][l.fence] = true
			last = l
		}
		require.Len(t, lines, r.committed[resource], resource)

		var state line
		row := r.db.QueryRowContext(t.Context(), r.bind("SELECT fence, n FROM "+r.table+"_state WHERE resource = ?"), resource)
		require.NoError(t, row.Scan(&state.fence, &state.n))
		require.Equal(t, last, state, "%s: the last writer is not the one with the greatest fence", resource)
		require.Equal(t, r.greatest[resource].Load(), last.fence)
	}
	for _, refused := range r.refusals {
		require.Greater(t, refused.Seen, refused.Fence)
		require.True(t, fences[refused.Resource][refused.Seen], "refused for a fence that was never committed: %v", refused)
	}
}

func (r *race) report(t testing.TB, took time.Duration) {
	committed := 0
	for n := range maps.Values(r.committed) {
		committed += n
	}
	t.Logf("%d committed, %d refused as stale, tried again %v, %.0f committed per second", committed, r.stale, r.retried, float64(committed)/took.Seconds())
	require.Positive(t, committed)
}

// raceWorkers is how many there are at the same time.
const raceWorkers = 6

// run runs one holder after the other on each of some connections.
func (r *race) run(t *testing.T, holds func(hold func(resource string, writes int, giveUp bool))) {
	t.Helper()
	conns := make([]*sql.Conn, raceWorkers)
	for i := range conns {
		var err error
		conns[i], err = r.db.Conn(t.Context())
		require.NoError(t, err)
		require.NoError(t, conns[i].PingContext(t.Context()))
	}
	start := make(chan struct{})
	var wg sync.WaitGroup
	for _, conn := range conns {
		wg.Go(func() {
			<-start
			holds(func(resource string, writes int, giveUp bool) { r.hold(t, conn, resource, writes, giveUp) })
		})
	}
	began := time.Now()
	close(start)
	wg.Wait()
	took := time.Since(began)
	for _, conn := range conns {
		require.NoError(t, conn.Close())
	}
	r.check(t)
	r.report(t, took)
}

var twoResources = []string{"a", "b"}

// contend has each of the workers hold one or the other of two resources. Two holders from before all of them come last.
func (r *race) contend(t *testing.T, holds int) {
	t.Helper()
	if r.dialect == sqlfence.SQLite {
		holds /= 3 // who waits there looks again by the clock
	}
	late := map[string]int64{}
	for _, resource := range twoResources {
		late[resource] = r.handed[resource].Add(1)
	}
	r.run(t, func(hold func(string, int, bool)) {
		for range holds {
			hold(twoResources[rand.IntN(2)], 1+rand.IntN(3), rand.IntN(10) == 0)
		}
	})
	conn, err := r.db.Conn(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	for resource, fence := range late {
		require.ErrorIs(t, r.write(conn, resource, fence, false), sqlfence.ErrStale)
	}
}

func TestStaleWritersRaceNewHolders(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		newRace(t, w, twoResources...).contend(t, 100)
	})
}

// There is no row yet whose lock could be taken, and some who insert it roll back.
func TestTheFirstHoldersOfManyResourcesRace(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		var resources []string
		for i := range 60 {
			resources = append(resources, fmt.Sprintf("r%02d", i))
		}
		r := newRace(t, w, resources...)
		r.run(t, func(hold func(string, int, bool)) {
			for _, resource := range resources { // in step: all of them are at about the same one
				hold(resource, 1, rand.IntN(4) == 0)
			}
		})
	})
}

// Where rows are locked, two transactions that take two resources in opposite orders wait for each other. The database
// ends one of them and says so.
func TestADeadlockIsReported(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		if w.dialect == sqlfence.SQLite {
			t.Skip("one transaction writes at a time")
		}
		first, second := w.begin(t), w.begin(t)
		require.NoError(t, w.guard.Admit(t.Context(), first, "a", 1))
		require.NoError(t, w.guard.Admit(t.Context(), second, "b", 1))
		results := make(chan error, 2)
		cross := func(tx *sql.Tx, resource string) {
			err := w.guard.Admit(context.Background(), tx, resource, 1)
			if err != nil {
				_ = tx.Rollback() // lets the other one go on
			} else {
				err = tx.Commit()
			}
			results <- err
		}
		go cross(first, "b")
		go cross(second, "a")
		codes := map[string]int{}
		for range 2 {
			select {
			case err := <-results:
				require.NotErrorIs(t, err, sqlfence.ErrStale)
				if err != nil {
					require.NotEmpty(t, again(err), err)
				}
				codes[again(err)]++
			case <-time.After(patience):
				t.Fatal("the deadlock is still there")
			}
		}
		require.LessOrEqual(t, codes[""], 1, "both went through: %v", codes)
	})
}

// The form without a Guard, as the package comment has it.
func TestAFenceInTheRowItselfRaces(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, w *world) {
		w.exec(t, "CREATE TABLE "+w.table+"_own (id VARCHAR(64) PRIMARY KEY, fence BIGINT NOT NULL, writes BIGINT NOT NULL)")
		for _, resource := range twoResources {
			w.exec(t, "INSERT INTO "+w.table+"_own VALUES (?, 0, 0)", resource)
		}
		r := newRace(t, w, twoResources...)
		r.admit = func(ctx context.Context, tx *sql.Tx, resource string, fence int64) error {
			result, err := tx.ExecContext(ctx, r.bind("UPDATE "+w.table+"_own SET writes = writes + 1, fence = ? WHERE id = ? AND fence <= ?"), fence, resource, fence)
			if err != nil {
				return err
			}
			n, err := result.RowsAffected()
			if err != nil || n == 1 {
				return err
			}
			_ = tx.Rollback()
			stale := &sqlfence.StaleError{Resource: resource, Fence: fence}
			if err := w.db.QueryRowContext(ctx, r.bind("SELECT fence FROM "+w.table+"_own WHERE id = ?"), resource).Scan(&stale.Seen); err != nil {
				return err
			}
			return stale
		}
		r.contend(t, 40)
	})
}
