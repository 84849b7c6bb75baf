package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"
)

// errHeld is what tryAcquire returns if another holds the key.
var errHeld = errors.New("held by another")

// settings is what an adapter opens a client with.
type settings struct {
	addr       string
	ttl        time.Duration // of every lease
	renewEvery time.Duration // for those that renew
}

// client is one library in one process. It is safe for concurrent use.
type client interface {
	// tryAcquire does not wait.
	tryAcquire(ctx context.Context, key string) (handle, error)
	// acquire waits until it has the key or ctx ends. ctx is only ever cancelled: it has no deadline, to which some
	// libraries would shorten the lease.
	acquire(ctx context.Context, key string) (handle, error)
	close() error
}

// handle is a lease that is held.
type handle interface {
	release(ctx context.Context) error
}

// A handle may also be a renewer, if it does not renew itself, and a validator, if it can tell whether it is still held.
type (
	renewer interface {
		renew(ctx context.Context) error
	}
	validator interface{ valid() bool }
)

// adapter is one library with one setting.
type adapter struct {
	name string
	note string // what the setting is
	in   string // the scenarios it takes part in
	open func(settings) (client, error)
}

// reference is the adapter that the others are compared with, by scenario.
var reference = map[string]string{uncontended: "raw", contended: "raw-try", live: "raw-sched", hang: "redislease"}

// adapters returns all of them in the order of the tables. A name with #2 is the reference once more.
func adapters() []adapter {
	return []adapter{
		{"raw", "SET NX PX and EVALSHA of a compare-and-DEL, on the caller's goroutine", uncontended, openRaw(direct)},
		{"raw#2", "raw once more", uncontended, openRaw(direct)},
		{"raw-hop", "raw, each command on a goroutine of its own, so that a call can be left behind", uncontended, openRaw(hopping)},
		{"raw-ap", "raw through AutoPipeline", uncontended, openRaw(autoPipelined)},
		{"raw-ap2", "raw through AutoPipeline, two batches at a time", uncontended, openRaw(inTwoBatches)},
		{"raw-try", "a line per process, whose head tries after each published release", contended, openTry},
		{"raw-try#2", "raw-try once more", contended, openTry},
		{"raw-grant", "a line in Redis; the release script hands the key to the next", contended, openGrant},
		{"raw-sched", "one goroutine renews everything, by pipelines of up to 500", live, openSched},
		{"raw-sched#2", "raw-sched once more", live, openSched},
		{"redislease", "defaults", everything, openLease(direct)},
		{"redislease-ap", "defaults, on a go-redis AutoPipeline", everything, openLease(autoPipelined)},
		{"redislease-ap2", "defaults, on a go-redis AutoPipeline with two batches at a time", uncontended, openLease(inTwoBatches)},
		{"redislock", "LinearBackoff(100ms), as its README shows; by default it does not wait", everything, openRedislock(100 * time.Millisecond)},
		{"redislock-5ms", "LinearBackoff(5ms)", contended, openRedislock(tunedPoll)},
		{"redsync", "one node, defaults: 32 tries, 50-250 ms apart, and again", everything, openRedsync()},
		{"redsync-5ms", "one node, tries 2.5-7.5 ms apart", contended, openRedsync(fastTries()...)},
		{"rueidislock", "KeyMajority 1, defaults", uncontended + contended, openRueidislock(false)},
		{"rueidislock-tuned", "KeyMajority 1, NoLoopTracking, TryNextAfter 1s", everything, openRueidislock(true)},
	}
}

// pick returns the adapters of a scenario with names that match one of the globs, and the reference.
func pick(scenario, globs string) (picked []adapter) {
	for _, a := range adapters() {
		if strings.Contains(a.in, scenario) && (a.name == reference[scenario] || matches(a.name, globs)) {
			picked = append(picked, a)
		}
	}
	return picked
}

// matches: name matches one of the globs, which commas separate. All match none at all.
func matches(name, globs string) bool {
	if globs == "" {
		return true
	}
	for glob := range strings.SplitSeq(globs, ",") {
		if ok, err := path.Match(glob, name); err == nil && ok {
			return true
		}
	}
	return false
}

func adapterNamed(name string) (adapter, error) {
	for _, a := range adapters() {
		if a.name == name {
			return a, nil
		}
	}
	return adapter{}, fmt.Errorf("no adapter %q", name)
}
