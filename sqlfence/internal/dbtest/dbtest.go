// Package dbtest starts a real PostgreSQL and a real MariaDB for tests, once per test binary.
//
// The binaries are those of Debian's packages postgresql and mariadb-server, or those that REDISLEASE_POSTGRES (a
// postgres, with initdb beside it) and REDISLEASE_MARIADBD (a mariadbd, with mariadb-install-db where its package has it)
// name. A test that finds none is skipped; with REDISLEASE_REQUIRE_SQL=1 it fails instead, so that a CI job cannot pass
// by skipping.
//
// Both refuse to run as root. Started by root they run as the user nobody, in a directory that is given to him.
//
// TestMain has to call Stop. A test process that dies takes its servers and their directories with it all the same.
package dbtest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// EnvPostgres names the postgres binary to run.
	EnvPostgres = "REDISLEASE_POSTGRES"
	// EnvMariaDB names the mariadbd binary to run.
	EnvMariaDB = "REDISLEASE_MARIADBD"
	// EnvRequire set to 1 makes a missing server a failure instead of a skip.
	EnvRequire = "REDISLEASE_REQUIRE_SQL"

	startTimeout = time.Minute // generous: it is only ever reached on a broken or starved machine
	portAttempts = 10
	pollInterval = 5 * time.Millisecond
)

var (
	errPortTaken = errors.New("the port is taken")
	errMissing   = errors.New("not installed")
)

var (
	postgres = &server{name: "PostgreSQL", start: startPostgres}
	mariadb  = &server{name: "MariaDB", start: startMariaDB}
)

// PostgreSQL returns the host:port of a PostgreSQL server that lets the superuser "postgres" in without a password, to
// the database "postgres".
func PostgreSQL(t testing.TB) (addr string) {
	t.Helper()
	return postgres.addrFor(t)
}

// MariaDB returns the host:port of a MariaDB server that lets "root" in without a password, to the database "test".
func MariaDB(t testing.TB) (addr string) {
	t.Helper()
	return mariadb.addrFor(t)
}

// Stop ends the servers and removes their directories. It is for TestMain, after the tests.
func Stop() {
	postgres.stop()
	mariadb.stop()
}

// server is one that runs from its first use to Stop.
type server struct {
	name  string
	start func(dir, addr string) (*process, error)

	mu   sync.Mutex
	done bool // started, or failed to
	err  error
	addr string
	dir  string
	proc *process
}

func (s *server) addrFor(t testing.TB) string {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.done {
		s.done = true
		s.err = s.launch()
	}
	switch {
	case s.err == nil:
		return s.addr
	case errors.Is(s.err, errMissing) && os.Getenv(EnvRequire) != "1":
		t.Skipf("dbtest: no %s to test against: %v", s.name, s.err)
	default:
		t.Fatalf("dbtest: start %s: %v", s.name, s.err)
	}
	return ""
}

// launch starts the server on a free port, in a directory of its own.
func (s *server) launch() (err error) {
	if !supported {
		return fmt.Errorf("%w: this system has no Unix signals", errMissing)
	}
	for range portAttempts {
		if s.addr, err = freeAddr(); err != nil {
			return err
		}
		// Not t.TempDir: the directory is the binary's and not the test's, and its name has to be short, since the path
		// of a Unix socket may have some hundred bytes.
		if s.dir, err = os.MkdirTemp("", "dbtest"); err != nil {
			return err
		}
		if err = giveAway(s.dir); err == nil {
			s.proc, err = s.start(s.dir, s.addr)
		}
		if err == nil {
			return nil
		}
		if err = errors.Join(err, os.RemoveAll(s.dir)); !errors.Is(err, errPortTaken) {
			return err
		}
	}
	return err
}

func (s *server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return
	}
	s.proc.stop()
	s.proc = nil
	_ = os.RemoveAll(s.dir)
}

func startPostgres(dir, addr string) (*process, error) {
	binary, err := find(EnvPostgres, newest("/usr/lib/postgresql/*/bin/postgres"), "postgres")
	if err != nil {
		return nil, err
	}
	initdb, err := beside(binary, "initdb")
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "data")
	err = run(dir, initdb, "--pgdata", data, "--username", "postgres", "--auth", "trust", "--encoding", "UTF8",
		"--locale", "C", "--no-sync")
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	args := []string{"-D", data, "-k", dir, "-p", port, "-h", host}
	for _, set := range []string{
		"fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off", "shared_buffers=32MB",
		"dynamic_shared_memory_type=mmap", // nothing outside of dir
		"deadlock_timeout=100ms", "max_connections=100",
	} {
		args = append(args, "-c", set)
	}
	return launch(dir, exec.Command(binary, args...), stopPostgres, func() bool {
		pidfile, _ := os.ReadFile(filepath.Join(data, "postmaster.pid"))
		lines := strings.Split(string(pidfile), "\n")
		return len(lines) >= 8 && strings.TrimSpace(lines[7]) == "ready"
	})
}

