package main

import (
	"embed"
	"encoding/csv"
	"fmt"
	"io/fs"
	"maps"
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
	return cents(m.Cents) + " " + m.Currency
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

// partSize is how many orders are written at a time.
const partSize = 25

// part is some of a day's orders, with the payments that name them.
type part struct {
	orders   []order
	payments []payment
}

// parts divides a day, which has at least one. A payment without an order is in the last.
func (b *books) parts(day string) []part {
	parts, of := []part{}, map[string]int{}
	for orders := range slices.Chunk(b.orders[day], partSize) {
		for _, o := range orders {
			of[o.ID] = len(parts)
		}
		parts = append(parts, part{orders: orders})
	}
	if len(parts) == 0 {
		parts = append(parts, part{})
	}
	for _, p := range b.payments[day] {
		i, known := of[p.Order]
		if !known {
			i = len(parts) - 1
		}
		parts[i].payments = append(parts[i].payments, p)
	}
	return parts
}

// finished counts the days that have no part left.
func (b *books) finished(entries []entry) (n int) {
	for _, e := range entries {
		if e.Parts >= len(b.parts(e.Day)) {
			n++
		}
	}
	return n
}

// accounts are the sums of all orders and payments.
func (b *books) accounts() accounts {
	sums := accounts{}
	for _, day := range b.days {
		sums.post(part{orders: b.orders[day], payments: b.payments[day]})
	}
	return sums
}

// account is what was owed and received in one currency, in cents.
type account struct{ Owed, Received int64 }

// accounts are by currency.
type accounts map[string]account

// post adds a part.
func (a accounts) post(p part) {
	for _, o := range p.orders {
		of := a[o.Amount.Currency]
		of.Owed += o.Amount.Cents
		a[o.Amount.Currency] = of
	}
	for _, p := range p.payments {
		of := a[p.Amount.Currency]
		of.Received += p.Amount.Cents
		a[p.Amount.Currency] = of
	}
}

// currencies are in alphabetical order.
func (a accounts) currencies() []string { return slices.Sorted(maps.Keys(a)) }

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
