//go:build unix

package main

import (
	"os"
	"syscall"
)

// canStop reports whether a process can be made to stand still.
const canStop = true

func suspend(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func resume(p *os.Process) error  { return p.Signal(syscall.SIGCONT) }
