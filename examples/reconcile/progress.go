package main

import (
	"encoding/json"
	"os"
)

// step is what a replica tells about a day.
type step string

const (
	acquired step = "acquired"
	busy     step = "busy" // another replica works on it
	done     step = "done"
	checked  step = "checked"  // its lease is held; it waits for a line from its parent before it writes
	refused  step = "refused"  // a write, by the database: another replica has had the day since
	accepted step = "accepted" // a write that came late
	retry    step = "retry"    // given up for now; it is tried again later
	stopped  step = "stopped"  // given up because the replica was told to stop
	trouble  step = "trouble"  // worth knowing; the work goes on

	paused  step = "paused"  // by its parent, with SIGSTOP
	resumed step = "resumed" // and with SIGCONT
)

// progress is one line of what a replica tells its parent, as JSON on standard output.
type progress struct {
	Replica int    `json:"replica"`
	Day     string `json:"day"`
	Step    step   `json:"step"`
	Note    string `json:"note,omitempty"`
}

// tell writes p. An error is of no interest: it means that nobody listens any more.
func tell(p progress) {
	if line, err := json.Marshal(p); err == nil {
		_, _ = os.Stdout.Write(append(line, '\n'))
	}
}
