package redistest

import (
	"errors"
	"os/exec"
	"testing"
)

// Process is a child of the test that can be stopped and killed. Like a Server it is killed when the test ends, and
// also when the test's process dies.
type Process struct {
	t testing.TB
	p *process
}

// StartProcess starts cmd, whose output must not be a pipe of its own making: set Stdout and Stderr to files, or use
// os.Pipe. Like t.Fatal, it must be called from the goroutine of the test.
func StartProcess(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	if !supported {
		missing(t, errors.New("this system has no Unix signals"))
	}
	p, err := startProcess(cmd)
	if err != nil {
		t.Fatalf("redistest: start %s: %v", cmd.Path, err)
	}
	t.Cleanup(p.kill)
	return &Process{t, p}
}

// Pause stops the process (SIGSTOP) and returns once it stands still.
func (p *Process) Pause() {
	p.t.Helper()
	p.check("pause", p.p.pause())
}

// Resume lets a paused process go on (SIGCONT).
func (p *Process) Resume() {
	p.t.Helper()
	p.check("resume", p.p.resume())
}

// Kill ends the process at once (SIGKILL), paused or not, and returns when it is gone.
func (p *Process) Kill() { p.p.kill() }

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.p.exited }

func (p *Process) check(what string, err error) {
	p.t.Helper()
	if err != nil {
		p.t.Errorf("redistest: %s: %v", what, err)
	}
}
