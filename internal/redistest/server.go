// Package redistest starts real Redis servers for tests.
//
// The binary is redis-server from PATH, or the one that REDISLEASE_REDIS_SERVER names. A test that finds none is
// skipped; with REDISLEASE_REQUIRE_REDIS=1 it fails instead, so that a CI job cannot pass by skipping.
//
// Start runs one server; StartTLS one that also speaks TLS; StartWithClock one whose clock can be set; StartReplicated a
// master, a replica and three Sentinels; StartCluster three masters with a replica each. StartProcess runs anything else that a test wants to stop and kill.
//
// Servers need Unix signals: on other systems every test that starts one is skipped.
package redistest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// EnvBinary names the redis-server to run: a path, or a name looked up in PATH. A wrapper script must exec it.
	EnvBinary = "REDISLEASE_REDIS_SERVER"
	// EnvRequire set to 1 makes a missing server, or a missing libfaketime, a failure instead of a skip.
	EnvRequire = "REDISLEASE_REQUIRE_REDIS"

	// FreePort stands, in the arguments of a server, for a free port of its own, other than that of its Addr.
	FreePort = "{free port}"

	defaultBinary = "redis-server"
	startTimeout  = 20 * time.Second // generous: it is only ever reached on a broken or starved machine
	deployTimeout = time.Minute      // the same for several servers together
	portAttempts  = 10
	pollInterval  = 2 * time.Millisecond
)

var errPortTaken = errors.New("the port is taken")

// Server is a redis-server process of one test. Its methods are safe for concurrent use; a method without an error
// result marks the test as failed when it cannot do its work.
type Server struct {
	t      testing.TB
	binary string
	conf   string // the name of its configuration file, if it has one
	args   []string
	env    []string // added to that of the test
	dir    string
	port   int
	extra  int  // FreePort
	conn   conn // of Do

	mu     sync.Mutex // held while the process is started, stopped or signalled
	proc   *process   // nil while killed
	paused bool
}

// Start runs a redis-server on a free port of 127.0.0.1 and returns once it answers. It persists nothing unless args,
// which are given to it last ("--maxmemory", "2mb"), say otherwise. The server is killed when the test ends, and also
// when the test's process dies. Like t.Fatal, Start must be called from the goroutine of the test.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t, args)
	s.start()
	return s
}

// newServer returns a server that is not started yet, and has its directory.
func newServer(t testing.TB, args []string) *Server {
	t.Helper()
	s := &Server{t: t, binary: findBinary(t), args: args, dir: t.TempDir()}
	// Registered after TempDir, so it runs before the directory is removed.
	t.Cleanup(s.Kill)
	return s
}

func (s *Server) start() {
	s.t.Helper()
	if err := s.tryStart(); err != nil {
		s.t.Fatalf("redistest: start %s: %v", s.binary, err)
	}
}

// tryStart starts the process on free ports.
func (s *Server) tryStart() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range portAttempts {
		if s.port, s.extra, err = freePorts(); err != nil {
			return err
		}
		if err = s.launch(); !errors.Is(err, errPortTaken) {
			return err
		}
	}
	return err
}

// Addr returns host:port. It stays the same over Kill and Restart.
func (s *Server) Addr() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port))
}

// Pause stops the process (SIGSTOP) and returns once it stands still. The kernel goes on accepting connections and
// bytes for it; they are served after Resume.
func (s *Server) Pause() {
	s.t.Helper()
	s.signal("pause", true, (*process).pause)
}

// Resume lets a paused process go on (SIGCONT).
func (s *Server) Resume() {
	s.t.Helper()
	s.signal("resume", false, (*process).resume)
}

// Kill ends the process at once (SIGKILL), paused or not, and returns when it is gone: connections are reset, new ones
// refused, the data lost. Killing a killed server does nothing.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kill()
}

// Restart kills the process if it still runs and starts a new one on the same port with the same arguments: empty, but
// for what the arguments made it write to disk. It returns once the new one answers.
func (s *Server) Restart() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kill()

	// While nobody listened, the port may have been lent to an outgoing connection.
	deadline := time.Now().Add(startTimeout)
	err := s.launch()
	for errors.Is(err, errPortTaken) && time.Now().Before(deadline) {
		time.Sleep(pollInterval)
		err = s.launch()
	}
	if err != nil {
		s.t.Errorf("redistest: restart %s: %v", s.binary, err)
	}
}

func (s *Server) signal(what string, paused bool, send func(*process) error) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		s.t.Errorf("redistest: %s: the server at %s has been killed", what, s.Addr())
		return
	}
	if err := send(s.proc); err != nil {
		s.t.Errorf("redistest: %s: %v", what, err)
	}
	s.paused = paused
}

