//go:build !unix

package redistest

import (
	"errors"
	"os/exec"
)

// Without SIGSTOP half of what a Server offers cannot be done, so nothing is started at all.
const supported = false

type process struct{ exited chan struct{} }

func startProcess(*exec.Cmd) (*process, error) {
	return nil, errors.ErrUnsupported
}

func (*process) pid() int      { return 0 }
func (*process) pause() error  { return errors.ErrUnsupported }
func (*process) resume() error { return errors.ErrUnsupported }
func (*process) kill()         {}
