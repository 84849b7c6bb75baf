package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// These tests run the program itself: real processes, real time, and where it says so a real redis-server.

func TestEveryDayIsReconciledOnceOnAnEmbeddedRedis(t *testing.T) {
	t.Parallel()
	p := build(t)
	t.Run("when nothing happens", func(t *testing.T) {
		t.Parallel()
		p.start(t, "", "-ttl=1s", "-pace=100ms").succeeds(t)
	})
	t.Run("when a replica is killed in the middle of a day", func(t *testing.T) {
		t.Parallel()
		r := p.start(t, "", "-ttl=1s", "-pace=100ms", "-kill")
		r.succeeds(t)
		require.Contains(t, r.output.String(), "taken over")
	})
	t.Run("when a run is stopped and another one goes on with its journal", func(t *testing.T) {
		t.Parallel()
		r := p.start(t, "", "-ttl=1s", "-pace=100ms")
		r.awaitDone(t, 5)
		r.stop(t)
		r = p.start(t, "", "-ttl=1s", "-pace=100ms", "-journal="+r.journal.path)
		r.succeeds(t)
		require.NotContains(t, r.output.String(), ", 0 of them done before")
	})
}

func TestEveryDayIsReconciledOnceOnARealRedis(t *testing.T) {
	t.Parallel()
	p := build(t)
	t.Run("when nothing happens", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		p.start(t, server.Addr(), "-ttl=1s", "-pace=100ms").succeeds(t)
		requireNoKeys(t, server)
	})
	t.Run("when a replica is killed in the middle of a day", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		r := p.start(t, server.Addr(), "-ttl=1s", "-pace=100ms", "-kill")
		r.succeeds(t)
		require.Contains(t, r.output.String(), "taken over")
		requireNoKeys(t, server)
	})
	t.Run("when two runs share a journal", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		one := p.start(t, server.Addr(), "-ttl=1s", "-pace=100ms")
		other := p.start(t, server.Addr(), "-ttl=1s", "-pace=100ms", "-journal="+one.journal.path)
		one.succeeds(t)
		other.succeeds(t)
		requireNoKeys(t, server)
	})
	t.Run("when Redis stands still for longer than a lease lives", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		r := p.start(t, server.Addr(), "-ttl=1s", "-pace=200ms")
		r.awaitDone(t, 5)
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
	r := build(t).start(t, server.Addr(), "-ttl=60s", "-pace=300ms")
	r.awaitDone(t, 5)
	r.stop(t)
	requireNoKeys(t, server)
}

// program is the path of the built program.
type program string

// build builds the program, with the race detector if the test has it.
func build(t *testing.T) program {
	t.Helper()
	p := filepath.Join(t.TempDir(), "reconcile.exe")
	args := []string{"build", "-o", p}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-race" && s.Value == "true" {
				args = append(args, "-race")
			}
		}
	}
	output, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	require.NoError(t, err, "%s", output)
	return program(p)
}

// run is one run of the program.
type run struct {
	process *exec.Cmd
	journal journal
	lines   *bufio.Scanner
	output  bytes.Buffer // what was read so far
}

// start starts the program, on an embedded Redis if addr is empty. The last -journal counts.
func (p program) start(t *testing.T, addr string, args ...string) *run {
	t.Helper()
	if addr != "" {
		addr = "redis://" + addr
	}
	r := &run{journal: journal{path: filepath.Join(t.TempDir(), "journal")}}
	for _, arg := range args {
		if path, ok := strings.CutPrefix(arg, "-journal="); ok {
			r.journal.path = path
		}
	}
	r.process = exec.Command(string(p), append([]string{"-journal=" + r.journal.path}, args...)...)
	r.process.Env = append(os.Environ(), "REDIS_URL="+addr)
	stdout, err := r.process.StdoutPipe()
	require.NoError(t, err)
	r.process.Stderr = r.process.Stdout // one stream, in order
	r.lines = bufio.NewScanner(stdout)
	require.NoError(t, r.process.Start())
	t.Cleanup(func() {
		_ = r.process.Process.Kill()
		if t.Failed() {
			t.Logf("%s", r.output.String())
		}
	})
	return r
}

// awaitDone reads on until n days are done.
func (r *run) awaitDone(t *testing.T, n int) {
	t.Helper()
	for n > 0 {
		require.True(t, r.lines.Scan(), "the program ended too early")
		fmt.Fprintln(&r.output, r.lines.Text())
		if strings.Contains(r.lines.Text(), "  done  ") {
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

// succeeds waits for the end and requires that every day was done once and with the right result.
func (r *run) succeeds(t *testing.T) {
	t.Helper()
	require.NoError(t, r.wait())
	books, err := loadBooks(dataFiles)
	require.NoError(t, err)
	entries, err := r.journal.read()
	require.NoError(t, err)
	require.NoError(t, everyDayOnce(books.days, entries))
	total := 0
	for _, e := range entries {
		require.Equal(t, books.reconcile(e.Day), e.Mismatches, "%s", e.Day)
		total += len(e.Mismatches)
	}
	require.Positive(t, total)
	require.Contains(t, r.output.String(), fmt.Sprintf("%d mismatches\n", total))
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

func requireNoKeys(t *testing.T, server *redistest.Server) {
	t.Helper()
	keys, err := server.Do("KEYS", "*")
	require.NoError(t, err)
	require.Empty(t, keys)
}
