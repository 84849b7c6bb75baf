//go:build unix

package dbtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
	"time"
)

const (
	supported   = true
	stopTimeout = 20 * time.Second

	stopPostgres = "QUIT" // at once, its children too
	stopMariaDB  = "KILL"
)

// process is a server that does not outlive this process, however this one ends.
//
// A watchdog sees to that: a shell whose standard input is a pipe that only this process holds open. The kernel closes
// the pipe when this process dies, by whatever signal; the shell then reads the end of it, ends the server and removes
// its directory. (Linux' Pdeathsig is sent when the *thread* that forked ends, which the Go runtime does as it pleases.)
type process struct {
	cmd      *exec.Cmd
	signal   string
	watchdog *exec.Cmd
	lifeline *os.File      // the pipe's writing end
	exited   chan struct{} // closed when server and watchdog are gone
}

const watch = `read line; kill -s "$1" "$0"; while kill -0 "$0"; do sleep 0.1; done 2>/dev/null; rm -rf "$2"`

func startProcess(cmd *exec.Cmd, dir, signal string) (*process, error) {
	if err := unprivileged(cmd); err != nil {
		return nil, err
	}
	r, w, err := os.Pipe() // close-on-exec: no child inherits the writing end
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	p := &process{cmd: cmd, signal: signal, lifeline: w, exited: make(chan struct{})}
	p.watchdog = exec.Command("/bin/sh", "-c", watch, strconv.Itoa(cmd.Process.Pid), signal, dir)
	p.watchdog.Stdin = r
	p.watchdog.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.watchdog.Start(); err != nil {
		err = fmt.Errorf("start the watchdog: %w", err)
		return nil, errors.Join(err, cmd.Process.Kill(), ignoreExit(cmd.Wait()), w.Close())
	}
	go p.reap()
	return p, nil
}

// unprivileged makes the command run as nobody if this process is root. Its process group keeps an interrupt from the
// terminal away from it.
func unprivileged(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Getuid() != 0 {
		return nil
	}
	uid, gid, err := nobody()
	if err != nil {
		return err
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return nil
}

// giveAway makes the directory one of the user that the commands run as.
func giveAway(dir string) error {
	if os.Getuid() != 0 {
		return nil
	}
	uid, gid, err := nobody()
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, gid)
}

func nobody() (uid, gid int, err error) {
	u, err := user.Lookup("nobody")
	if err != nil {
		return 0, 0, fmt.Errorf("root needs another user to run the server as: %w", err)
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	return uid, gid, errors.Join(err1, err2)
}

// reap waits for the server and then ends the watchdog, which must not read the end of the pipe any more: the server's
// process id is free for others now.
func (p *process) reap() {
	_ = p.cmd.Wait()
	_ = p.watchdog.Process.Kill()
	_ = p.watchdog.Wait()
	_ = p.lifeline.Close()
	close(p.exited)
}

func (p *process) stop() {
	signal := syscall.SIGKILL
	if p.signal == stopPostgres {
		signal = syscall.SIGQUIT
	}
	_ = p.cmd.Process.Signal(signal)
	select {
	case <-p.exited:
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}
