//go:build unix

package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

const (
	supported   = true
	stopTimeout = 10 * time.Second
)

// process is a child that does not outlive this process, however this one ends.
//
// A watchdog sees to that: a shell whose standard input is a pipe that only this process holds open. The kernel closes
// the pipe when this process dies, by whatever signal; the shell then reads the end of it and kills the child.
// Linux' Pdeathsig would do without the shell, but it is sent when the *thread* that forked ends, which the Go runtime
// does as it pleases, and other systems do not have it.
type process struct {
	cmd      *exec.Cmd
	watchdog *exec.Cmd
	lifeline *os.File      // the pipe's writing end
	exited   chan struct{} // closed when child and watchdog are gone
}

func startProcess(cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = ownGroup()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, exited: make(chan struct{})}
	if err := p.startWatchdog(); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), ignoreExit(cmd.Wait()))
	}
	go p.reap()
	return p, nil
}

func (p *process) startWatchdog() error {
	r, w, err := os.Pipe() // close-on-exec: no child inherits the writing end
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	p.watchdog = exec.Command("/bin/sh", "-c", "read line; kill -9 $0", strconv.Itoa(p.pid()))
	p.watchdog.Stdin = r
	p.watchdog.SysProcAttr = ownGroup()
	if err := p.watchdog.Start(); err != nil {
		return errors.Join(fmt.Errorf("start the watchdog: %w", err), w.Close())
	}
	p.lifeline = w
	return nil
}

// ownGroup keeps an interrupt from the terminal away from a child: it would end the watchdog before its time.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}

// reap waits for the child and then ends the watchdog, which must not read the end of the pipe any more: the child's
// process id is free for others now.
func (p *process) reap() {
	_ = p.cmd.Wait()
	_ = p.watchdog.Process.Kill()
	_ = p.watchdog.Wait()
	_ = p.lifeline.Close()
	close(p.exited)
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// pause returns when the child stands still: kill(2) returns before that, and until then it could serve a request.
func (p *process) pause() error {
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	deadline := time.Now().Add(stopTimeout)
	for !stopped(p.pid()) {
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d did not stop within %v", p.pid(), stopTimeout)
		}
		select {
		case <-p.exited:
			return os.ErrProcessDone
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

func (p *process) resume() error {
	return p.cmd.Process.Signal(syscall.SIGCONT)
}

func (p *process) kill() {
	// In this order a paused child executes nothing any more of what has piled up for it.
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	<-p.exited
}

func stopped(pid int) bool {
	// The state follows the name in parentheses, which may itself contain anything.
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
		return bytes.HasPrefix(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" T"))
	}
	state, err := exec.Command("ps", "-o", "state=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && bytes.HasPrefix(bytes.TrimSpace(state), []byte("T"))
}

func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}
