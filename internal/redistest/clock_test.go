//go:build unix

package redistest_test

import (
	"testing"
	"time"

	"github.com/redislease/redislease/internal/redistest"
)

func TestAServersClockIsSet(t *testing.T) {
	t.Parallel()
	s := redistest.StartWithClock(t)
	for _, offset := range []time.Duration{0, 90 * time.Minute, -500 * time.Hour, 0} {
		s.SetClock(offset)
	}
	do(t, s.Server, "SET", "k", "v", "PX", "60000")
	s.SetClock(-2 * time.Hour)
	if got := s.PTTL("k"); got <= 2*time.Hour || got > 2*time.Hour+time.Minute {
		t.Errorf("after a step back: %v", got)
	}
	s.SetClock(2 * time.Hour)
	if got := s.PTTL("k"); got != -2 {
		t.Errorf("after a step forward: %v", got)
	}
	s.Restart()
	s.SetClock(time.Hour)
}

func TestAMissingClockSkipsUnlessItIsRequired(t *testing.T) {
	t.Setenv(redistest.EnvClock, "/nonexistent/libfaketime.so.1")
	t.Setenv(redistest.EnvRequire, "")
	start := func(t testing.TB) { redistest.StartWithClock(t) }
	if got := outcomeOf(t, start); got != "skip" {
		t.Errorf("not required: %s", got)
	}
	t.Setenv(redistest.EnvRequire, "1")
	if got := outcomeOf(t, start); got != "fatal" {
		t.Errorf("required: %s", got)
	}
}
