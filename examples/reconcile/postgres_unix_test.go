//go:build unix

package main

import (
	"bytes"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// postgres is a server for all tests of this binary, on a Unix socket only, in a directory of its own. It runs below a
// shell that ends it and removes the directory when its standard input is closed: by stop, or by the end of this process,
// however that comes.
type postgres struct {
	start    sync.Once
	err      error
	mu       sync.Mutex
	dsn      string // of the database that comes with the server
	made     int    // databases
	shell    *exec.Cmd
	lifeline io.Closer     // its standard input
	exited   chan struct{} // closed when the shell has, and so the server
}

var theServer postgres

var errNoPostgres = errors.New("PostgreSQL is not installed (Debian: postgresql), and REDISLEASE_POSTGRES does not name its postgres")

func stopPostgres() { theServer.stop() }

// newPostgres returns the data source name of a new database. Where PostgreSQL is not installed the test is skipped, or
// fails with REDISLEASE_REQUIRE_SQL=1.
func newPostgres(t *testing.T) string {
	t.Helper()
	s := &theServer
	s.start.Do(func() { s.err = s.launch() })
	switch {
	case errors.Is(s.err, errNoPostgres) && os.Getenv("REDISLEASE_REQUIRE_SQL") != "1":
		t.Skip(s.err)
	case s.err != nil:
		t.Fatal(s.err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.made++
	name := fmt.Sprint("test", s.made)
	db, err := sql.Open("pgx", s.dsn+" dbname=postgres")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	return s.dsn + " dbname=" + name
}

// script makes and runs a server until its input ends. Its arguments are the directory, initdb and postgres.
const script = `
"$2" -D "$1/data" -U postgres -A trust -E UTF8 -N || exit
"$3" -D "$1/data" -k "$1" -c listen_addresses= -c fsync=off -c shared_buffers=16MB &
read line
while kill -s QUIT $!; do sleep 0.1; done 2>/dev/null
rm -rf "$1"`

func (s *postgres) launch() error {
	binary, err := findPostgres()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "pg") // the path of a socket has to be short
	if err != nil {
		return err
	}
	var log bytes.Buffer
	s.shell = exec.Command("/bin/sh", "-c", script, "sh", dir, filepath.Join(filepath.Dir(binary), "initdb"), binary)
	s.shell.Dir, s.shell.Env = dir, []string{"PATH=/usr/bin:/bin", "HOME=" + dir, "LC_ALL=C", "TZ=UTC"}
	s.shell.Stdout, s.shell.Stderr = &log, &log
	if s.shell.SysProcAttr, err = unprivileged(dir); err != nil {
		return err
	}
	if s.lifeline, err = s.shell.StdinPipe(); err != nil {
		return err
	}
	if err := s.shell.Start(); err != nil {
		return err
	}
	s.exited = make(chan struct{})
	go func() {
		_ = s.shell.Wait()
		close(s.exited)
	}()
	s.dsn = "host=" + dir + " user=postgres sslmode=disable"
	if err := s.awaitReady(); err != nil {
		s.stop() // which is the end of the log, too
		return errors.Join(fmt.Errorf("PostgreSQL: %w\n%s", err, &log), os.RemoveAll(dir))
	}
	return nil
}

func (s *postgres) awaitReady() error {
	db, err := sql.Open("pgx", s.dsn+" dbname=postgres")
	if err != nil {
		return err
	}
	defer db.Close()
	timeout := time.After(time.Minute)
	for {
		if err = db.Ping(); err == nil {
			return nil
		}
		select {
		case <-s.exited:
			return err
		case <-timeout:
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *postgres) stop() {
	if s.exited != nil {
		_ = s.lifeline.Close()
		<-s.exited
	}
}

// findPostgres returns the server's binary, where initdb is beside it.
func findPostgres() (string, error) {
	names, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	names = append(names, "postgres") // in the PATH
	if name := os.Getenv("REDISLEASE_POSTGRES"); name != "" {
		names = []string{name}
	}
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if path, err = filepath.EvalSymlinks(path); err == nil {
			return filepath.Abs(path)
		}
	}
	return "", errNoPostgres
}

// unprivileged gives the directory to the user that the server is to run as: nobody, if this one is root, as whom it
// does not run.
func unprivileged(dir string) (*syscall.SysProcAttr, error) {
	attr := &syscall.SysProcAttr{Setpgid: true} // an interrupt from the terminal is not for it
	if os.Getuid() != 0 {
		return attr, nil
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.Atoi(nobody.Uid)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.Atoi(nobody.Gid)
	if err != nil {
		return nil, err
	}
	attr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return attr, os.Chown(dir, uid, gid)
}

// ownGroup has a program lead a process group, so that killGroup reaches its children, those that stand still too.
func ownGroup(program *exec.Cmd) { program.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func killGroup(program *exec.Cmd) { _ = syscall.Kill(-program.Process.Pid, syscall.SIGKILL) }
