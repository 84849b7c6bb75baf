//go:build !unix

package main

import (
	"os/exec"
	"testing"
)

func newPostgres(t *testing.T) string {
	t.Skip("no PostgreSQL is started on this system")
	return ""
}

func stopPostgres() {}

func ownGroup(*exec.Cmd) {}

func killGroup(program *exec.Cmd) { _ = program.Process.Kill() }
