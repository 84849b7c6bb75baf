package redislease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Answers that are not failures of the library or of Redis. Test for them with [errors.Is].
var (
	// ErrNotAcquired: somebody else holds the key. No error of Redis or of the network ever matches it.
	ErrNotAcquired = errors.New("held by another")

	// ErrOutcomeUnknown: a command was sent and nobody can know whether Redis executed it. What it may have left
	// behind ends within one TTL and is not renewed.
	ErrOutcomeUnknown = errors.New("outcome unknown")

	// ErrReleased: the holder released the lease itself. It is the cause of a lease's context after Release.
	ErrReleased = errors.New("released")

	// ErrLost matches every [LostError].
	ErrLost = errors.New("lost")
)

// Reasons of a loss, found in [LostError.Reason] and matched by [errors.Is].
var (
	// ErrTaken: Redis said that the key holds somebody else's token, or a value that is no token at all.
	ErrTaken = errors.New("the key holds another token")

	// ErrGone: Redis said that the key is absent: deleted, evicted, flushed, expired, or lost in a failover.
	ErrGone = errors.New("the key is gone")

	// ErrUnconfirmed: trust ran out before Redis confirmed the lease again.
	ErrUnconfirmed = errors.New("not confirmed in time")

	// ErrMaxHold: the lease reached WithMaxHold or WithMaxRenewals and was not renewed any further.
	ErrMaxHold = errors.New("held for as long as allowed")
)

// A LostError says that a lease ended without being released. It matches [ErrLost], its Reason, and what Err matches.
type LostError struct {
	Key    string    // as given to the acquisition, without prefix
	Reason error     // ErrTaken, ErrGone, ErrUnconfirmed or ErrMaxHold
	Err    error     // with ErrUnconfirmed: the last failed renewal, or why there was none; else nil
	At     time.Time // when the lease was found to be lost
}

// Error names the key, the reason and, if there is one, the error behind it.
func (e *LostError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("redislease: lease %q lost: %v: %v", e.Key, e.Reason, e.Err)
	}
	return fmt.Sprintf("redislease: lease %q lost: %v", e.Key, e.Reason)
}

// Is makes every LostError match [ErrLost].
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the reason and, if there is one, the error behind it.
func (e *LostError) Unwrap() []error {
	if e.Err != nil {
		return []error{e.Reason, e.Err}
	}
	return []error{e.Reason}
}

// opError puts the operation and the key before an error. It is formatted only when somebody reads it, since a
// refused acquisition is nothing out of the ordinary.
type opError struct {
	op, key string
	err     error
}

func (e *opError) Error() string { return fmt.Sprintf("redislease: %s %q: %v", e.op, e.key, e.err) }
func (e *opError) Unwrap() error { return e.err }

// detailError is a sentinel with the details that led to it, on one line.
type detailError struct {
	what    error
	details []error
}

func (e *detailError) Error() string {
	s := e.what.Error()
	for _, d := range e.details {
		s += ": " + d.Error()
	}
	return s
}

func (e *detailError) Unwrap() []error { return append([]error{e.what}, e.details...) }

// detailed returns what, followed by those details that are not nil.
func detailed(what error, details ...error) error {
	var known []error
	for _, d := range details {
		if d != nil {
			known = append(known, d)
		}
	}
	if len(known) == 0 {
		return what
	}
	return &detailError{what, known}
}

// hiding is an error from elsewhere that would match something it must not. It matches all else that err matches.
type hiding struct {
	err    error
	hidden []error
}

func (e *hiding) Error() string { return e.err.Error() }

// Is answers for the whole chain below, which it keeps from errors.Is for this very purpose.
func (e *hiding) Is(target error) bool {
	return !slices.Contains(e.hidden, target) && errors.Is(e.err, target)
}

// As lets the error itself be found.
func (e *hiding) As(target any) bool { return errors.As(e.err, target) }

func hide(err error, hidden []error) error {
	for _, h := range hidden {
		if errors.Is(err, h) {
			return &hiding{err, hidden}
		}
	}
	return err
}

// redacted is an error with another message.
type redacted struct {
	err  error
	text string
}

func (e *redacted) Error() string { return e.text }
func (e *redacted) Unwrap() error { return e.err }

var (
	contextErrors = []error{context.Canceled, context.DeadlineExceeded}
	ownErrors     = []error{ErrNotAcquired, ErrOutcomeUnknown, ErrReleased, ErrLost, ErrTaken, ErrGone, ErrUnconfirmed, ErrMaxHold}
)

// ofClient returns err, which the client gave, so that it matches no error of package context: those say that the
// caller's context has ended, and a dial that timed out would match one.
func ofClient(err error) error { return hide(err, contextErrors) }

// ofCaller returns err, the cause of the caller's context, so that it matches none of our own errors: it may be the
// loss of another lease, under whose context this one was taken.
func ofCaller(err error) error { return hide(err, ownErrors) }
