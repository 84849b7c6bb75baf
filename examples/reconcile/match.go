package main

import (
	"fmt"
	"strings"
)

// kind says what is wrong between an order and its payments.
type kind string

const (
	missingPayment      kind = "missing payment"
	doublePayment       kind = "double payment"
	wrongAmount         kind = "wrong amount"
	currencyMismatch    kind = "currency mismatch"
	paymentWithoutOrder kind = "payment without order"
)

// kinds are all of them, in the order of the report.
var kinds = []kind{missingPayment, doublePayment, wrongAmount, currencyMismatch, paymentWithoutOrder}

// mismatch is one finding. A payment without an order names that order all the same; it has no Owed.
type mismatch struct {
	Kind     kind     `json:"kind"`
	Day      string   `json:"day"`
	Order    string   `json:"order"`
	Owed     *money   `json:"owed,omitempty"`
	Payments []string `json:"payments,omitempty"`
	Paid     []money  `json:"paid,omitempty"`
}

// String describes the finding without its kind and day.
func (m mismatch) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s  ", m.Order)
	if m.Owed != nil {
		fmt.Fprintf(&s, "owed %v, ", *m.Owed)
	}
	if len(m.Payments) == 0 {
		s.WriteString("nothing paid")
		return s.String()
	}
	s.WriteString("paid ")
	for i, id := range m.Payments {
		if i > 0 {
			s.WriteString(" and ")
		}
		fmt.Fprintf(&s, "%v (%s)", m.Paid[i], id)
	}
	return s.String()
}

// match compares the orders of one day with the payments of that day. An order is right if exactly one payment names
// it, with its amount in its currency. Each order has at most one mismatch, the first that applies: missing, double,
// currency, amount. Each payment for an unknown order is one of its own.
func match(orders []order, payments []payment) []mismatch {
	byOrder := make(map[string][]payment, len(orders))
	for _, p := range payments {
		byOrder[p.Order] = append(byOrder[p.Order], p)
	}
	var found []mismatch
	known := make(map[string]bool, len(orders))
	for _, o := range orders {
		known[o.ID] = true
		if k := compare(o, byOrder[o.ID]); k != "" {
			m := mismatch{Kind: k, Day: o.Day, Order: o.ID, Owed: &o.Amount}
			for _, p := range byOrder[o.ID] {
				m.Payments, m.Paid = append(m.Payments, p.ID), append(m.Paid, p.Amount)
			}
			found = append(found, m)
		}
	}
	for _, p := range payments {
		if !known[p.Order] {
			found = append(found, mismatch{
				Kind: paymentWithoutOrder, Day: p.Day, Order: p.Order,
				Payments: []string{p.ID}, Paid: []money{p.Amount},
			})
		}
	}
	return found
}

// compare returns what is wrong with the payments of one order, "" if nothing is.
func compare(o order, payments []payment) kind {
	switch {
	case len(payments) == 0:
		return missingPayment
	case len(payments) > 1:
		return doublePayment
	case payments[0].Amount.Currency != o.Amount.Currency:
		return currencyMismatch
	case payments[0].Amount.Cents != o.Amount.Cents:
		return wrongAmount
	}
	return ""
}
