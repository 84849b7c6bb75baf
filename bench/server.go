package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const startPatience = 10 * time.Second

// server is a Redis server, and a connection to ask how it does.
type server struct {
	addr string
	rdb  *redis.Client
	stop func() // ends the process
}

// startServer runs a redis-server on a free port. It persists nothing, and does not outlive this process, however that
// ends: its shell waits for the end of a pipe that only this process holds open.
func startServer(binary string) (*server, error) {
	if _, err := exec.LookPath(binary); err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	const untilClosed = `"$@" </dev/null >/dev/null & read -r _; kill -9 $!; wait`
	cmd := exec.Command("sh", "-c", untilClosed, "sh", binary, "--bind", "127.0.0.1", "--port", port, "--save", "",
		"--appendonly", "no", "--maxclients", "10000", "--dir", os.TempDir())
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt from the terminal is not for the shell
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := attach(net.JoinHostPort("127.0.0.1", port))
	s.stop = func() { _, _ = lifeline.Close(), cmd.Wait() }
	deadline := time.Now().Add(startPatience)
	for err = s.ping(); err != nil; err = s.ping() {
		if time.Now().After(deadline) {
			s.close()
			return nil, fmt.Errorf("%s does not answer: %w", binary, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return s, nil
}

// attach returns a server that others have started and will stop.
func attach(addr string) *server {
	return &server{addr: addr, rdb: redis.NewClient(&redis.Options{Addr: addr, PoolSize: 1}), stop: func() {}}
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), l.Close()
}

func (s *server) close() {
	_ = s.rdb.Close()
	s.stop()
}

func (s *server) ping() error { return s.rdb.Ping(context.Background()).Err() }

func (s *server) flush() error { return s.rdb.FlushAll(context.Background()).Err() }

func (s *server) keys() (int64, error) { return s.rdb.DBSize(context.Background()).Result() }

// counters is what the server has done up to a moment.
type counters struct {
	cpu   float64            // seconds
	calls map[string]float64 // by command, those of scripts among them
}

func (s *server) counters() (counters, error) {
	text, err := s.rdb.Info(context.Background(), "cpu", "commandstats").Result()
	if err != nil {
		return counters{}, err
	}
	c := counters{calls: map[string]float64{}}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch command, isCommand := strings.CutPrefix(name, "cmdstat_"); {
		case name == "used_cpu_user", name == "used_cpu_sys":
			seconds, _ := strconv.ParseFloat(value, 64)
			c.cpu += seconds
		case isCommand:
			calls, _, _ := strings.Cut(strings.TrimPrefix(value, "calls="), ",")
			c.calls[command], _ = strconv.ParseFloat(calls, 64)
		}
	}
	return c, nil
}

func (s *server) version() string {
	text, _ := s.rdb.Info(context.Background(), "server").Result()
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "redis_version:"); ok {
			return v
		}
	}
	return "of unknown version"
}

// ofConnections: a command, as INFO or MONITOR have it, that belongs to the harness, or that opens a connection or keeps
// it alive, as rueidis does once a second, whoever's turn it is.
func ofConnections(command string) bool {
	command, _, _ = strings.Cut(command, "|")
	switch command {
	case "info", "monitor", "hello", "client", "command", "script", "dbsize", "flushall", "ping":
		return true
	}
	return false
}

// monitored is a command that a client has sent, or that a script has run.
type monitored struct {
	at       time.Time
	name     string
	inScript bool
	line     string
}

// monitor hands every command that the server executes to f, on a goroutine of its own, until stop is called.
func (s *server) monitor(f func(monitored)) (stop func() error, err error) {
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	if _, err := io.WriteString(conn, "MONITOR\r\n"); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if _, err := r.ReadString('\n'); err != nil { // +OK
		return nil, errors.Join(err, conn.Close())
	}
	const last = "end of monitoring"
	done := make(chan error, 1)
	go func() {
		for {
			line, err := r.ReadString('\n')
			if err != nil || strings.Contains(line, last) {
				done <- err
				return
			}
			if m, ok := parseMonitored(line); ok && !ofConnections(m.name) {
				f(m)
			}
		}
	}()
	return func() error {
		err := s.rdb.Echo(context.Background(), last).Err()
		if err == nil {
			err = <-done
		}
		return errors.Join(err, conn.Close())
	}, nil
}

// parseMonitored takes a line of MONITOR apart: +1764460000.123456 [0 127.0.0.1:40000] "set" "key" "value"
func parseMonitored(line string) (m monitored, ok bool) {
	from, rest, found := strings.Cut(line, `] "`)
	name, _, closed := strings.Cut(rest, `"`)
	stamp, source, spaced := strings.Cut(from, " ")
	seconds, micros, dotted := strings.Cut(strings.TrimPrefix(stamp, "+"), ".")
	sec, err := strconv.ParseInt(seconds, 10, 64)
	usec, err2 := strconv.ParseInt(micros, 10, 64)
	if !found || !closed || !spaced || !dotted || err != nil || err2 != nil {
		return m, false
	}
	return monitored{time.Unix(sec, usec*1000), strings.ToLower(name), strings.HasSuffix(source, " lua"), line}, true
}
