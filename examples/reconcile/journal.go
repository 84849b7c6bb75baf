package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// errJournal marks an error of the journal: without it a replica cannot know what is done, so it stops.
var errJournal = errors.New("journal")

// entry says that a day is done, by whom, and what was found.
type entry struct {
	Day        string     `json:"day"`
	Replica    int        `json:"replica"`
	Orders     int        `json:"orders"`
	Payments   int        `json:"payments"`
	Mismatches []mismatch `json:"mismatches"`
}

// journal is the file that all replicas share: one line of JSON for each finished day. A lease says who may work on a
// day now; the journal says that nobody needs to any more.
type journal struct{ path string }

// openJournal makes sure that the file exists.
func openJournal(path string) (journal, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return journal{}, err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return journal{}, err
	}
	return journal{path: path}, file.Close()
}

// keyPrefix is the prefix of the leases that protect this journal: who shares the one shares the others, and nobody
// else is disturbed.
func (j journal) keyPrefix() string {
	sum := sha256.Sum256([]byte(j.path))
	return fmt.Sprintf("books:%x:", sum[:4])
}

// append adds e with one write at the end of the file and returns when it is on disk. The line begins with a newline
// of its own: half a line that a killed process left behind stays alone and spoils nothing.
func (j journal) append(e entry) (err error) {
	line, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("%w: %w", errJournal, err)
	}
	file, err := os.OpenFile(j.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("%w: %w", errJournal, err)
	}
	_, err = file.Write(append(append([]byte{'\n'}, line...), '\n'))
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("%w: %w", errJournal, err)
	}
	return nil
}

// read returns the entries in the order in which they were written. What is not a whole
// JSON object is the rest of an append that was killed: its day is not done. (No beginning of an object is an object,
// so a line never becomes valid, or invalid, by what is appended later.)
func (j journal) read() ([]entry, error) {
	text, err := os.ReadFile(j.path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errJournal, err)
	}
	var entries []entry
	for line := range bytes.Lines(text) {
		var e entry
		if json.Unmarshal(line, &e) == nil {
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// has reports whether day is done.
func (j journal) has(day string) (bool, error) {
	entries, err := j.read()
	for _, e := range entries {
		if e.Day == day {
			return true, nil
		}
	}
	return false, err
}
