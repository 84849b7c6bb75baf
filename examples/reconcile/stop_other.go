//go:build !unix

package main

import (
	"errors"
	"os"
)

const canStop = false

func suspend(*os.Process) error { return errors.ErrUnsupported }
func resume(*os.Process) error  { return nil }
