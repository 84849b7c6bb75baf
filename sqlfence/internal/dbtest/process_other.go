//go:build !unix

package dbtest

import (
	"errors"
	"os/exec"
)

// Without Unix signals and users nothing is started at all.
const (
	supported    = false
	stopPostgres = ""
	stopMariaDB  = ""
)

type process struct{ exited chan struct{} }

func startProcess(*exec.Cmd, string, string) (*process, error) { return nil, errors.ErrUnsupported }

func unprivileged(*exec.Cmd) error { return errors.ErrUnsupported }
func giveAway(string) error        { return errors.ErrUnsupported }

func (*process) stop() {}
