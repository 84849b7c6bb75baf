package faults_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// A server that answers with errors. Each of these states is a real one, but for LOADING, which a server is in for too
// short a time: there a proxy answers.

// refusal puts a server into a state in which it refuses renewals, and out of it.
type refusal struct {
	code  string
	begin func(r *round, s *redistest.Server, p *faultproxy.Proxy)
	end   func(r *round, s *redistest.Server, p *faultproxy.Proxy)
}

// commands sends commands that must succeed.
func commands(all ...[]string) func(*round, *redistest.Server, *faultproxy.Proxy) {
	return func(r *round, s *redistest.Server, _ *faultproxy.Proxy) {
		r.Helper()
		for _, args := range all {
			_, err := s.Do(args...)
			require.NoError(r, err, args)
		}
	}
}

// Port 1 of this machine serves no Redis.
var toReplica, toMaster = []string{"REPLICAOF", "127.0.0.1", "1"}, []string{"REPLICAOF", "NO", "ONE"}

var refusals = []refusal{
	{"READONLY", commands(toReplica), commands(toMaster)},
	{"MASTERDOWN", commands([]string{"CONFIG", "SET", "replica-serve-stale-data", "no"}, toReplica), commands(toMaster)},
	{"NOREPLICAS", commands([]string{"CONFIG", "SET", "min-replicas-to-write", "1"}),
		commands([]string{"CONFIG", "SET", "min-replicas-to-write", "0"})},
	{"NOPERM", commands([]string{"ACL", "SETUSER", "default", "-eval"}), commands([]string{"ACL", "SETUSER", "default", "+eval"})},
	{"MISCONF", failToSave, commands([]string{"CONFIG", "SET", "save", ""})},
	{"BUSY", runForEver, commands([]string{"SCRIPT", "KILL"})},
	{"LOADING", func(_ *round, _ *redistest.Server, p *faultproxy.Proxy) {
		p.On(faultproxy.Any()).Do(faultproxy.AnswerError("LOADING Redis is loading the dataset in memory"))
	}, func(_ *round, _ *redistest.Server, p *faultproxy.Proxy) { p.Clear() }},
}

// dump is where a server saves its data.
const dump = "data.rdb"

// failToSave has the server try to save its data to a file that is a directory.
func failToSave(r *round, s *redistest.Server, _ *faultproxy.Proxy) {
	r.Helper()
	reply, err := s.Do("CONFIG", "GET", "dir")
	require.NoError(r, err)
	require.NoError(r, os.MkdirAll(filepath.Join(reply.([]any)[1].(string), dump, "x"), 0o700))
	commands([]string{"CONFIG", "SET", "save", "3600 100000"}, []string{"BGSAVE"})(r, s, nil)
	require.Eventually(r, func() bool {
		_, err := s.Do("SET", "probe", "x")
		return err != nil
	}, patience, time.Millisecond)
}

// runForEver has a script keep the server busy.
func runForEver(r *round, s *redistest.Server, _ *faultproxy.Proxy) {
	r.Helper()
	commands([]string{"CONFIG", "SET", "lua-time-limit", "10"})(r, s, nil)
	e := single(s.Addr())
	e.Quick = true
	client := r.operator(e)
	go func() { _ = client.Eval(context.Background(), "while true do end", nil).Err() }()
	require.Eventually(r, func() bool {
		_, err := s.Do("GET", "probe")
		return err != nil
	}, patience, time.Millisecond)
}

func eachRefusal(t *testing.T, fault func(r *round, f refusal)) {
	for _, f := range refusals {
		t.Run(f.code, func(t *testing.T) {
			rounds(t, func(r *round) { fault(r, f) })
		})
	}
}

// startRefusing is begin for a server that a proxy can speak for.
func (r *round) startRefusing(f refusal) (*redistest.Server, *faultproxy.Proxy, *child, *observer) {
	r.Helper()
	s := redistest.Start(r, "--dbfilename", dump)
	p := faultproxy.Start(r, s.Addr())
	c := r.hold(single(p.Addr()))
	o := r.observe(c, single(s.Addr()))
	c.steady()
	f.begin(r, s, p)
	return s, p, c, o
}

// refused checks that the child met the error.
func (c *child) refused(code string) {
	c.r.Helper()
	n := 0
	for _, rec := range c.said("unrenewed", "") {
		require.Contains(c.r, rec.Err, code)
		n++
	}
	require.Positive(c.r, n, "the server refused nothing")
}

// endedBecause checks that the losses carry Redis' error.
func (c *child) endedBecause(code string) {
	c.r.Helper()
	for _, rec := range c.said("ended", "") {
		late := c.lateness(c.confirmed(rec.Key), rec.At)
		if !strings.Contains(rec.Err, code) && late > c.TTL/20 {
			c.r.inconclusive(rec.Key, late) // it may not have been refused even once
			continue
		}
		require.Contains(c.r, rec.Err, code)
	}
}

// A server that refuses for half a TTL costs nothing: renewals are repeated while trust lasts.
func TestAServerRefusesForHalfATTL(t *testing.T) {
	eachRefusal(t, func(r *round, f refusal) {
		s, p, c, _ := r.startRefusing(f)
		time.Sleep(ttl / 2)
		f.end(r, s, p)
		c.outlast()
		c.kept()
		c.refused(f.code)
	})
}

// A server that refuses for longer costs the lease at the end of its trust and not before: that it refuses is no proof
// that the key is gone. The loss carries Redis' error.
func TestAServerRefusesForLongerThanTrustLasts(t *testing.T) {
	eachRefusal(t, func(r *round, f refusal) {
		s, p, c, o := r.startRefusing(f)
		c.await("ended", 1)
		f.end(r, s, p)
		o.inTime(c, "unconfirmed")
		c.refused(f.code)
		c.endedBecause(f.code)
	})
}
