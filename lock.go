// Package redislease runs a critical section on one replica of a Go service at a time, under a lease on a key in Redis.
//
//	locker, err := redislease.New(client, redislease.WithPrefix("billing:"))
//	…
//	err = locker.TryDo(ctx, "reconcile:2026-03-14", func(ctx context.Context, lease *redislease.Lease) error {
//		for _, order := range orders {
//			if err := lease.Err(); err != nil { // may a write still land?
//				return err
//			}
//			if err := book(ctx, order); err != nil {
//				return err
//			}
//		}
//		return nil
//	})
//	if errors.Is(err, redislease.ErrNotAcquired) {
//		return nil // another replica is at it
//	}
//
// # What it promises
//
// As long as Redis keeps a key for its TTL, a lease's context ends before the key can go to somebody else, whatever
// Redis, the network or go-redis is doing at that moment. A watchdog renews the lease while the work goes on, but not
// for ever: WithMaxHold, one hour unless said otherwise, ends the lease of a job that hangs.
//
// "Somebody else has it" ([ErrNotAcquired]), "it was mine and is gone" ([ErrLost]) and "nobody can know"
// ([ErrOutcomeUnknown]) are three different errors, and none is ever a guess. A release is sent once: that it found the
// key no longer its own is an error for the caller to see, never a reason to delete again.
//
// Nothing is left behind: no key that outlives its TTL, no renewal after a release, no goroutine of a lease that is
// over. Commands that go-redis has not given up yet are left to it and change nothing.
//
// # What no lease can do
//
//   - Stop a write that was already sent when the context ended. The place where it lands has to refuse it. With
//     [WithFencing] each lease has a number that only grows, and the check for it is in the module sqlfence (SQL
//     databases) and in the package gate (services that are called with it).
//   - Survive an asynchronous failover: a promoted replica may not have seen the key, and an old master that is cut off
//     from its replicas goes on confirming renewals (min-replicas-to-write bounds for how long). The same goes for a
//     restart without the last writes, for eviction, for an operator who deletes keys, for a server clock that jumps
//     by more than the margin, and for a VM paused or restored together with its clocks. In all of these a fence keeps
//     the writes of two holders apart, unless the clock of the server went back, too: see [WithFencing].
//   - Speak up while a process stands still. When it goes on, code may run before its timers do; only [Lease.Err] and
//     the place where the write lands protect that moment.
//   - Make a job run once. It is mutual exclusion: a job of 200 ms on schedulers that are a second apart runs twice, one
//     run after the other. A watermark checked under the lease cures that. What must never happen twice belongs under
//     a unique constraint or an idempotency key: a fence does not help there, for the second run has the greater one.
//   - Nest: a holder that acquires its own key again waits for itself.
//
// Connections of a shared pool can all fall silent at once. For leases of a few seconds give the Locker a small client
// of its own, or a client with a ReadTimeout below a quarter of the TTL.
package redislease

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// RedisClient is the part of a go-redis client that a Locker needs. *redis.Client (also one for Sentinel),
// *redis.ClusterClient and redis.UniversalClient have it. Wrappers and hooks must hand commands and errors on as they are:
// one that turns an error into success makes a command that failed look like one that was refused.
//
// A *redis.Client also gets pipelines, of the renewals of a Locker that has many leases. Their hooks are called with a
// context that has no values of a caller's.
//
// The AutoPipeline of newer versions of go-redis has it as well. That pays where one process acquires and releases tens of
// thousands of times a second. Leases need no order among their commands, so give it two batches at a time
// (MaxConcurrentBatches: 2, Unordered: true), and a MaxBatchSize of half the calls that go on at once. A connection that
// hangs then holds up many leases, for the client's ReadTimeout.
//
// Waiters are woken by a release if it also has Subscribe, as those have; else they poll. So a wrapper should hand on that
// method, too.
//
// If it has a method ReloadState(context.Context), as *redis.ClusterClient has, that is called when a command gets no
// answer: the node may be gone, and by itself go-redis looks for its successor every ten seconds only.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// A Locker acquires leases. It is safe for concurrent use; a service usually has one. It needs no closing: all that it
// holds is, from the first time that somebody waits until a second after nobody does any more, one connection that listens
// to releases, and timers, which end by themselves. The client stays its owner's: close it after the last lease was
// released.
//
// Which verb to use: TryAcquire and TryDo are for work that another replica does just as well, a tick of a scheduler
// for one: they skip it if the key is taken. Acquire and Do are for work that has to be done here as soon as it may.
// The two Do hold the lease around a function and are hard to get wrong; the other two return the lease.
type Locker struct {
	client  RedisClient
	config  *config
	clock   clock
	anchor  atomic.Pointer[instant] // see clock.now
	checked atomic.Bool             // the scripts are known to run
	fences  atomic.Int64            // see remember
	quiet   atomic.Bool             // releases are not published: the server refuses scripts that do
	queues  queues
	alarms  alarms
}

// New returns a Locker that works through client. It sends nothing: the first acquisition finds out whether the server
// can run the library's scripts.
//
// It refuses a nil client, options that cannot work together, and clients on which a lease is unsafe or never executes:
// *redis.Ring, which moves keys from a shard that fails to another, so that there are two holders; pipelines and
// transactions, *redis.Conn, which one timeout spoils, and *redis.SentinelClient.
func New(client RedisClient, opts ...LockerOption) (*Locker, error) {
	if err := usable(client); err != nil {
		return nil, fmt.Errorf("redislease: new: %w", err)
	}
	c := defaults
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("redislease: new: option %d of %d is nil", i+1, len(opts))
		}
		o.applyLocker(&c)
	}
	if err := c.resolve(); err != nil {
		return nil, fmt.Errorf("redislease: new: %w", err)
	}
	k := &Locker{client: client, config: &c, clock: systemClock}
	k.alarms.locker, k.alarms.pipeline = k, pipelined(client)
	return k, nil
}

