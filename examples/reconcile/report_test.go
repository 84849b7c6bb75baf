package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestADayThatWasMissedOrDoneTwiceIsAnError(t *testing.T) {
	days := []string{"2026-03-01", "2026-03-02", "2026-03-03"}
	require.NoError(t, everyDayOnce(days, []entry{{Day: days[2]}, {Day: days[0]}, {Day: days[1]}}))
	require.EqualError(t, everyDayOnce(days, []entry{{Day: days[2]}, {Day: days[1]}, {Day: days[2]}}),
		"2026-03-01 was done 0 times, 2026-03-03 was done 2 times")
}

func TestTheReportCountsByKindAndShowsTheFirstOfEach(t *testing.T) {
	var out bytes.Buffer
	one, two := eur(100), eur(200)
	first := []mismatch{{Kind: missingPayment, Day: "2026-03-01", Order: "O-1", Owed: &one}}
	second := []mismatch{{Kind: missingPayment, Day: "2026-03-02", Order: "O-2", Owed: &two}}
	printReport(&out, []entry{
		{Day: "2026-03-02", Replica: 2, Orders: 5, Payments: 4, Mismatches: second},
		{Day: "2026-03-01", Replica: 2, Orders: 3, Payments: 2, Mismatches: first},
	})
	require.Equal(t, `
2 days, 8 orders, 6 payments, 2 mismatches
replica 2 did 2 days

mismatch               count  for example
missing payment            2  2026-03-01  O-1  owed 1.00 EUR, nothing paid
`, out.String())
}
