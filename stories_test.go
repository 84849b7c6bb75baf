package redislease_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEveryStoryHasItsTestOrAReason holds the table of stories against the tests that there are.
func TestEveryStoryHasItsTestOrAReason(t *testing.T) {
	const stories = 73
	table, err := os.ReadFile(filepath.Join("testdata", "stories.md"))
	require.NoError(t, err)
	tests := testNames(t)
	rows := map[string]string{}
	for line := range strings.Lines(string(table)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 2 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "C") {
			continue
		}
		require.Len(t, cells, 5, line)
		number, row := strings.TrimSpace(cells[1]), strings.TrimSpace(cells[3])
		require.Equal(t, fmt.Sprintf("C%02d", len(rows)+1), number)
		rows[number] = row
		if row == "" || strings.Contains(row, "TODO") {
			t.Errorf("%s has neither a test nor a reason", number)
		}
		for _, name := range regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(row, -1) {
			if !tests[name[1]] {
				t.Errorf("%s: there is no %s", number, name[1])
			}
		}
	}
	require.Len(t, rows, stories)
	for name := range tests {
		number := regexp.MustCompile(`^Test(C\d\d)`).FindStringSubmatch(name)
		if number != nil && !strings.Contains(rows[number[1]], "`"+name+"`") {
			t.Errorf("%s is not in the row of its story", name)
		}
	}
}

// testNames returns the names of the module's tests, without those of the modules below it.
func testNames(t *testing.T) map[string]bool {
	names := map[string]bool{}
	test := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil && path != "." {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		for _, m := range test.FindAllSubmatch(source, -1) {
			names[string(m[1])] = true
		}
		return err
	}))
	return names
}
