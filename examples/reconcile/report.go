package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// everyDayOnce returns an error that names the days that are not in the journal, or more than once.
func everyDayOnce(days []string, entries []entry) error {
	times := make(map[string]int, len(days))
	for _, e := range entries {
		times[e.Day]++
	}
	var wrong []string
	for _, day := range days {
		if times[day] != 1 {
			wrong = append(wrong, fmt.Sprintf("%s was done %d times", day, times[day]))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%s", strings.Join(wrong, ", "))
	}
	return nil
}

// printReport prints who did how much, and the mismatches by kind with an example of each.
func printReport(out io.Writer, entries []entry) {
	var orders, payments int
	var mismatches []mismatch
	byReplica := map[int]int{}
	for _, e := range entries {
		orders, payments = orders+e.Orders, payments+e.Payments
		mismatches = append(mismatches, e.Mismatches...)
		byReplica[e.Replica]++
	}
	slices.SortStableFunc(mismatches, func(a, b mismatch) int { return strings.Compare(a.Day, b.Day) })

	fmt.Fprintf(out, "\n%d days, %d orders, %d payments, %d mismatches\n", len(entries), orders, payments, len(mismatches))
	for replica := 1; len(byReplica) > 0; replica++ {
		if n, ok := byReplica[replica]; ok {
			fmt.Fprintf(out, "replica %d did %d days\n", replica, n)
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
