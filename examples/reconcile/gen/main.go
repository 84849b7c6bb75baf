// Command gen writes the books of the example: thirty days of orders and payments, with the mismatches that such books
// have. The seed is fixed, so it writes the same files every time.
//
//	go run ./gen
package main

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

const (
	firstDay = "2026-03-01"
	days     = 30
)

func main() {
	orders, payments := generate()
	for name, rows := range map[string][][]string{"orders.csv": orders, "payments.csv": payments} {
		text, err := encode(rows)
		if err != nil {
			log.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join("data", name), text, 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

// generate returns the rows of both files, headings included.
func generate() (orders, payments [][]string) {
	day, err := time.Parse(time.DateOnly, firstDay)
	if err != nil {
		panic(err)
	}
	b := &bank{rand: rand.New(rand.NewPCG(2026, 3))}
	orders = append(orders, []string{"order", "day", "amount_cents", "currency"})
	payments = append(payments, []string{"payment", "day", "order", "amount_cents", "currency"})
	for range days {
		o, p := b.day(day)
		orders = append(orders, o...)
		payments = append(payments, p...)
		day = day.AddDate(0, 0, 1)
	}
	return orders, payments
}

// A bank invents orders and how they were paid.
type bank struct {
	rand             *rand.Rand
	orders, payments int // the last number given out
}

// day invents one day: fewer orders at the weekend, the payments in another order than the orders.
func (b *bank) day(day time.Time) (orders, payments [][]string) {
	n := 110 + b.rand.IntN(90)
	if day.Weekday() == time.Saturday || day.Weekday() == time.Sunday {
		n /= 2
	}
	date := day.Format(time.DateOnly)
	for range n {
		b.orders++
		order, cents, currency := fmt.Sprintf("O-%d", 10000+b.orders), b.amount(), b.currency()
		orders = append(orders, []string{order, date, strconv.Itoa(cents), currency})
		payments = append(payments, b.pay(date, order, cents, currency)...)
	}
	b.rand.Shuffle(len(payments), func(i, j int) { payments[i], payments[j] = payments[j], payments[i] })
	return orders, payments
}

// pay invents the payments of one order: mostly one, and right.
func (b *bank) pay(date, order string, cents int, currency string) [][]string {
	switch chance := b.rand.IntN(1000); {
	case chance < 12: // never paid
		return nil
	case chance < 18: // paid twice
		return [][]string{b.payment(date, order, cents, currency), b.payment(date, order, cents, currency)}
	case chance < 26: // another amount: a discount, a fee or a transposed digit
		off := 1 + b.rand.IntN(cents/4)
		if b.rand.IntN(4) == 0 {
			off = -off
		}
		return [][]string{b.payment(date, order, cents-off, currency)}
	case chance < 30: // the right figure in the wrong currency
		return [][]string{b.payment(date, order, cents, other(currency))}
	case chance < 35: // and somebody pays for an order that does not exist
		stray := fmt.Sprintf("O-%d", 90000+b.rand.IntN(10000))
		return [][]string{b.payment(date, order, cents, currency), b.payment(date, stray, b.amount(), b.currency())}
	default:
		return [][]string{b.payment(date, order, cents, currency)}
	}
}

func (b *bank) payment(date, order string, cents int, currency string) []string {
	b.payments++
	return []string{fmt.Sprintf("P-%d", 500000+b.payments), date, order, strconv.Itoa(cents), currency}
}

// amount invents a price: many small ones, few large ones.
func (b *bank) amount() int {
	return 499 + int(b.rand.ExpFloat64()*6000)
}

func (b *bank) currency() string {
	switch chance := b.rand.IntN(100); {
	case chance < 75:
		return "EUR"
	case chance < 90:
		return "USD"
	default:
		return "GBP"
	}
}

func other(currency string) string {
	if currency == "EUR" {
		return "USD"
	}
	return "EUR"
}

func encode(rows [][]string) ([]byte, error) {
	var text bytes.Buffer
	if err := csv.NewWriter(&text).WriteAll(rows); err != nil {
		return nil, err
	}
	return text.Bytes(), nil
}