// usable refuses clients on which leases cannot work.
func usable(client RedisClient) error {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return errors.New("the client is nil")
	}
	const unsafe = "a lease is not safe on a %T: %s"
	switch client.(type) {
	case *redis.Ring:
		return fmt.Errorf(unsafe, client, "it moves the keys of a shard that fails, and there are two holders")
	case *redis.Conn:
		return fmt.Errorf(unsafe, client, "one timeout spoils its only connection")
	case *redis.SentinelClient:
		return fmt.Errorf(unsafe, client, "it talks to a Sentinel, not to a Redis; use redis.NewFailoverClient")
	case redis.Pipeliner, *redis.Tx:
		return fmt.Errorf(unsafe, client, "it does not execute commands one by one")
	}
	return nil
}

// TryAcquire acquires the key if nobody holds it, and otherwise returns an error that matches [ErrNotAcquired] at once.
//
// Without an error the caller holds the lease and has to release it. An error that matches [ErrOutcomeUnknown] says
// that the key may have been taken for nobody, for a TTL at most. Any other error says that it was not: an error of
// Redis or of the client, of an argument, or the cause of ctx.
func (k *Locker) TryAcquire(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return k.checkedAcquire(ctx, key, false, opts)
}

// Acquire acquires the key, and waits while another holds it, for as long as ctx and WithAcquireTimeout allow.
//
// Those who wait for one key of a Locker stand in line in the order in which they came, and only the first talks to Redis.
// A release wakes the first in line of every process, and whoever asks first has it. Nobody relies on that: the first
// in line also polls, at once and then less and less often, down to once in one to two seconds, and no later than the
// holder's key lapses; so a holder that crashed is noticed within its TTL.
//
// If they allow no longer it returns what the last answer said: an error that matches [ErrNotAcquired],
// [ErrOutcomeUnknown], or an error of Redis; if ctx ended it, its cause is joined, and otherwise no error of package
// context matches. It rides out a Redis that refuses or does not answer for as long as it may. Without a bound, neither
// a deadline nor WithAcquireTimeout, three failures in a row end it: a refusal, which may come in milliseconds, or
// silence for the smaller of 5 s and TTL − margin.
func (k *Locker) Acquire(ctx context.Context, key string, opts ...Option) (*Lease, error) {
	return k.checkedAcquire(ctx, key, true, opts)
}

// TryDo runs fn under a lease if nobody holds the key, and otherwise returns an error that matches [ErrNotAcquired]. In
// everything else it is like [Locker.Do].
func (k *Locker) TryDo(ctx context.Context, key string, fn func(context.Context, *Lease) error, opts ...Option) error {
	return k.do(ctx, key, false, fn, opts)
}

// Do acquires the key like [Locker.Acquire], runs fn with the lease and its context, and releases the lease, also if fn
// panics or ends its goroutine.
//
// It returns nil if fn returned nil and the lease was held from before fn began until after it returned. An error of fn
// is joined with that of a loss, which says by how much fn overran the end of trust. If fn released the lease itself,
// the error matches [ErrReleased]. That Redis refused or did not answer the release changes nothing for the caller and
// is an event; so an error that matches [ErrOutcomeUnknown], if it is not fn's own, says that fn did not run.
func (k *Locker) Do(ctx context.Context, key string, fn func(context.Context, *Lease) error, opts ...Option) error {
	return k.do(ctx, key, true, fn, opts)
}

// checkedAcquire turns bad arguments away before anything is sent.
func (k *Locker) checkedAcquire(ctx context.Context, key string, waiting bool, opts []Option) (*Lease, error) {
	if ctx == nil {
		return nil, &opError{"acquire", key, errNilContext}
	}
	if key == "" {
		return nil, &opError{"acquire", key, errors.New("the key is empty")}
	}
	c, err := k.config.with(opts)
	if err != nil {
		return nil, &opError{"acquire", key, err}
	}
	if c.fencing {
		if err := fenceable(c.prefix + key); err != nil {
			return nil, &opError{"acquire", key, err}
		}
	}
	return k.acquire(ctx, key, c, waiting)
}

func (k *Locker) do(ctx context.Context, key string, waiting bool, fn func(context.Context, *Lease) error, opts []Option) error {
	if fn == nil {
		return &opError{"do", key, errors.New("the function is nil")}
	}
	lease, err := k.checkedAcquire(ctx, key, waiting, opts)
	if err != nil {
		return err
	}
	var lost error
	var over time.Duration
	err = func() error {
		defer func() { over, lost = lease.doneWith() }()
		return fn(lease.Context(), lease)
	}()
	switch {
	case lost == nil:
		return err
	case err == nil:
		err = lost
	case !errors.Is(err, lost): // a function does well to return the loss
		err = errors.Join(err, lost)
	}
	if over > 0 {
		err = fmt.Errorf("%w; the function returned %v after the end of trust", err, over)
	}
	return err
}

// doneWith releases a lease that its function has returned from. It returns an error unless the lease was held up to
// then, and by how much the function overran the end of trust.
func (l *Lease) doneWith() (over time.Duration, lost error) {
	lost = l.Err()
	returned := l.now()
	l.mu.Lock()
	asked := l.resulted
	l.mu.Unlock()
	if !asked { // the function may have released it, and never is a second release sent on its behalf
		if result := l.release(); lost == nil && result.lost != nil {
			lost = result.lost
		}
	}
	if errors.Is(lost, ErrLost) {
		l.mu.Lock()
		defer l.mu.Unlock()
		over = returned - l.schedule.end()
	}
	return over, lost
}
