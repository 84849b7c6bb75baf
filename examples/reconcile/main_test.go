package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// These tests run the program itself: real processes, real time, and where it says so a real redis-server.

func TestEveryDayIsReconciledOnceOnAnEmbeddedRedis(t *testing.T) {
	t.Parallel()
	t.Run("when nothing happens", func(t *testing.T) {
		t.Parallel()
		start(t, "", "-ttl=1s", "-pace=50ms").succeeds(t)
	})
	t.Run("when a replica is killed in the middle of a day", func(t *testing.T) {
		t.Parallel()
		r := start(t, "", "-ttl=1s", "-pace=50ms", "-kill")
		r.succeeds(t)
		require.Contains(t, r.output.String(), "taken over")
	})
	t.Run("when a run is stopped and another one goes on with its database", func(t *testing.T) {
		t.Parallel()
		r := start(t, "", "-ttl=1s", "-pace=50ms")
		r.await(t, 5, "  done  ")
		r.stop(t)
		r = start(t, "", "-ttl=1s", "-pace=50ms", "-db="+r.source.file)
		r.succeeds(t)
		require.NotContains(t, r.output.String(), ", 0 of them done before")
	})
}

func TestEveryDayIsReconciledOnceOnARealRedis(t *testing.T) {
	t.Parallel()
	t.Run("when nothing happens", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		start(t, server.Addr(), "-ttl=1s", "-pace=50ms").succeeds(t)
		requireNoLeases(t, server)
	})
	t.Run("when a replica is killed in the middle of a day", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		r := start(t, server.Addr(), "-ttl=1s", "-pace=50ms", "-kill")
		r.succeeds(t)
		require.Contains(t, r.output.String(), "taken over")
		requireNoLeases(t, server)
	})
	t.Run("when two runs share a database", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		one := start(t, server.Addr(), "-ttl=1s", "-pace=50ms")
		other := start(t, server.Addr(), "-ttl=1s", "-pace=50ms", "-db="+one.source.file)
		one.succeeds(t)
		other.succeeds(t)
		requireNoLeases(t, server)
	})
	t.Run("when Redis stands still for longer than a lease lives", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		r := start(t, server.Addr(), "-ttl=1s", "-pace=200ms")
		r.await(t, 5, "  done  ")
		server.Pause()
		time.Sleep(2 * time.Second) // nothing to wait for: this is how long it stands still
		server.Resume()
		r.succeeds(t)
		require.Contains(t, r.output.String(), string(retry))
	})
}

func TestARunThatIsStoppedLeavesNoLease(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := start(t, server.Addr(), "-ttl=60s", "-pace=300ms")
	r.await(t, 5, "  done  ")
	r.stop(t)
	requireNoLeases(t, server)
}

// A replica is stopped, by SIGSTOP, between its last look at its lease and its write, until another has done its day.
func TestAReplicaThatStoodStillWritesLate(t *testing.T) {
	t.Parallel()
	for name, args := range map[string]func(t *testing.T) []string{
		"SQLite":     func(*testing.T) []string { return nil },
		"PostgreSQL": func(t *testing.T) []string { return []string{"-dsn=" + newPostgres(t)} },
	} {
		t.Run("and is refused by its fence, on "+name, func(t *testing.T) {
			t.Parallel()
			r := start(t, "", append(args(t), "-ttl=1s", "-pace=50ms", "-stop")...)
			r.succeeds(t)
			r.requireRefused(t)
		})
		t.Run("and does damage without one, on "+name, func(t *testing.T) {
			t.Parallel()
			r := start(t, "", append(args(t), "-ttl=1s", "-pace=50ms", "-stop", "-fence=false")...)
			var exit *exec.ExitError
			require.ErrorAs(t, r.wait(), &exit)
			require.Equal(t, 1, exit.ExitCode())
			require.Contains(t, r.output.String(), "  accepted  the late write of part ")
			require.Regexp(t, `\nreconcile: the books do not balance: .* too much received`, r.output.String())
			require.NotContains(t, r.output.String(), "stale")
			books, posted := r.books(t)
			require.ErrorContains(t, balance(posted, books.accounts()), "too much")
		})
	}
	t.Run("and is refused by its fence, on a real Redis", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		r := start(t, server.Addr(), "-ttl=1s", "-pace=50ms", "-stop")
		r.succeeds(t)
		r.requireRefused(t)
		requireNoLeases(t, server)
	})
	t.Run("unless the program is told to stop meanwhile", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		r := start(t, server.Addr(), "-ttl=60s", "-pace=50ms", "-stop")
		r.await(t, 1, "  paused  ")
		r.await(t, 3, "  done  ")
		r.stop(t)
		require.NotContains(t, r.output.String(), "resumed")
		requireNoLeases(t, server)
	})
}

func TestARunOnPostgreSQLGoesOnWhereAnotherStopped(t *testing.T) {
	t.Parallel()
	dsn := "-dsn=" + newPostgres(t)
	r := start(t, "", dsn, "-ttl=1s", "-pace=50ms")
	r.await(t, 5, "  done  ")
	r.stop(t)
	r = start(t, "", dsn, "-ttl=1s", "-pace=50ms", "-kill")
	r.succeeds(t)
	require.NotContains(t, r.output.String(), ", 0 of them done before")
	require.Contains(t, r.output.String(), "taken over")
	r = start(t, "", dsn, "-ttl=1s", "-pace=50ms", "-fresh")
	r.succeeds(t)
	require.Contains(t, r.output.String(), ", 0 of them done before")
}

