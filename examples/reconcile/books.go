package main

import (
	"embed"
	"encoding/csv"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
)

//go:generate go run ./gen

//go:embed data/orders.csv data/payments.csv
var dataFiles embed.FS

// money is an amount in the smallest unit of its currency.
type money struct {
	Cents    int64  `json:"cents"`
	Currency string `json:"currency"`
}

func (m money) String() string {
	return fmt.Sprintf("%d.%02d %s", m.Cents/100, m.Cents%100, m.Currency)
}

// order is what a customer owes.
type order struct {
	ID, Day string
	Amount  money
}

// payment is what the bank received, and for which order.
type payment struct {
	ID, Day, Order string
	Amount         money
}

// books are the orders and payments by business day.
type books struct {
	days     []string // ascending, each once
	orders   map[string][]order
	payments map[string][]payment
}

// reconcile compares the orders of one day with its payments.
func (b *books) reconcile(day string) []mismatch {
	return match(b.orders[day], b.payments[day])
}

// loadBooks reads data/orders.csv and data/payments.csv.
func loadBooks(files fs.FS) (*books, error) {
	b := &books{orders: map[string][]order{}, payments: map[string][]payment{}}
	err := readCSV(files, "data/orders.csv", func(row []string) error {
		amount, err := parseMoney(row[2], row[3])
		b.orders[row[1]] = append(b.orders[row[1]], order{ID: row[0], Day: row[1], Amount: amount})
		return err
	}, "order", "day", "amount_cents", "currency")
	if err != nil {
		return nil, err
	}
	err = readCSV(files, "data/payments.csv", func(row []string) error {
		amount, err := parseMoney(row[3], row[4])
		b.payments[row[1]] = append(b.payments[row[1]], payment{ID: row[0], Day: row[1], Order: row[2], Amount: amount})
		return err
	}, "payment", "day", "order", "amount_cents", "currency")
	if err != nil {
		return nil, err
	}
	for day := range b.orders {
		b.days = append(b.days, day)
	}
	for day := range b.payments {
		b.days = append(b.days, day)
	}
	slices.Sort(b.days)
	b.days = slices.Compact(b.days)
	return b, nil
}

// readCSV calls each for every row below the expected heading.
func readCSV(files fs.FS, name string, each func(row []string) error, heading ...string) error {
	file, err := files.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	rows, err := csv.NewReader(file).ReadAll()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if len(rows) == 0 || !slices.Equal(rows[0], heading) {
		return fmt.Errorf("%s: the heading is not %q", name, heading)
	}
	for i, row := range rows[1:] {
		if err := each(row); err != nil {
			return fmt.Errorf("%s: row %d: %w", name, i+2, err)
		}
	}
	return nil
}

func parseMoney(cents, currency string) (money, error) {
	n, err := strconv.ParseInt(cents, 10, 64)
	return money{Cents: n, Currency: currency}, err
}
