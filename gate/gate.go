// Package gate refuses, in a service that others call, what somebody writes whose lease is over.
//
// The holder of a lease sends its fence (taken with redislease.WithFencing, read with Lease.Fence) along with each
// request. A [Gate] remembers the greatest one per resource and lets a write through that has no smaller one:
//
//	err := g.Do(ctx, account, fence, func() error { return save(ctx, account, balance) })
//	switch {
//	case errors.Is(err, gate.ErrStale):     // a later holder was here
//	case errors.Is(err, gate.ErrForgotten): // it may be stale; the caller has to acquire anew
//	}
//
// # What it promises
//
// The check and the write are one step. While a write of a resource is under way no other one of it begins, so none with
// a smaller fence can land after one with a greater, however long it takes on its way. A check that returned before the
// write would prove nothing about a write that passed it and is still under way.
//
// Memory is bounded, and what was forgotten is refused rather than let through.
//
// # What it does not
//
//   - It is the memory of one process. All writes of a resource have to go through one Gate: where several processes
//     write, or others write past this one, the check belongs where the writes land: in a database (see the module
//     github.com/redislease/redislease/sqlfence), or in one script in Redis (see the Example of redislease.Lease.Fence).
//   - A restart forgets everything: until the later holder's first write a former one is let through again. Where that
//     does harm, keep the fence beside what it protects, in the same transaction.
//   - A write that has returned must have ended. If it gives up waiting for a database that may still execute it, only
//     the database can refuse that.
//   - A former holder is not refused before the later one's first call. What comes before comes first, nothing worse.
//   - Once the limit is exceeded, fences of different resources are compared. Those of redislease allow it, since they
//     follow the time of their acquisition. But a lease that is held for long has a small one, so that its holder may be
//     refused with [ErrForgotten] though nobody came after it. It has to acquire anew, or the limit to be raised.
package gate

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

var (
	// ErrStale: a greater fence has been seen for the resource, so a later holder was here. It is matched by every
	// [StaleError]. Trying again is of no use.
	ErrStale = errors.New("stale fence")

	// ErrForgotten: the Gate does not remember the resource, and the fence is below the greatest of those that it has
	// forgotten. It may be stale or not; one of a lease that is acquired now is neither.
	ErrForgotten = errors.New("forgotten resource")
)

// A StaleError says that a fence was refused. It matches [ErrStale].
type StaleError struct {
	Resource string
	Fence    int64 // what was given
	Seen     int64 // the greatest that came with the resource
}

// Error names the resource and both fences.
func (e *StaleError) Error() string {
	return fmt.Sprintf("gate: %q: %v: %d, after %d was seen", e.Resource, ErrStale, e.Fence, e.Seen)
}

// Is makes every StaleError match [ErrStale].
func (e *StaleError) Is(target error) bool { return target == ErrStale }

// A Gate lets writes through by their fences. Make it with [New]; it is safe for concurrent use.
type Gate struct {
	mu     sync.Mutex
	memory memory
	turns  map[string]*turn // of the resources that somebody writes or waits to write
}

// turn is the right to write a resource.
type turn struct {
	taken chan struct{} // of capacity 1, full while somebody writes; who waits is served in order of arrival
	users int           // who writes and who waits
}

// New returns a Gate that remembers the fences of limit resources, at least 1. If there are more it forgets that with
// the smallest fence. Choose a limit well above the number of leases that are held at a time; a remembered resource
// costs its name and less than a hundred bytes.
func New(limit int) (*Gate, error) {
	if limit < 1 {
		return nil, fmt.Errorf("gate: new: limit %d is below the least, 1", limit)
	}
	return &Gate{memory: newMemory(limit), turns: map[string]*turn{}}, nil
}

// Do calls write, and returns its error, if no greater fence has been seen for the resource, and remembers the fence.
// The same fence once more is the same holder writing again. While write runs no other one for the resource does: Do
// waits for its turn, until ctx ends.
//
// Any other error means that write was not called: a [*StaleError], which matches [ErrStale]; one that matches
// [ErrForgotten]; the cause of ctx; or one that says that the fence is below 1, that of a lease which was taken without
// redislease.WithFencing. A greater fence is remembered as soon as it comes, so that those that wait with smaller ones
// are refused, and stays so if write fails or ctx ends.
//
// write must not call Do for the same resource, which would wait for itself. If it panics or ends its goroutine the next
// one has its turn.
func (g *Gate) Do(ctx context.Context, resource string, fence int64, write func() error) error {
	switch {
	case g == nil || g.turns == nil:
		return fmt.Errorf("gate: %q: the Gate was not made by New", resource)
	case ctx == nil:
		return fmt.Errorf("gate: %q: the context is nil", resource)
	case write == nil:
		return fmt.Errorf("gate: %q: the write is nil", resource)
	case fence < 1:
		return fmt.Errorf("gate: %q: fence %d: the lease was taken without redislease.WithFencing", resource, fence)
	}
	t, err := g.queue(resource, fence)
	if err != nil {
		return err
	}
	defer g.leave(resource, t)
	select {
	case t.taken <- struct{}{}:
		defer func() { <-t.taken }()
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return fmt.Errorf("gate: %q: %w", resource, context.Cause(ctx))
	}
	if err := g.admit(resource, fence); err != nil { // a greater one may have come meanwhile
		return err
	}
	return write()
}

// queue returns the turn of the resource for one more user, who has to leave.
func (g *Gate) queue(resource string, fence int64) (*turn, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.memory.admit(resource, fence); err != nil {
		return nil, err
	}
	t := g.turns[resource]
	if t == nil {
		t = &turn{taken: make(chan struct{}, 1)}
		g.turns[resource] = t
	}
	t.users++
	return t, nil
}

func (g *Gate) admit(resource string, fence int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.memory.admit(resource, fence)
}

func (g *Gate) leave(resource string, t *turn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t.users--; t.users == 0 {
		delete(g.turns, resource)
	}
}