func TestOptionsThatDoNotGoTogetherAreRefused(t *testing.T) {
	for _, args := range [][]string{
		{"-stop", "-kill"}, {"-stop", "-replicas=1"}, {"-kill", "-replicas=1"}, {"-replicas=0"}, {"-db=a", "-dsn=b"}, {"a"},
	} {
		_, _, err := parseFleet(args)
		require.Error(t, err, "%v", args)
	}
}

// program is the path of the built program.
type program string

// build builds the program once, with the race detector if the test has it.
var build = sync.OnceValues(func() (program, error) {
	p := filepath.Join(buildDir, "reconcile.exe")
	args := []string{"build", "-o", p}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-race" && s.Value == "true" {
				args = append(args, "-race")
			}
		}
	}
	output, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, output)
	}
	return program(p), err
})

var buildDir string

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = os.MkdirTemp("", "reconcile"); err != nil {
		panic(err)
	}
	code := m.Run()
	stopPostgres()
	_ = os.RemoveAll(buildDir)
	os.Exit(code)
}

// run is one run of the program.
type run struct {
	process *exec.Cmd
	source  source
	lines   *bufio.Scanner
	output  bytes.Buffer // what was read so far
}

// start starts the program, on an embedded Redis if addr is empty, and on a new SQLite file unless args say otherwise.
func start(t *testing.T, addr string, args ...string) *run {
	t.Helper()
	p, err := build()
	require.NoError(t, err)
	if addr != "" {
		addr = "redis://" + addr
	}
	r := &run{}
	for _, arg := range args {
		if dsn, ok := strings.CutPrefix(arg, "-dsn="); ok {
			r.source.dsn = dsn
		}
		if file, ok := strings.CutPrefix(arg, "-db="); ok {
			r.source.file = file
		}
	}
	if r.source == (source{}) {
		r.source.file = filepath.Join(t.TempDir(), "books.db")
		args = append(args, "-db="+r.source.file)
	}
	r.process = exec.Command(string(p), args...)
	ownGroup(r.process)
	r.process.Env = append([]string{"GORACE=atexit_sleep_ms=0"}, append(os.Environ(), "REDIS_URL="+addr)...)
	stdout, err := r.process.StdoutPipe()
	require.NoError(t, err)
	r.process.Stderr = r.process.Stdout // one stream, in order
	r.lines = bufio.NewScanner(stdout)
	require.NoError(t, r.process.Start())
	t.Cleanup(func() {
		killGroup(r.process)
		if t.Failed() {
			t.Logf("%s", r.output.String())
		}
	})
	return r
}

// await reads on until n lines with this text have come.
func (r *run) await(t *testing.T, n int, text string) {
	t.Helper()
	for n > 0 {
		require.True(t, r.lines.Scan(), "the program ended too early")
		fmt.Fprintln(&r.output, r.lines.Text())
		if strings.Contains(r.lines.Text(), text) {
			n--
		}
	}
}

// wait reads the rest and returns how the program ended.
func (r *run) wait() error {
	for r.lines.Scan() {
		fmt.Fprintln(&r.output, r.lines.Text())
	}
	return r.process.Wait()
}

// succeeds waits for the end and requires that the books are right, and the report too.
func (r *run) succeeds(t *testing.T) {
	t.Helper()
	require.NoError(t, r.wait())
	books, posted := r.books(t)
	require.NoError(t, balance(posted, books.accounts()))
	require.Contains(t, r.output.String(), "\nevery day is done, and the books balance\n")
	total := 0
	for _, day := range books.days {
		total += len(match(books.orders[day], books.payments[day]))
	}
	require.Contains(t, r.output.String(), fmt.Sprintf("%d mismatches\n", total))
}

// books requires that the rows of all days are right and returns the books and what is in the accounts.
func (r *run) books(t *testing.T) (*books, accounts) {
	t.Helper()
	b, err := loadBooks(dataFiles)
	require.NoError(t, err)
	s := open(t, r.source, true)
	entries, err := s.entries(t.Context())
	require.NoError(t, err)
	require.NoError(t, everyDayDone(b, entries))
	posted, err := s.accounts(t.Context())
	require.NoError(t, err)
	return b, posted
}

var refusal = regexp.MustCompile(`replica 1  (\S+)  refused   sqlfence: admit "reconcile:(\S+)": stale fence: (\d+), after (\d+) was seen\n`)

// requireRefused requires that the late write of the stopped replica was refused because somebody came after it.
func (r *run) requireRefused(t *testing.T) {
	t.Helper()
	output := r.output.String()
	m := refusal.FindStringSubmatch(output)
	require.NotNil(t, m, "nothing was refused")
	day, stale, seen := m[1], m[3], m[4]
	require.Equal(t, day, m[2])
	require.Contains(t, output, fmt.Sprintf("replica 1  %s  acquired  fence %s, from part ", day, stale))
	next := regexp.MustCompile(day + `  acquired  fence (\d+), from part .*, taken over`).FindStringSubmatch(output)
	require.NotNil(t, next, "nobody took over")
	require.Less(t, stale, next[1])       // they have the same number of digits
	require.LessOrEqual(t, next[1], seen) // a third may have had the lease since, to find the day done
	require.NotContains(t, output, "accepted")
}

// stop tells the program to stop, waits for its end and requires that it admits that work is left.
func (r *run) stop(t *testing.T) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("a process cannot be told to stop on Windows")
	}
	require.NoError(t, r.process.Process.Signal(syscall.SIGTERM))
	require.Error(t, r.wait())
	require.Contains(t, r.output.String(), "interrupted")
}

// requireNoLeases requires that nothing is held any more. The last fences stay for a week.
func requireNoLeases(t *testing.T, server *redistest.Server) {
	t.Helper()
	keys, err := server.Do("KEYS", "*")
	require.NoError(t, err)
	for _, key := range keys.([]any) {
		require.Contains(t, key, ":fence{")
	}
}
