package main

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/sqlfence"
)

// everywhere runs a test on a new SQLite file and on a new PostgreSQL database.
func everywhere(t *testing.T, test func(t *testing.T, from source)) {
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, source{file: filepath.Join(t.TempDir(), "what? the #1 of 100%.db")})
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		test(t, source{dsn: newPostgres(t)})
	})
}

// open returns a store of these books, as every replica has one.
func open(t *testing.T, from source, fenced bool) *store {
	t.Helper()
	s, err := openStore(from, fenced)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.close()) })
	return s
}

func create(t *testing.T, from source) *store {
	t.Helper()
	s := open(t, from, true)
	_, err := s.create(t.Context(), false)
	require.NoError(t, err)
	return s
}

const day = "2026-03-11" // has eight parts

func TestAStoreGivesBackWhatWasWritten(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		s := create(t, from)
		b, err := loadBooks(dataFiles)
		require.NoError(t, err)
		none, err := s.entries(t.Context())
		require.NoError(t, err)
		require.Empty(t, none)

		var want []entry
		sums := accounts{}
		for i, day := range b.days[:3] {
			e, err := s.enter(t.Context(), keyOf(day), 1, day)
			require.NoError(t, err)
			require.Equal(t, entry{Day: day}, e)
			for _, p := range b.parts(day)[:2] {
				e = e.with(i, p)
				require.NoError(t, s.write(t.Context(), keyOf(day), 1, e, p))
				sums.post(p)
			}
			want = append(want, e)
			again, err := s.enter(t.Context(), keyOf(day), 2, day)
			require.NoError(t, err)
			require.Equal(t, e, again)
		}
		got, err := s.entries(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, got)
		posted, err := s.accounts(t.Context())
		require.NoError(t, err)
		require.Equal(t, sums, posted)
	})
}

// relay is a day on which the first holder stands still before its write of the second part, the second does the rest
// and the first writes then; whoever comes next does what the row says is left.
func relay(t *testing.T, from source, fenced bool) (posted accounts, late error) {
	t.Helper()
	ctx, fences := t.Context(), []int64{41, 42, 43}
	if !fenced {
		fences = []int64{-1, -1, -1}
	}
	create(t, from)
	b, err := loadBooks(dataFiles)
	require.NoError(t, err)
	parts := b.parts(day)
	rest := func(s *store, replica int) {
		e, err := s.enter(ctx, keyOf(day), fences[replica], day)
		require.NoError(t, err)
		for _, p := range parts[e.Parts:] {
			e = e.with(replica, p)
			require.NoError(t, s.write(ctx, keyOf(day), fences[replica], e, p))
		}
	}
	first := open(t, from, fenced)
	e, err := first.enter(ctx, keyOf(day), fences[0], day)
	require.NoError(t, err)
	e = e.with(0, parts[0])
	require.NoError(t, first.write(ctx, keyOf(day), fences[0], e, parts[0]))

	rest(open(t, from, fenced), 1)
	late = first.write(ctx, keyOf(day), fences[0], e.with(0, parts[1]), parts[1])
	rest(open(t, from, fenced), 2)
	posted, err = first.accounts(ctx)
	require.NoError(t, err)
	return posted, late
}

func TestALateWriteIsRefusedAndChangesNothing(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		posted, late := relay(t, from, true)
		var stale *sqlfence.StaleError
		require.ErrorAs(t, late, &stale)
		require.Equal(t, sqlfence.StaleError{Resource: keyOf(day), Fence: 41, Seen: 42}, *stale)
		require.NotErrorIs(t, late, errDatabase)
		b, err := loadBooks(dataFiles)
		require.NoError(t, err)
		once := accounts{}
		for _, p := range b.parts(day) {
			once.post(p)
		}
		require.NoError(t, balance(posted, once))
	})
}

func TestWithoutAFenceALateWriteHasAllThatFollowsAddedTwice(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		posted, late := relay(t, from, false)
		require.NoError(t, late)
		b, err := loadBooks(dataFiles)
		require.NoError(t, err)
		parts, want := b.parts(day), accounts{}
		for _, p := range append(parts, parts[1:]...) {
			want.post(p)
		}
		require.NoError(t, balance(posted, want))
	})
}

