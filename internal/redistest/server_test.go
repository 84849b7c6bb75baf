//go:build unix

package redistest_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redislease/redislease/internal/redistest"
)

const patience = 20 * time.Second

func TestAServerAnswersCommands(t *testing.T) {
	s := redistest.Start(t)
	for _, tt := range []struct {
		args []string
		want any
	}{
		{[]string{"SET", "k", "v", "PX", "60000"}, "OK"},
		{[]string{"GET", "k"}, "v"},
		{[]string{"GET", "none"}, nil},
		{[]string{"EXISTS", "k"}, int64(1)},
		{[]string{"MGET", "k", "none"}, []any{"v", nil}},
	} {
		got, err := s.Do(tt.args...)
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%v: got %#v, %v; want %#v", tt.args, got, err, tt.want)
		}
	}
	if got := s.Get("k"); got != "v" {
		t.Errorf("Get: %q", got)
	}
	if got := s.PTTL("k"); got <= 0 || got > time.Minute {
		t.Errorf("PTTL: %v", got)
	}
	if got := s.PTTL("none"); got != -2 {
		t.Errorf("PTTL of no key: %v", got)
	}
}

func TestAnErrorReplyIsToldFromAFailedConnection(t *testing.T) {
	s := redistest.Start(t)
	var reply redistest.ReplyError
	if _, err := s.Do("NONSENSE"); !errors.As(err, &reply) || !strings.HasPrefix(string(reply), "ERR unknown command") {
		t.Errorf("error reply: %v", err)
	}
	s.Kill()
	if _, err := s.Do("PING"); err == nil || errors.As(err, &reply) {
		t.Errorf("killed server: %v", err)
	}
}

func TestArgumentsReachTheServer(t *testing.T) {
	s := redistest.Start(t, "--maxmemory-policy", "allkeys-lru", "--requirepass", "secret words")
	if _, err := s.Do("PING"); err == nil || !strings.HasPrefix(err.Error(), "NOAUTH") {
		t.Errorf("before AUTH: %v", err)
	}
	if _, err := s.Do("AUTH", "secret words"); err != nil {
		t.Fatal(err)
	}
	want := []any{"maxmemory-policy", "allkeys-lru"}
	if got, err := s.Do("CONFIG", "GET", "maxmemory-policy"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
}

func TestAPausedServerAnswersOnceResumed(t *testing.T) {
	s := redistest.Start(t)
	nc, br := dial(t, s.Addr())
	s.Pause()
	s.Pause() // changes nothing

	fmt.Fprint(nc, "INCR n\r\n")
	_ = nc.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if line, err := br.ReadString('\n'); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a paused server answered %q, %v", line, err)
	}

	s.Resume()
	_ = nc.SetReadDeadline(time.Now().Add(patience))
	if line, err := br.ReadString('\n'); err != nil || line != ":1\r\n" {
		t.Errorf("after Resume: %q, %v", line, err)
	}
}

func TestAKilledServerRefusesConnectionsUntilItIsRestarted(t *testing.T) {
	for _, paused := range []bool{false, true} {
		t.Run(fmt.Sprintf("paused=%t", paused), func(t *testing.T) {
			s := redistest.Start(t)
			addr := s.Addr()
			if _, err := s.Do("SET", "k", "v"); err != nil {
				t.Fatal(err)
			}
			if paused {
				s.Pause()
			}
			s.Kill()
			s.Kill() // changes nothing
			if nc, err := net.Dial("tcp", addr); err == nil {
				_ = nc.Close()
				t.Fatal("a killed server accepts connections")
			}

			s.Restart()
			if s.Addr() != addr {
				t.Errorf("moved from %s to %s", addr, s.Addr())
			}
			if got, err := s.Do("DBSIZE"); err != nil || got != int64(0) {
				t.Errorf("DBSIZE after Restart: %v, %v", got, err)
			}
		})
	}
}

func TestARunningServerCanBeRestarted(t *testing.T) {
	s := redistest.Start(t)
	before, _ := s.Do("SET", "k", "v")
	s.Restart()
	if got := s.Get("k"); before != "OK" || got != "" {
		t.Errorf("SET: %v, GET after Restart: %q", before, got)
	}
}

func TestServersStartSideBySide(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]bool{}
	t.Run("servers", func(t *testing.T) {
		for i := range 8 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				s := redistest.Start(t)
				mu.Lock()
				defer mu.Unlock()
				if seen[s.Addr()] {
					t.Errorf("%s is used twice", s.Addr())
				}
				seen[s.Addr()] = true
				if _, err := s.Do("PING"); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

func TestAServerIsGoneWhenItsTestEnds(t *testing.T) {
	for _, end := range []func(*redistest.Server){func(*redistest.Server) {}, (*redistest.Server).Pause} {
		var addr string
		t.Run("inner", func(t *testing.T) {
			s := redistest.Start(t)
			addr = s.Addr()
			end(s)
		})
		if nc, err := net.Dial("tcp", addr); err == nil {
			_ = nc.Close()
			t.Error("the server survived its test")
		}
	}
}

// The helper is this test binary, run again by TestAServerDiesWithTheProcessOfItsTest.
const envHelper = "REDISTEST_HELPER"

func TestHelperThatIsKilled(t *testing.T) {
	if os.Getenv(envHelper) == "" {
		t.Skip("runs only as the child of another test")
	}
	s := redistest.Start(t)
	if os.Getenv(envHelper) == "paused" {
		s.Pause()
	}
	fmt.Println("addr", s.Addr())
	select {}
}

func TestAServerDiesWithTheProcessOfItsTest(t *testing.T) {
	for _, state := range []string{"running", "paused"} {
		t.Run(state, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestHelperThatIsKilled$")
			cmd.Env = append(os.Environ(), envHelper+"="+state, "TMPDIR="+t.TempDir())
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var addr string
			for r := bufio.NewScanner(out); addr == "" && r.Scan(); {
				if strings.HasPrefix(r.Text(), "--- SKIP") {
					t.Skip("no server")
				}
				addr, _ = strings.CutPrefix(r.Text(), "addr ")
				if addr == r.Text() {
					addr = ""
				}
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			awaitRefusal(t, addr)
		})
	}
}

func TestAMissingBinarySkipsUnlessItIsRequired(t *testing.T) {
	t.Setenv(redistest.EnvBinary, "/nonexistent/redis-server")
	t.Setenv(redistest.EnvRequire, "")
	if got := outcome(t); got != "skip" {
		t.Errorf("not required: %s", got)
	}
	t.Setenv(redistest.EnvRequire, "1")
	if got := outcome(t); got != "fatal" {
		t.Errorf("required: %s", got)
	}
}

// recorder notes how a test would have ended.
type recorder struct {
	testing.TB
	outcome string
}

func (r *recorder) Skipf(string, ...any)  { r.end("skip") }
func (r *recorder) Fatalf(string, ...any) { r.end("fatal") }

func (r *recorder) end(outcome string) {
	r.outcome = outcome
	runtime.Goexit()
}

func outcome(t *testing.T) string {
	return outcomeOf(t, func(t testing.TB) { redistest.Start(t) })
}

func outcomeOf(t *testing.T, start func(testing.TB)) string {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		start(r)
	}()
	<-done
	return r.outcome
}

func dial(t *testing.T, addr string) (net.Conn, *bufio.Reader) {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	return nc, bufio.NewReader(nc)
}

func awaitRefusal(t *testing.T, addr string) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		_ = nc.Close()
	}
	t.Errorf("the server at %s survived for %v", addr, patience)
}
