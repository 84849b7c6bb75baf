package main

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func TestTheBooksHaveThirtyDaysAndEveryKindOfMismatch(t *testing.T) {
	b, err := loadBooks(dataFiles)
	require.NoError(t, err)
	require.Len(t, b.days, 30)
	require.IsIncreasing(t, b.days)
	orders, found := 0, map[kind]int{}
	for _, day := range b.days {
		orders += len(b.orders[day])
		for _, m := range match(b.orders[day], b.payments[day]) {
			found[m.Kind]++
		}
	}
	require.Greater(t, orders, 3000)
	require.Len(t, found, len(kinds))
}

func TestADayWithPaymentsOnlyIsADay(t *testing.T) {
	b, err := loadBooks(files("O-1,2026-03-02,100,EUR\n", "P-1,2026-03-01,O-1,100,EUR\n"))
	require.NoError(t, err)
	require.Equal(t, []string{"2026-03-01", "2026-03-02"}, b.days)
}

func TestThePartsOfADayMakeUpTheDay(t *testing.T) {
	b, err := loadBooks(dataFiles)
	require.NoError(t, err)
	sums := accounts{}
	for _, day := range b.days {
		parts := b.parts(day)
		require.Greater(t, len(parts), 1)
		e := entry{Day: day}
		for _, p := range parts {
			require.LessOrEqual(t, len(p.orders), partSize)
			e = e.with(1, p)
			sums.post(p)
		}
		mismatches := match(b.orders[day], b.payments[day])
		wrong := 0
		for _, m := range mismatches {
			if m.Kind != paymentWithoutOrder {
				wrong++
			}
		}
		require.Equal(t, entry{
			Day: day, Replica: 1, Parts: len(parts), Orders: len(b.orders[day]), Payments: len(b.payments[day]),
			Matched: len(b.orders[day]) - wrong, Mismatches: mismatches,
		}, e)
	}
	require.Equal(t, b.accounts(), sums)
}

func TestADayWithoutOrdersHasOnePart(t *testing.T) {
	b, err := loadBooks(files("", "P-1,2026-03-01,O-1,100,EUR\n"))
	require.NoError(t, err)
	require.Len(t, b.parts("2026-03-01"), 1)
	require.Equal(t, accounts{"EUR": {Received: 100}}, b.accounts())
}

func TestBooksThatCannotBeReadAreRefusedWithFileAndRow(t *testing.T) {
	_, err := loadBooks(files("O-1,2026-03-02,100,EUR\nO-2,2026-03-02,1.00,EUR\n", ""))
	require.ErrorContains(t, err, "data/orders.csv: row 3")
	_, err = loadBooks(files("", "P-1,2026-03-01,O-1\n"))
	require.ErrorContains(t, err, "data/payments.csv")
	_, err = loadBooks(fstest.MapFS{"data/orders.csv": {Data: []byte("id,amount\n")}})
	require.ErrorContains(t, err, "the heading is not")
	_, err = loadBooks(fstest.MapFS{})
	require.Error(t, err)
}

// files are books with these rows below the headings.
func files(orders, payments string) fstest.MapFS {
	return fstest.MapFS{
		"data/orders.csv":   {Data: []byte("order,day,amount_cents,currency\n" + orders)},
		"data/payments.csv": {Data: []byte("payment,day,order,amount_cents,currency\n" + payments)},
	}
}