func TestAFormerHolderIsRefusedAsSoonAsTheNextHasEntered(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		s := create(t, from)
		_, err := s.enter(t.Context(), keyOf(day), 42, day) // and has not written
		require.NoError(t, err)
		require.ErrorIs(t, s.write(t.Context(), keyOf(day), 41, entry{Day: day}, part{}), sqlfence.ErrStale)
		_, err = s.enter(t.Context(), keyOf(day), 41, day)
		require.ErrorIs(t, err, sqlfence.ErrStale)
		entries, err := s.entries(t.Context())
		require.NoError(t, err)
		require.Empty(t, entries)
	})
}

func TestALeaseWithoutAFenceIsNotLetIn(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		s := create(t, from)
		_, err := s.enter(t.Context(), keyOf(day), -1, day)
		require.ErrorIs(t, err, errDatabase)
		require.ErrorContains(t, err, "WithFencing")
	})
}

func TestReplicasThatAddAtATimeLoseNothing(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		create(t, from)
		b, err := loadBooks(dataFiles)
		require.NoError(t, err)
		want := accounts{}
		var all sync.WaitGroup
		for i, day := range b.days[:6] {
			s, parts := open(t, from, true), b.parts(day)
			for _, p := range parts {
				want.post(p)
			}
			all.Go(func() {
				e := entry{Day: day}
				for _, p := range parts {
					e = e.with(i, p)
					if err := s.write(context.Background(), keyOf(day), 1, e, p); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		posted, err := open(t, from, true).accounts(t.Context())
		require.NoError(t, err)
		require.NoError(t, balance(posted, want))
	})
}

func TestADatabaseIsMadeOnceAndAfreshWhenAskedTo(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		prefixes := make([]string, 4) // several runs may begin at once
		var all sync.WaitGroup
		for i := range prefixes {
			s := open(t, from, true)
			all.Go(func() {
				var err error
				if prefixes[i], err = s.create(context.Background(), false); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		for _, prefix := range prefixes {
			require.Equal(t, prefixes[0], prefix)
		}
		require.Greater(t, len(prefixes[0]), len("books::"))

		s := open(t, from, true)
		require.NoError(t, s.write(t.Context(), keyOf(day), 42, entry{Day: day}, part{}))
		prefix, err := s.create(t.Context(), true)
		require.NoError(t, err)
		require.NotEqual(t, prefixes[0], prefix)
		entries, err := s.entries(t.Context())
		require.NoError(t, err)
		require.Empty(t, entries)
		_, err = s.enter(t.Context(), keyOf(day), 1, day)
		require.NoError(t, err)
	})
}

func TestADatabaseThatHasNoTablesIsAnErrorAndNotEmpty(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		s := open(t, from, true)
		_, err := s.entries(t.Context())
		require.ErrorIs(t, err, errDatabase)
		_, err = s.accounts(t.Context())
		require.ErrorIs(t, err, errDatabase)
		_, err = s.enter(t.Context(), keyOf(day), 1, day)
		require.ErrorIs(t, err, errDatabase)
		require.ErrorIs(t, s.write(t.Context(), keyOf(day), 1, entry{Day: day}, part{}), errDatabase)
	})
}

func TestAWriteThatFailsHalfwayLeavesNothing(t *testing.T) {
	everywhere(t, func(t *testing.T, from source) {
		s := create(t, from)
		_, err := s.db.ExecContext(t.Context(), "DROP TABLE reconcile_days") // which comes after the accounts
		require.NoError(t, err)
		p := part{orders: []order{{ID: "O-1", Day: day, Amount: eur(100)}}}
		require.ErrorIs(t, s.write(t.Context(), keyOf(day), 42, entry{Day: day}.with(1, p), p), errDatabase)
		posted, err := s.accounts(t.Context())
		require.NoError(t, err)
		require.Empty(t, posted)
		failed := errors.New("nothing more to do")
		require.ErrorIs(t, s.admitted(t.Context(), keyOf(day), 41, func(*sql.Tx) error { return failed }), failed)
	})
}

func TestPlaceholdersAreNumberedForPostgreSQL(t *testing.T) {
	const text = "SELECT ?, a FROM b WHERE c = ?"
	require.Equal(t, text, (&store{}).query(text))
	require.Equal(t, "SELECT $1, a FROM b WHERE c = $2", (&store{dollar: true}).query(text))
	require.Equal(t, strings.Repeat("x", 3), (&store{dollar: true}).query("xxx"))
}