// up: the process is neither killed nor paused.
func (s *Server) up() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && !s.paused
}

func (s *Server) kill() {
	if s.proc == nil {
		return
	}
	s.proc.kill()
	s.proc, s.paused = nil, false
	s.conn.close()
}

// launch starts the process on s.port and waits until it answers. An error leaves nothing running.
func (s *Server) launch() error {
	logfile := filepath.Join(s.dir, "server.log")
	out, err := os.Create(logfile)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()

	cmd := exec.Command(s.binary, s.arguments()...)
	cmd.Dir = s.dir
	cmd.Stdout, cmd.Stderr = out, out
	if len(s.env) > 0 {
		cmd.Env = append(os.Environ(), s.env...)
	}
	proc, err := startProcess(cmd)
	if err != nil {
		return err
	}
	err = s.awaitReady(proc)
	if len(s.env) > 0 {
		forgetClock(proc.pid())
	}
	if err != nil {
		proc.kill()
		log, _ := os.ReadFile(logfile)
		if strings.Contains(string(log), "Address already in use") {
			return errPortTaken
		}
		return fmt.Errorf("%w; its output:\n%s", err, log)
	}
	s.proc = proc
	return nil
}

func (s *Server) arguments() (args []string) {
	if s.conf != "" {
		args = append(args, s.conf) // it has to come first
	}
	args = append(args, "--bind", "127.0.0.1", "--port", strconv.Itoa(s.port), "--save", "", "--appendonly", "no")
	for _, arg := range s.args {
		if arg == FreePort {
			arg = strconv.Itoa(s.extra)
		}
		args = append(args, arg)
	}
	return args
}

// awaitReady returns nil once this very process answers on the port.
func (s *Server) awaitReady(proc *process) error {
	var c conn
	defer c.close()
	timeout := time.NewTimer(startTimeout)
	defer timeout.Stop()
	for {
		err := probe(&c, s.Addr(), proc.pid())
		if err == nil || errors.Is(err, errPortTaken) {
			return err
		}
		select {
		case <-proc.exited:
			return errors.New("the server exited")
		case <-timeout.C:
			return fmt.Errorf("no answer within %v: %w", startTimeout, err)
		case <-time.After(pollInterval):
		}
	}
}

// probe asks whoever listens at addr whether it is ready and whether it is the process pid: another test's server may
// have got the port first, and would answer just as well until ours has found that out and exited.
func probe(c *conn, addr string, pid int) error {
	if _, err := c.do(addr, "PING"); err != nil {
		var refused ReplyError
		if errors.As(err, &refused) && strings.HasPrefix(string(refused), "NOAUTH") {
			return nil // started with a password: it answers, and nobody else's would ask for one
		}
		return err
	}
	info, err := c.do(addr, "INFO", "server")
	if err != nil {
		return err
	}
	if text, _ := info.(string); !strings.Contains(text, fmt.Sprintf("process_id:%d\r\n", pid)) {
		return errPortTaken
	}
	return nil
}

// await waits until done returns nil, and fails the test if it does not.
func await(t testing.TB, what string, done func() error) {
	t.Helper()
	deadline := time.Now().Add(deployTimeout)
	err := done()
	for err != nil && time.Now().Before(deadline) {
		time.Sleep(pollInterval)
		err = done()
	}
	if err != nil {
		t.Fatalf("redistest: %s: not within %v: %v", what, deployTimeout, err)
	}
}

func findBinary(t testing.TB) string {
	t.Helper()
	name := os.Getenv(EnvBinary)
	if name == "" {
		name = defaultBinary
	}
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path) // the server runs in a directory of its own
	}
	if err == nil && !supported {
		err = errors.New("this system has no Unix signals")
	}
	if err == nil {
		return path
	}
	missing(t, err)
	return ""
}

// missing skips the test, or fails it, because err keeps the server that it needs from running.
func missing(t testing.TB, err error) {
	t.Helper()
	if os.Getenv(EnvRequire) == "1" {
		t.Fatalf("redistest: a Redis server is required (%s=1): %v", EnvRequire, err)
	}
	t.Skipf("redistest: no Redis server to test against (install redis-server or set %s): %v", EnvBinary, err)
}

// freePorts returns two ports that are free now.
func freePorts() (a, b int, err error) {
	first, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, first.Close()) }()
	second, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, 0, err
	}
	return first.Addr().(*net.TCPAddr).Port, second.Addr().(*net.TCPAddr).Port, second.Close()
}
