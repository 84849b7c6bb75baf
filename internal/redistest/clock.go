package redistest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// EnvClock names the libfaketime that sets the clocks of servers: a path. Without it the places are searched where
// Debian's package faketime and an installation from source put it.
const EnvClock = "REDISLEASE_FAKETIME"

var clockPlaces = []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1"}

// clockTolerance is for a clock that is read at once in C and as a difference in Go, and for slewing by others.
const clockTolerance = 100 * time.Millisecond

// Clocked is a server whose clock can be set.
type Clocked struct{ *Server }

// StartWithClock is Start for a server whose clock SetClock sets. Where there is no libfaketime, or it cannot work with
// this redis-server (one with a jemalloc linked into it), the test is skipped, or fails as it does without a server.
func StartWithClock(t testing.TB, args ...string) *Clocked {
	t.Helper()
	s := &Clocked{newServer(t, args)}
	library, err := findClock()
	if err != nil {
		missingClock(t, err)
	}
	file := filepath.Join(s.dir, "clock")
	s.env = []string{
		// The malloc of the C library has to come before jemalloc's, which reads the clock while libfaketime starts.
		"LD_PRELOAD=" + library + ":libc.so.6",
		"FAKETIME_TIMESTAMP_FILE=" + file, "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1",
	}
	if err := setClock(file, 0); err != nil {
		t.Fatalf("redistest: clock: %v", err)
	}
	switch err := s.tryStart(); {
	case err == nil:
	case strings.Contains(err.Error(), "libfaketime"):
		missingClock(t, fmt.Errorf("it does not work with %s: %w", s.binary, err))
	default:
		t.Fatalf("redistest: start %s: %v", s.binary, err)
	}
	return s
}

// SetClock sets the server's clock to offset from this machine's, whatever it was before, and returns when its TIME says
// so. It goes on at the same pace. A clock that is set forward has keys expire, and one that is set back gives them a
// longer life, as on any machine: what Redis keeps is when a key ends.
func (s *Clocked) SetClock(offset time.Duration) {
	s.t.Helper()
	if err := setClock(filepath.Join(s.dir, "clock"), offset); err != nil {
		s.t.Fatalf("redistest: clock: %v", err)
	}
	before := time.Now().Add(offset)
	now, err := s.clock()
	after := time.Now().Add(offset)
	if err == nil && (now.Before(before.Add(-clockTolerance)) || now.After(after.Add(clockTolerance))) {
		err = fmt.Errorf("the server says %v, and it is %v there", now, after)
	}
	if err != nil {
		s.t.Fatalf("redistest: clock: %v", err)
	}
}

// clock returns the time of the server.
func (s *Clocked) clock() (time.Time, error) {
	reply, err := s.Do("TIME")
	if err != nil {
		return time.Time{}, err
	}
	parts, _ := reply.([]any)
	if len(parts) != 2 {
		return time.Time{}, fmt.Errorf("unexpected reply to TIME: %v", reply)
	}
	seconds, err1 := strconv.ParseInt(fmt.Sprint(parts[0]), 10, 64)
	micros, err2 := strconv.ParseInt(fmt.Sprint(parts[1]), 10, 64)
	return time.UnixMicro(seconds*1_000_000 + micros), errors.Join(err1, err2)
}

// setClock writes what libfaketime reads each time that the server asks for the time: never half of it.
func setClock(file string, offset time.Duration) error {
	text := fmt.Sprintf("%+f\n", offset.Seconds())
	if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func findClock() (string, error) {
	if path := os.Getenv(EnvClock); path != "" {
		_, err := os.Stat(path)
		return path, err
	}
	for _, place := range clockPlaces {
		if found, _ := filepath.Glob(place); len(found) > 0 {
			return found[0], nil
		}
	}
	return "", errors.New("not found")
}

// missingClock skips the test, or fails it, because err keeps a server's clock from being set.
func missingClock(t testing.TB, err error) {
	t.Helper()
	if os.Getenv(EnvRequire) == "1" {
		t.Fatalf("redistest: libfaketime is required (%s=1): %v", EnvRequire, err)
	}
	t.Skipf("redistest: no libfaketime to set a server's clock with (install Debian's package faketime or set %s): %v", EnvClock, err)
}

// forgetClock removes the names of the memory that libfaketime shares with nobody here. It would not start in a process
// that gets the same id later.
func forgetClock(pid int) {
	_ = os.Remove(fmt.Sprintf("/dev/shm/faketime_shm_%d", pid))
	_ = os.Remove(fmt.Sprintf("/dev/shm/sem.faketime_sem_%d", pid))
}
