package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// result is what one adapter did in one cell, in one round.
type result struct {
	cell    string
	adapter string
	round   int
	values  map[string]float64 // by column; NaN and infinite ones are not known
	problem string
}

// table collects the results of a scenario.
type table struct {
	scenario string
	columns  []string
	results  []result
}

func (t *table) add(r result) {
	for column, v := range r.values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			delete(r.values, column)
		}
	}
	t.results = append(t.results, r)
}

// row is one adapter in one cell, over all rounds.
type row struct {
	adapter  string
	values   map[string]float64 // medians
	ratios   map[string]float64 // medians of the ratios to the reference in the same round
	problems []string
}

// cells returns the headings in the order in which they came.
func (t *table) cells() (cells []string) {
	for _, r := range t.results {
		if !slices.Contains(cells, r.cell) {
			cells = append(cells, r.cell)
		}
	}
	return cells
}

// rows returns the rows of a cell, in the order of adapters.
func (t *table) rows(cell string) (rows []row) {
	byRound := map[int]map[string]float64{}
	for _, r := range t.results {
		if r.cell == cell && r.adapter == reference[t.scenario] {
			byRound[r.round] = r.values
		}
	}
	for _, a := range adapters() {
		values, ratios := map[string][]float64{}, map[string][]float64{}
		line := row{adapter: a.name, values: map[string]float64{}, ratios: map[string]float64{}}
		measured := false
		for _, r := range t.results {
			if r.cell != cell || r.adapter != a.name {
				continue
			}
			measured = true
			if r.problem != "" && !slices.Contains(line.problems, r.problem) {
				line.problems = append(line.problems, r.problem)
			}
			for column, v := range r.values {
				values[column] = append(values[column], v)
				if ref := byRound[r.round][column]; ref != 0 {
					ratios[column] = append(ratios[column], v/ref)
				}
			}
		}
		for column := range values {
			line.values[column] = median(values[column])
			if isSum(column) {
				line.values[column] = sum(values[column])
				delete(ratios, column)
			}
		}
		for column := range ratios {
			line.ratios[column] = median(ratios[column])
		}
		if measured {
			rows = append(rows, line)
		}
	}
	return rows
}

// isSum: what counts is how often it happened in all rounds.
func isSum(column string) bool {
	return slices.Contains([]string{columnDrains, columnLate, columnUnserved, columnLost}, column)
}

func sum(values []float64) (total float64) {
	for _, v := range values {
		total += v
	}
	return total
}

// print writes a table for each cell. After a value stands its ratio to the reference.
func (t *table) print(w io.Writer) error {
	for _, cell := range t.cells() {
		rows := t.rows(cell)
		columns := slices.DeleteFunc(slices.Clone(t.columns), func(column string) bool {
			return !slices.ContainsFunc(rows, func(r row) bool { _, known := r.values[column]; return known })
		})
		if _, err := fmt.Fprintf(w, "\n%s (x: ratio to %s)\n", cell, reference[t.scenario]); err != nil {
			return err
		}
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintf(tw, "\t%s\n", strings.Join(columns, "\t"))
		for _, r := range rows {
			fmt.Fprint(tw, r.adapter)
			for _, column := range columns {
				fmt.Fprint(tw, "\t", r.text(column))
			}
			if len(r.problems) > 0 {
				fmt.Fprint(tw, "\t! ", strings.Join(r.problems, "; "))
			}
			fmt.Fprintln(tw)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func (r row) text(column string) string {
	v, known := r.values[column]
	if !known {
		return "-"
	}
	text := number(v)
	if ratio, known := r.ratios[column]; known {
		text += " x" + number(ratio)
	}
	return text
}

// number has three significant digits.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1e5:
		return fmt.Sprintf("%.0fk", v/1e3)
	case a >= 100 || v == math.Trunc(v):
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.2g", v)
}
