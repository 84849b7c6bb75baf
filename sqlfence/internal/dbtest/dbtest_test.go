//go:build unix

package dbtest_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/sqlfence/internal/dbtest"
)

const patience = 30 * time.Second

func TestMain(m *testing.M) {
	code := m.Run()
	dbtest.Stop()
	os.Exit(code)
}

var servers = []struct {
	name, env string
	start     func(testing.TB) string
}{
	{"PostgreSQL", dbtest.EnvPostgres, dbtest.PostgreSQL},
	{"MariaDB", dbtest.EnvMariaDB, dbtest.MariaDB},
}

// The helper is this test binary, run again by the tests below.
const envHelper = "DBTEST_HELPER"

func TestHelperThatIsKilled(t *testing.T) {
	name := os.Getenv(envHelper)
	if name == "" {
		t.Skip("runs only as the child of another test")
	}
	for _, s := range servers {
		if s.name == name {
			fmt.Println("addr", s.start(t))
		}
	}
	select {}
}

func TestAServerDiesWithTheProcessOfItsTestsAndLeavesNoDirectory(t *testing.T) {
	for _, s := range servers {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "killed")
			require.NoError(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			require.NoError(t, os.Chmod(dir, 0o755)) // the server's user has to get through
			cmd := exec.Command(os.Args[0], "-test.run=^TestHelperThatIsKilled$")
			cmd.Env = append(os.Environ(), envHelper+"="+s.name, "TMPDIR="+dir)
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			var addr, all string
			for r := bufio.NewScanner(out); addr == "" && r.Scan(); {
				all += r.Text() + "\n"
				if strings.HasPrefix(r.Text(), "--- SKIP") {
					t.Skip("no server")
				}
				if a, ok := strings.CutPrefix(r.Text(), "addr "); ok {
					addr = a
				}
			}
			require.NotEmpty(t, addr, all)
			nc, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			_ = nc.Close()

			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
			require.Eventually(t, func() bool {
				nc, err := net.Dial("tcp", addr)
				if err == nil {
					_ = nc.Close()
				}
				left, _ := filepath.Glob(filepath.Join(dir, "*"))
				return err != nil && len(left) == 0
			}, patience, 10*time.Millisecond, "the server or its directory is still there")
		})
	}
}

// This runs in processes of its own, since a binary looks for its servers once.
func TestAMissingBinarySkipsUnlessItIsRequired(t *testing.T) {
	if name := os.Getenv(envHelper); strings.HasPrefix(name, "missing ") {
		for _, s := range servers {
			if "missing "+s.name == name {
				r := &recorder{TB: t}
				done := make(chan struct{})
				go func() {
					defer close(done)
					s.start(r)
				}()
				<-done
				fmt.Println("outcome", r.outcome)
			}
		}
		return
	}
	for _, s := range servers {
		for require1, want := range map[string]string{"": "skip", "1": "fatal"} {
			t.Run(s.name+", required="+require1, func(t *testing.T) {
				cmd := exec.Command(os.Args[0], "-test.run=^TestAMissingBinarySkipsUnlessItIsRequired$")
				cmd.Env = append(os.Environ(), envHelper+"=missing "+s.name, s.env+"=/nonexistent/server", dbtest.EnvRequire+"="+require1)
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, string(out))
				require.Contains(t, string(out), "outcome "+want+" dbtest: ")
				require.Contains(t, string(out), s.env)
			})
		}
	}
}

// recorder notes how a test would have ended.
type recorder struct {
	testing.TB
	outcome string
}

func (r *recorder) Skipf(format string, args ...any)  { r.end("skip", format, args) }
func (r *recorder) Fatalf(format string, args ...any) { r.end("fatal", format, args) }

func (r *recorder) end(how, format string, args []any) {
	r.outcome = how + " " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}
