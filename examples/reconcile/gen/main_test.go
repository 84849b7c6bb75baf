package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheCommittedBooksAreTheGeneratedOnes(t *testing.T) {
	orders, payments := generate()
	for name, rows := range map[string][][]string{"orders.csv": orders, "payments.csv": payments} {
		want, err := encode(rows)
		require.NoError(t, err)
		got, err := os.ReadFile("../data/" + name)
		require.NoError(t, err)
		require.True(t, string(want) == string(got), "data/%s: run go generate in the module's root", name)
	}
}
