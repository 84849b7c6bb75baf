package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// everyDayDone returns an error that names the days whose row is not what the files say.
func everyDayDone(b *books, entries []entry) error {
	rows := make(map[string]entry, len(entries))
	for _, e := range entries {
		rows[e.Day] = e
	}
	var wrong []string
	for _, day := range b.days {
		got, want := rows[day], entry{Day: day}
		for _, p := range b.parts(day) {
			want = want.with(got.Replica, p)
		}
		switch {
		case got.Parts < want.Parts:
			wrong = append(wrong, fmt.Sprintf("%s: %d of %d parts are done", day, got.Parts, want.Parts))
		case !reflect.DeepEqual(got, want):
			wrong = append(wrong, fmt.Sprintf("%s: the row is not that of the day", day))
		}
	}
	if len(wrong) > 0 {
		return errors.New(strings.Join(wrong, ", "))
	}
	return nil
}

// balance returns an error that says by how much the accounts are wrong.
func balance(got, want accounts) error {
	var wrong []string
	add := func(what string, currency string, off int64) {
		switch {
		case off > 0:
			wrong = append(wrong, fmt.Sprintf("%v too much %s", money{off, currency}, what))
		case off < 0:
			wrong = append(wrong, fmt.Sprintf("%v too little %s", money{-off, currency}, what))
		}
	}
	all := maps.Clone(want)
	maps.Copy(all, got)
	for _, currency := range all.currencies() {
		add("owed", currency, got[currency].Owed-want[currency].Owed)
		add("received", currency, got[currency].Received-want[currency].Received)
	}
	if len(wrong) > 0 {
		return fmt.Errorf("the books do not balance: %s", strings.Join(wrong, ", "))
	}
	return nil
}

// printAccounts prints what is in the accounts, and what should be.
func printAccounts(out io.Writer, got, want accounts) {
	fmt.Fprintf(out, "\n%-8s  %12s  %12s  %12s  %12s\n", "account", "owed", "by the files", "received", "by the files")
	for _, currency := range want.currencies() {
		fmt.Fprintf(out, "%-8s  %12s  %12s  %12s  %12s\n", currency, cents(got[currency].Owed), cents(want[currency].Owed),
			cents(got[currency].Received), cents(want[currency].Received))
	}
}

func cents(n int64) string { return fmt.Sprintf("%d.%02d", n/100, n%100) }

// printReport prints who did how much, and the mismatches by kind with an example of each.
func printReport(out io.Writer, entries []entry) {
	var orders, matched, payments int
	var mismatches []mismatch
	byReplica := map[int]int{}
	for _, e := range entries {
		orders, matched, payments = orders+e.Orders, matched+e.Matched, payments+e.Payments
		mismatches = append(mismatches, e.Mismatches...)
		byReplica[e.Replica]++
	}
	slices.SortStableFunc(mismatches, func(a, b mismatch) int { return strings.Compare(a.Day, b.Day) })

	fmt.Fprintf(out, "\n%d days, %d orders, %d matched, %d payments, %d mismatches\n", len(entries), orders, matched, payments, len(mismatches))
	for replica := 1; len(byReplica) > 0; replica++ {
		if n, ok := byReplica[replica]; ok {
			fmt.Fprintf(out, "replica %d finished %d days\n", replica, n)
			delete(byReplica, replica)
		}
	}
	fmt.Fprintf(out, "\n%-21s  %5s  %s\n", "mismatch", "count", "for example")
	for _, k := range kinds {
		of := slices.DeleteFunc(slices.Clone(mismatches), func(m mismatch) bool { return m.Kind != k })
		if len(of) > 0 {
			fmt.Fprintf(out, "%-21s  %5d  %s  %v\n", k, len(of), of[0].Day, of[0])
		}
	}
}
