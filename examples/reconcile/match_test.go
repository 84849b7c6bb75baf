package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func eur(cents int64) money { return money{Cents: cents, Currency: "EUR"} }
func usd(cents int64) money { return money{Cents: cents, Currency: "USD"} }

func TestAnOrderIsComparedWithItsPayments(t *testing.T) {
	pay := func(amounts ...money) (payments []payment) {
		for _, a := range amounts {
			payments = append(payments, payment{ID: "P-1", Day: "2026-03-01", Order: "O-1", Amount: a})
		}
		return payments
	}
	stray := payment{ID: "P-2", Day: "2026-03-01", Order: "O-2", Amount: eur(100)}
	for name, tc := range map[string]struct {
		payments []payment
		want     []kind
	}{
		"one payment of the amount is right":       {pay(eur(100)), nil},
		"no payment is missing":                    {nil, []kind{missingPayment}},
		"two payments are double":                  {pay(eur(100), eur(100)), []kind{doublePayment}},
		"two payments that make up the sum too":    {pay(eur(40), eur(60)), []kind{doublePayment}},
		"two payments in two currencies, once":     {pay(eur(100), usd(100)), []kind{doublePayment}},
		"less is a wrong amount":                   {pay(eur(99)), []kind{wrongAmount}},
		"more is a wrong amount":                   {pay(eur(101)), []kind{wrongAmount}},
		"another currency is a currency mismatch":  {pay(usd(100)), []kind{currencyMismatch}},
		"the currency comes before the amount":     {pay(usd(99)), []kind{currencyMismatch}},
		"a payment for another order does not pay": {[]payment{stray}, []kind{missingPayment, paymentWithoutOrder}},
		"a stray payment does not spoil a right":   {append(pay(eur(100)), stray), []kind{paymentWithoutOrder}},
		"each stray payment counts": {
			append(pay(eur(100)), stray, stray),
			[]kind{paymentWithoutOrder, paymentWithoutOrder},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []kind
			for _, m := range match([]order{{ID: "O-1", Day: "2026-03-01", Amount: eur(100)}}, tc.payments) {
				got = append(got, m.Kind)
			}
			require.Equal(t, tc.want, got)
		})
	}
}

func TestAMismatchNamesWhatWasOwedAndPaid(t *testing.T) {
	orders := []order{
		{ID: "O-1", Day: "2026-03-01", Amount: eur(10005)},
		{ID: "O-2", Day: "2026-03-01", Amount: usd(200)},
	}
	payments := []payment{
		{ID: "P-1", Day: "2026-03-01", Order: "O-3", Amount: eur(7)},
		{ID: "P-2", Day: "2026-03-01", Order: "O-2", Amount: usd(200)},
		{ID: "P-3", Day: "2026-03-01", Order: "O-2", Amount: usd(199)},
	}
	var got []string
	for _, m := range match(orders, payments) {
		require.Equal(t, "2026-03-01", m.Day)
		got = append(got, m.String())
	}
	require.Equal(t, []string{
		"O-1  owed 100.05 EUR, nothing paid",
		"O-2  owed 2.00 USD, paid 2.00 USD (P-2) and 1.99 USD (P-3)",
		"O-3  paid 0.07 EUR (P-1)",
	}, got)
}
