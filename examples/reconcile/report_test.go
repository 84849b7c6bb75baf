package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestADayThatIsMissingUnfinishedOrWrongIsAnError(t *testing.T) {
	b, err := loadBooks(files("O-1,2026-03-01,100,EUR\nO-2,2026-03-02,100,EUR\nO-3,2026-03-03,100,EUR\n", ""))
	require.NoError(t, err)
	var entries []entry
	for i, day := range b.days {
		entries = append(entries, entry{Day: day}.with(i, b.parts(day)[0]))
	}
	require.NoError(t, everyDayDone(b, entries))
	require.Equal(t, 3, b.finished(entries))
	entries[1].Parts, entries[2].Matched = 0, 1
	require.Equal(t, 2, b.finished(entries))
	require.EqualError(t, everyDayDone(b, entries[1:]),
		"2026-03-01: 0 of 1 parts are done, 2026-03-02: 0 of 1 parts are done, 2026-03-03: the row is not that of the day")
}

func TestAccountsThatDoNotBalanceAreAnErrorThatSaysByHowMuch(t *testing.T) {
	want := accounts{"EUR": {Owed: 1000, Received: 900}, "USD": {Owed: 5, Received: 5}}
	require.NoError(t, balance(want, want))
	require.EqualError(t, balance(accounts{"EUR": {Owed: 1234, Received: 899}, "GBP": {Received: 1}}, want),
		"the books do not balance: 2.34 EUR too much owed, 0.01 EUR too little received, 0.01 GBP too much received, "+
			"0.05 USD too little owed, 0.05 USD too little received")
}

func TestTheReportCountsByKindAndShowsTheFirstOfEach(t *testing.T) {
	var out bytes.Buffer
	one, two := eur(100), eur(200)
	first := []mismatch{{Kind: missingPayment, Day: "2026-03-01", Order: "O-1", Owed: &one}}
	second := []mismatch{{Kind: missingPayment, Day: "2026-03-02", Order: "O-2", Owed: &two}}
	printReport(&out, []entry{
		{Day: "2026-03-02", Replica: 2, Orders: 5, Matched: 4, Payments: 4, Mismatches: second},
		{Day: "2026-03-01", Replica: 2, Orders: 3, Matched: 2, Payments: 2, Mismatches: first},
	})
	printAccounts(&out, accounts{"EUR": {Owed: 12345, Received: 5}}, accounts{"EUR": {Owed: 12345, Received: 105}})
	require.Equal(t, `
2 days, 8 orders, 6 matched, 6 payments, 2 mismatches
replica 2 finished 2 days

mismatch               count  for example
missing payment            2  2026-03-01  O-1  owed 1.00 EUR, nothing paid

account           owed  by the files      received  by the files
EUR             123.45        123.45          0.05          1.05
`, out.String())
}