func startMariaDB(dir, addr string) (*process, error) {
	binary, err := find(EnvMariaDB, "/usr/sbin/mariadbd", "mariadbd")
	if err != nil {
		return nil, err
	}
	install, err := beside(binary, "mariadb-install-db")
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "data")
	err = run(dir, install, "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal",
		"--skip-name-resolve", "--innodb-use-native-aio=0", "--innodb-log-file-size=8M")
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "sock")
	// Executed before the first connection is served.
	create := filepath.Join(dir, "init.sql")
	if err := os.WriteFile(create, []byte("CREATE DATABASE IF NOT EXISTS test;\n"), 0o644); err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, "--no-defaults", "--datadir="+data, "--tmpdir="+dir, "--socket="+socket,
		"--pid-file="+filepath.Join(dir, "pid"), "--bind-address="+host, "--port="+port, "--init-file="+create,
		"--skip-name-resolve", "--skip-log-bin", "--performance-schema=OFF", "--max-connections=100",
		"--character-set-server=utf8mb4", "--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0",
		"--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--innodb-use-native-aio=0")
	return launch(dir, cmd, stopMariaDB, func() bool {
		nc, err := net.Dial("unix", socket) // of this very process, whoever has the port
		if err != nil {
			return false
		}
		defer func() { _ = nc.Close() }()
		_ = nc.SetReadDeadline(time.Now().Add(startTimeout))
		n, err := nc.Read(make([]byte, 1)) // it greets
		return n == 1 && err == nil
	})
}

// launch starts a server and returns when it is ready. An error leaves nothing running.
func launch(dir string, cmd *exec.Cmd, signal string, ready func() bool) (*process, error) {
	logfile := filepath.Join(dir, "log")
	out, err := os.Create(logfile)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }()
	cmd.Dir, cmd.Env = dir, environment(dir)
	cmd.Stdout, cmd.Stderr = out, out
	p, err := startProcess(cmd, dir, signal)
	if err != nil {
		return nil, err
	}
	if err := awaitReady(p, ready); err != nil {
		p.stop()
		log, _ := os.ReadFile(logfile)
		if strings.Contains(string(log), "Address already in use") {
			return nil, errPortTaken
		}
		return nil, fmt.Errorf("%s: %w; its output:\n%s", cmd.Path, err, log)
	}
	return p, nil
}

func awaitReady(p *process, ready func() bool) error {
	timeout := time.NewTimer(startTimeout)
	defer timeout.Stop()
	for !ready() {
		select {
		case <-p.exited:
			return errors.New("the server exited")
		case <-timeout.C:
			return fmt.Errorf("not ready within %v", startTimeout)
		case <-time.After(pollInterval):
		}
	}
	return nil
}

// run runs a program to its end, as the user that the server runs as.
func run(dir, path string, args ...string) error {
	cmd := exec.Command(path, args...)
	cmd.Dir, cmd.Env = dir, environment(dir)
	if err := unprivileged(cmd); err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w; its output:\n%s", path, err, out)
	}
	return nil
}

// environment keeps the settings of the tests' user (PGPORT, MYSQL_HOME, a locale) away from the servers.
func environment(dir string) []string {
	const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	return []string{"PATH=" + path, "HOME=" + dir, "TMPDIR=" + dir, "LC_ALL=C", "TZ=UTC"}
}

// find returns the binary that the environment names, or one of the candidates: paths, or names looked up in PATH.
func find(env string, candidates ...string) (string, error) {
	if name := os.Getenv(env); name != "" {
		candidates = []string{name}
	}
	for _, name := range candidates {
		if name == "" {
			continue
		}
		if path, err := exec.LookPath(name); err == nil {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("%w: no %s (install it or set %s)", errMissing, candidates[len(candidates)-1], env)
}

// newest returns the match with the greatest number in it.
func newest(pattern string) string {
	matches, _ := filepath.Glob(pattern)
	if len(matches) == 0 {
		return ""
	}
	return slices.MaxFunc(matches, func(a, b string) int { return version(a) - version(b) })
}

func version(path string) int {
	for part := range strings.SplitSeq(path, "/") {
		if n, err := strconv.Atoi(part); err == nil {
			return n
		}
	}
	return 0
}

// beside returns a program of the same package as the binary.
func beside(binary, name string) (string, error) {
	real, err := filepath.EvalSymlinks(binary)
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(real)
	for _, path := range []string{filepath.Join(dir, name), filepath.Join(dir, "..", "bin", name), name} {
		if path, err := exec.LookPath(path); err == nil {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("%w: %s has no %s beside it", errMissing, binary, name)
}

// freeAddr returns a host:port that is free now.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
