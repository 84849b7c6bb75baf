package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// The harness runs the clients of the scenarios contended and live in processes of their own, which are this program
// once more. They speak JSON, one object a line: each request gets one reply.

// workerFlag makes this program a worker.
const workerFlag = "-worker"

// request says what to do, and the fields that concern it.
type request struct {
	Do         string
	Adapter    string        // open
	Addr       string        // open
	TTL        time.Duration // open
	RenewEvery time.Duration // open
	Key        string        // hold, queue, loop
	First, N   int           // queue, loop: the number of the first waiter, and how many; take: how many
	Hold       time.Duration // queue, loop: the critical section
	For        time.Duration // queue: over what the waiters come; collect: the patience; loop: how long; told: how long to watch
}

const (
	doOpen       = "open"
	doHold       = "hold"
	doLetGo      = "let go"
	doUsage      = "usage"
	doCensus     = "census"
	doQueue      = "queue"
	doCollect    = "collect"
	doLoop       = "loop"
	doTake       = "take"
	doReleaseAll = "release all"
	doTold       = "told"
)

type reply struct {
	Error    string          `json:",omitempty"`
	CPU      float64         `json:",omitempty"` // seconds up to now; loop: in it
	At       time.Time       // let go: when; take, release all: when it began
	Turns    []turn          `json:",omitempty"` // collect, loop
	Waiting  []time.Duration `json:",omitempty"` // collect, loop: for how long those had waited who were still waiting
	Failures int             `json:",omitempty"` // calls that failed
	Invalid  int             `json:",omitempty"` // leases that were not held any more when they were released
	Census   census
	Taken    []time.Time `json:",omitempty"` // take: when each lease was acquired
	Took     time.Duration
	Told     []time.Time `json:",omitempty"` // told: when the holder of each lease was told that it had ended; zero: not at all
}

// turn is one waiter's lease. The times are those of the wall clock, which the processes share.
type turn struct {
	Waiter                     int
	Called, Acquired, Released time.Time // Released: when the release was called
}

// census is what a process has.
type census struct {
	Heap, Stack float64 // bytes
	Goroutines  int
	Lost        int // leases that are not held any more, or failed to be renewed
}

// process is a worker, seen from the harness.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func spawn() (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, workerFlag)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it ends with its input, not with an interrupt
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &process{cmd, in, json.NewDecoder(bufio.NewReader(out))}, nil
}

func (p *process) tell(r request) error {
	if err := json.NewEncoder(p.in).Encode(r); err != nil {
		return fmt.Errorf("%s: %w", r.Do, err)
	}
	return nil
}

// hear returns the reply to the oldest request that has none yet.
func (p *process) hear() (r reply, err error) {
	if err := p.out.Decode(&r); err != nil {
		return r, fmt.Errorf("a worker has ended: %w", err)
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	return r, nil
}

func (p *process) ask(r request) (reply, error) {
	if err := p.tell(r); err != nil {
		return reply{}, err
	}
	return p.hear()
}

// end kills the worker. What it holds lapses, or is flushed.
func (p *process) end() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// askAll asks all processes at once; requestFor makes the request for each.
func askAll(processes []*process, requestFor func(i int) request) ([]reply, error) {
	if err := tellAll(processes, requestFor); err != nil {
		return nil, err
	}
	return hearAll(processes)
}

func tellAll(processes []*process, requestFor func(i int) request) error {
	for i, p := range processes {
		if err := p.tell(requestFor(i)); err != nil {
			return err
		}
	}
	return nil
}

func hearAll(processes []*process) (replies []reply, err error) {
	for _, p := range processes {
		r, err := p.hear()
		if err != nil {
			return nil, err
		}
		replies = append(replies, r)
	}
	return replies, nil
}

func totalCPU(replies []reply) (seconds float64) {
	for _, r := range replies {
		seconds += r.CPU
	}
	return seconds
}
