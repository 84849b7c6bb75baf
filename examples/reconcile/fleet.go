package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// fleet runs the replicas as processes of their own.
type fleet struct {
	replicas int
	ttl      time.Duration
	pace     time.Duration
	kill     bool
	journal  journal
	redisURL string
	timeline *timeline

	killAfter int // days: the others run out of work soon after, and wait for the day of the one that was killed
	messages  chan message
}

// message is what comes from a replica: progress, and at last how it ended.
type message struct {
	progress
	exited bool
	err    error // why it ended, nil if it ended well
}

// With -kill, the replica that is killed. Its days take much longer than the TTL; renewals keep them its own.
const victim = 1

// run starts the replicas and returns when all have ended. When ctx ends they are told to stop.
func (f *fleet) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.messages = make(chan message)
	var failed error
	processes := make(map[int]*exec.Cmd)
	for id := 1; id <= f.replicas && failed == nil; id++ {
		process, err := f.start(ctx, id)
		if err != nil {
			failed = err
			cancel()
			break
		}
		processes[id] = process
	}

	killed := false
	for len(processes) > 0 {
		m := <-f.messages
		if !m.exited {
			f.timeline.show(m.progress)
			if f.kill && !killed && f.timeline.done >= f.killAfter && f.timeline.works(victim) {
				killed = true
				_ = processes[victim].Process.Kill() // SIGKILL: it cannot release anything
			}
			continue
		}
		delete(processes, m.Replica)
		f.timeline.exited(m.Replica, m.err)
		if m.err != nil && ctx.Err() == nil && !(killed && m.Replica == victim) {
			failed = errors.Join(failed, fmt.Errorf("replica %d: %w", m.Replica, m.err))
		}
	}
	if f.kill && failed == nil && ctx.Err() == nil && f.timeline.takeovers == 0 {
		failed = errors.New("no replica took over the day of the one that was killed")
	}
	return failed
}

// start starts one replica: this program again, with other arguments. The address of Redis goes through the
// environment, because it may contain a password.
func (f *fleet) start(ctx context.Context, id int) (*exec.Cmd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	pace := f.pace
	if f.kill && id == victim {
		pace = 10 * f.ttl
	}
	process := exec.CommandContext(ctx, program, "replica",
		"-id", strconv.Itoa(id), "-of", strconv.Itoa(f.replicas), "-journal", f.journal.path,
		"-prefix", f.journal.keyPrefix(), "-ttl", f.ttl.String(), "-pace", pace.String())
	process.Env = append(os.Environ(), "REDIS_URL="+f.redisURL)
	process.Stderr = os.Stderr
	process.Cancel = func() error { return process.Process.Signal(syscall.SIGTERM) }
	process.WaitDelay = 5 * time.Second
	if _, err := process.StdinPipe(); err != nil { // it stays open as long as this process lives
		return nil, err
	}
	stdout, err := process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := process.Start(); err != nil {
		return nil, err
	}
	go f.follow(id, process, stdout)
	return process, nil
}

// follow passes on what a replica tells, to the end, and then how it ended.
func (f *fleet) follow(id int, process *exec.Cmd, stdout io.Reader) {
	lines := json.NewDecoder(stdout)
	for {
		var p progress
		if lines.Decode(&p) != nil {
			break // the end, or a line that was cut off by a kill
		}
		f.messages <- message{progress: p}
	}
	err := process.Wait()
	if process.ProcessState.Success() {
		err = nil // it was told to stop, and did
	}
	f.messages <- message{progress: progress{Replica: id}, exited: true, err: err}
}
