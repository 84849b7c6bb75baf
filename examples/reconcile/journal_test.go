package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func newJournal(t *testing.T) journal {
	t.Helper()
	j, err := openJournal(filepath.Join(t.TempDir(), "journal"))
	require.NoError(t, err)
	return j
}

func daysIn(t *testing.T, j journal) (days []string) {
	t.Helper()
	entries, err := j.read()
	require.NoError(t, err)
	for _, e := range entries {
		days = append(days, e.Day)
	}
	return days
}

func TestAJournalGivesBackWhatWasAppended(t *testing.T) {
	j := newJournal(t)
	require.Empty(t, daysIn(t, j))
	owed := eur(100)
	missing := mismatch{Kind: missingPayment, Day: "2026-03-02", Order: "O-1", Owed: &owed}
	want := []entry{
		{Day: "2026-03-02", Replica: 1, Orders: 2, Payments: 1, Mismatches: []mismatch{missing}},
		{Day: "2026-03-01", Replica: 2},
	}
	for _, e := range want {
		require.NoError(t, j.append(e))
	}
	got, err := j.read()
	require.NoError(t, err)
	require.Equal(t, want, got)

	// To open it again changes nothing.
	_, err = openJournal(j.path)
	require.NoError(t, err)
	has, err := j.has("2026-03-01")
	require.NoError(t, err)
	require.True(t, has)
	has, err = j.has("2026-03-03")
	require.NoError(t, err)
	require.False(t, has)
}

func TestALineThatWasCutOffIsNotADayAndSpoilsNoOther(t *testing.T) {
	whole := newJournal(t)
	require.NoError(t, whole.append(entry{Day: "2026-03-01"}))
	before, err := os.ReadFile(whole.path)
	require.NoError(t, err)
	require.NoError(t, whole.append(entry{Day: "2026-03-02", Mismatches: []mismatch{{Kind: missingPayment}}}))
	text, err := os.ReadFile(whole.path)
	require.NoError(t, err)

	for cut := len(before); cut <= len(text); cut++ {
		j := newJournal(t)
		require.NoError(t, os.WriteFile(j.path, text[:cut], 0o644))
		want := []string{"2026-03-01"}
		if cut >= len(text)-1 { // all but, at most, the newline at the end
			want = append(want, "2026-03-02")
		}
		require.Equal(t, want, daysIn(t, j), "cut off after %d bytes", cut)

		require.NoError(t, j.append(entry{Day: "2026-03-03"}))
		require.Equal(t, append(want, "2026-03-03"), daysIn(t, j), "cut off after %d bytes", cut)
	}
}

func TestReplicasAppendSideBySide(t *testing.T) {
	j := newJournal(t)
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			if err := j.append(entry{Day: fmt.Sprint(i)}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.Len(t, daysIn(t, j), 20)
}

func TestAJournalThatIsGoneIsAnErrorAndNotEmpty(t *testing.T) {
	j := journal{path: filepath.Join(t.TempDir(), "journal")}
	_, err := j.read()
	require.ErrorIs(t, err, errJournal)
	_, err = j.has("2026-03-01")
	require.ErrorIs(t, err, errJournal)
	require.ErrorIs(t, j.append(entry{}), errJournal)
}

func TestTwoJournalsHaveLeasesOfTheirOwn(t *testing.T) {
	one, other := newJournal(t), newJournal(t)
	require.NotEqual(t, one.keyPrefix(), other.keyPrefix())
	again, err := openJournal(one.path)
	require.NoError(t, err)
	require.Equal(t, one.keyPrefix(), again.keyPrefix())
}
