package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// timeline prints what the replicas tell, with the time since the start, and notices days that change hands.
type timeline struct {
	out       io.Writer
	start     time.Time
	working   map[int]progress      // by replica: the day it works on
	busy      map[progress]bool     // already printed
	abandoned map[string]abandoning // by day: its replica ended without a word, or stands still
	done      int                   // days
	takeovers int                   // abandoned days that another replica has begun
	late      step                  // what has become of the write of a replica that stood still
}

// abandoning is the end of a replica in the middle of a day.
type abandoning struct {
	replica int
	how     string
	at      time.Time
}

func newTimeline(out io.Writer) *timeline {
	return &timeline{
		out: out, start: time.Now(),
		working: map[int]progress{}, busy: map[progress]bool{}, abandoned: map[string]abandoning{},
	}
}

// works reports whether a replica is in the middle of a day.
func (t *timeline) works(replica int) bool {
	_, ok := t.working[replica]
	return ok
}

// show prints one step of a replica.
func (t *timeline) show(p progress) {
	switch p.Step {
	case busy:
		if t.busy[p] {
			return
		}
		t.busy[p] = true
	case acquired:
		t.working[p.Replica] = p
		if end, ok := t.abandoned[p.Day]; ok {
			delete(t.abandoned, p.Day)
			t.takeovers++
			p.Note += fmt.Sprintf(", taken over %.2fs after replica %d %s", time.Since(end.at).Seconds(), end.replica, end.how)
		}
	case paused:
		t.abandoned[p.Day] = abandoning{replica: p.Replica, how: "was stopped", at: time.Now()}
	case accepted:
		t.late = accepted
	case done:
		t.done++
		delete(t.working, p.Replica)
	case refused:
		t.late = refused
		delete(t.working, p.Replica)
	case retry, stopped:
		delete(t.working, p.Replica)
	}
	t.print(p)
}

// exited prints the end of a replica that did not end well.
func (t *timeline) exited(replica int, err error) {
	if err == nil {
		return
	}
	p := progress{Replica: replica, Day: t.working[replica].Day, Step: "ended", Note: err.Error()}
	if t.works(replica) {
		p.Note += ", in the middle of the day"
		t.abandoned[p.Day] = abandoning{replica: replica, how: "ended", at: time.Now()}
		delete(t.working, replica)
	}
	t.print(p)
}

func (t *timeline) print(p progress) {
	line := fmt.Sprintf("%6.2fs  replica %d  %-10s  %-8s  %s", time.Since(t.start).Seconds(), p.Replica, p.Day, p.Step,
		strings.ReplaceAll(p.Note, "\n", "; "))
	fmt.Fprintln(t.out, strings.TrimRight(line, " "))
}
