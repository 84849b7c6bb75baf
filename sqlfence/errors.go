package sqlfence

import (
	"errors"
	"fmt"
)

// ErrStale: a greater fence has been seen for the resource, so a later holder was here. It is matched by every
// [StaleError]. No error of the database ever matches it.
var ErrStale = errors.New("stale fence")

// A StaleError says that [Guard.Admit] refused a fence. It matches [ErrStale].
type StaleError struct {
	Resource string
	Fence    int64 // what was given
	Seen     int64 // the greatest that was committed for the resource, or written earlier in the same transaction
}

// Error names the resource and both fences.
func (e *StaleError) Error() string {
	return fmt.Sprintf("sqlfence: admit %q: %v: %d, after %d was seen", e.Resource, ErrStale, e.Fence, e.Seen)
}

// Is makes every StaleError match [ErrStale].
func (e *StaleError) Is(target error) bool { return target == ErrStale }
