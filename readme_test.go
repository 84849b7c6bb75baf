package redislease_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheCodeInTheReadmeIsThatOfAnExample(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	var examples []byte
	for _, file := range []string{"example_test.go", "sqlfence/example_test.go"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		examples = append(examples, text...)
	}

	blocks := strings.Split(unindented(readme), "\n```go\n")[1:]
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		code, _, closed := strings.Cut(block, "\n```\n")
		require.True(t, closed)
		require.Contains(t, unindented(examples), "\n"+code+"\n")
	}
}

// unindented returns text without the white space around its lines.
func unindented(text []byte) string {
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return strings.Join(lines, "\n")
}
