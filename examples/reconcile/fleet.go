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
	replicas  int
	ttl       time.Duration
	pace      time.Duration
	kill      bool
	stop      bool
	fence     bool
	source    source
	keyPrefix string
	redisURL  string
	timeline  *timeline

	killAfter int // days: the others run out of work soon after, and wait for the day of the one that was killed
	processes map[int]*process
	messages  chan message
}

// process is a replica that runs.
type process struct {
	*exec.Cmd
	stdin io.Writer // stays open for as long as this process lives
}

// message is what comes from a replica: progress, and at last how it ended.
type message struct {
	progress
	exited bool
	err    error // why it ended, nil if it ended well
}

// The replica that is killed or stopped. With -kill its days take much longer than the TTL; renewals keep them its own.
const victim = 1

// run starts the replicas and returns when all have ended. When ctx ends they are told to stop.
func (f *fleet) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.messages, f.processes = make(chan message), map[int]*process{}
	last := f.replicas
	if f.stop {
		last = victim // the others come when it stands still, so that none is before it in its day
	}
	failed := f.start(ctx, victim, last)
	if failed != nil {
		cancel()
	}
	killed, stopped := false, "" // a day
	for len(f.processes) > 0 {
		m := <-f.messages
		if !m.exited {
			f.timeline.show(m.progress)
		} else {
			delete(f.processes, m.Replica)
			f.timeline.exited(m.Replica, m.err)
			if m.err != nil && ctx.Err() == nil && !(killed && m.Replica == victim) {
				failed = errors.Join(failed, fmt.Errorf("replica %d: %w", m.Replica, m.err))
			}
		}
		switch first := f.processes[victim]; {
		case first == nil:
		case f.kill && !killed && f.timeline.done >= f.killAfter && f.timeline.works(victim):
			killed = true
			_ = first.Process.Kill() // SIGKILL: it cannot release anything
		case m.Step == checked:
			stopped = m.Day
			failed = errors.Join(failed, suspend(first.Process))
			f.timeline.show(progress{Replica: victim, Day: stopped, Step: paused, Note: "SIGSTOP, before its write"})
			failed = errors.Join(failed, f.start(ctx, victim+1, f.replicas))
		case stopped != "" && ctx.Err() == nil && (m.Day == stopped && m.Step == done || len(f.processes) == 1):
			// Another replica has done the day, or none is left that could: it is no matter of time.
			f.timeline.show(progress{Replica: victim, Day: stopped, Step: resumed, Note: "SIGCONT, and it writes"})
			failed = errors.Join(failed, first.goOn())
			stopped = ""
		}
	}
	if failed != nil || ctx.Err() != nil {
		return failed
	}
	return f.asPlanned()
}

// asPlanned returns an error if the run has not shown what it was to show.
func (f *fleet) asPlanned() error {
	t := f.timeline
	switch {
	case f.stop && t.late == "":
		return fmt.Errorf("replica %d found no day to be stopped in", victim)
	case (f.kill || f.stop) && t.takeovers == 0:
		return fmt.Errorf("no replica took over the day of replica %d", victim)
	case f.stop && f.fence && t.late != refused:
		return errors.New("the late write was not refused")
	}
	return nil
}

// start starts the replicas from first to last.
func (f *fleet) start(ctx context.Context, first, last int) error {
	for id := first; id <= last; id++ {
		if err := f.startOne(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// startOne starts a replica: this program again, with other arguments. The addresses of Redis and of the database go
// through the environment, because they may contain a password.
func (f *fleet) startOne(ctx context.Context, id int) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	pace := f.pace
	if f.kill && id == victim {
		pace = 10 * f.ttl
	}
	p := &process{Cmd: exec.CommandContext(ctx, program, "replica",
		"-id", strconv.Itoa(id), "-of", strconv.Itoa(f.replicas), "-db", f.source.file,
		"-prefix", f.keyPrefix, "-ttl", f.ttl.String(), "-pace", pace.String(),
		"-fence="+strconv.FormatBool(f.fence), "-halt="+strconv.FormatBool(f.stop && id == victim))}
	p.Env = append(os.Environ(), "REDIS_URL="+f.redisURL, "RECONCILE_DSN="+f.source.dsn)
	p.Stderr = os.Stderr
	p.Cancel = func() error { return errors.Join(p.Process.Signal(syscall.SIGTERM), resume(p.Process)) }
	p.WaitDelay = 5 * time.Second
	if p.stdin, err = p.StdinPipe(); err != nil {
		return err
	}
	stdout, err := p.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.Start(); err != nil {
		return err
	}
	f.processes[id] = p
	go f.follow(id, p, stdout)
	return nil
}

// goOn ends a halt.
func (p *process) goOn() error {
	if err := resume(p.Process); err != nil {
		return err
	}
	_, err := io.WriteString(p.stdin, "go on\n")
	return err
}

// follow passes on what a replica tells, to the end, and then how it ended.
func (f *fleet) follow(id int, p *process, stdout io.Reader) {
	lines := json.NewDecoder(stdout)
	for {
		var line progress
		if lines.Decode(&line) != nil {
			break // the end, or a line that was cut off by a kill
		}
		f.messages <- message{progress: line}
	}
	err := p.Wait()
	if p.ProcessState.Success() {
		err = nil // it was told to stop, and did
	}
	f.messages <- message{progress: progress{Replica: id}, exited: true, err: err}
}
