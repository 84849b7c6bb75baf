package faults_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/redistest"
)

// A child is this test binary, run again with a job in its environment: a process that holds leases and can be stopped
// and killed. It says what happens as lines of JSON on its standard output, and is told what to do on its standard
// input.

const envJob = "REDISLEASE_FAULTS_JOB"

// job is what a child is told to do.
type job struct {
	Does    string // hold, write or churn
	Name    string // in the journal
	Server  endpoint
	Prefix  string
	Keys    []string
	TTL     time.Duration
	Wait    bool // Acquire instead of TryAcquire
	Fencing bool
	Journal string // write, churn: a file that all children append to
}

// record is what a child says. Times are of the wall clock, which all processes of one machine share.
type record struct {
	What   string // acquired, failed, renewed, unrenewed, ended, released, late
	At     time.Time
	Key    string        `json:",omitempty"`
	Token  string        `json:",omitempty"` // acquired
	Fence  int64         `json:",omitempty"` // acquired, renewed, ended, released
	Until  time.Time     `json:",omitzero"`  // ended
	Reason string        `json:",omitempty"` // failed, ended, released: see reasonOf
	Err    string        `json:",omitempty"`
	Late   time.Duration `json:",omitempty"` // late
}

// reasons are the errors that records tell apart.
var reasons = map[string]error{
	"taken": redislease.ErrTaken, "gone": redislease.ErrGone, "unconfirmed": redislease.ErrUnconfirmed,
	"cap": redislease.ErrMaxHold, "released": redislease.ErrReleased, "held": redislease.ErrNotAcquired,
	"unknown": redislease.ErrOutcomeUnknown,
}

// reasonOf names the library's error that err matches, or returns "other"; "" for nil. An error must not match two.
func reasonOf(err error) string {
	if err == nil {
		return ""
	}
	found := ""
	for name, target := range reasons {
		if errors.Is(err, target) {
			found += name
		}
	}
	if found == "" {
		return "other"
	}
	return found
}

// holder is a child at work.
type holder struct {
	job
	mu      sync.Mutex
	out     *json.Encoder
	journal *os.File
}

func runChild(text string) {
	h := &holder{out: json.NewEncoder(os.Stdout)}
	if err := json.Unmarshal([]byte(text), &h.job); err != nil {
		panic(err)
	}
	if h.Journal != "" {
		var err error
		if h.journal, err = os.OpenFile(h.Journal, os.O_APPEND|os.O_WRONLY, 0); err != nil {
			panic(err)
		}
	}
	machine := new(lateness)
	machine.start()
	go h.tellLateness(machine)

	release := make(chan struct{})
	var wg sync.WaitGroup
	for i, key := range h.Keys {
		wg.Go(func() {
			switch h.Does {
			case "hold":
				h.hold(key, release)
			case "write":
				h.write(key, paces[i%len(paces)])
			case "churn":
				h.churn(key, release)
			}
		})
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "release":
			close(release)
		case "finish":
			wg.Wait()
			h.say(record{What: "finished"})
		}
	}
}

func (h *holder) say(r record) {
	r.At = time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	_ = h.out.Encode(r)
}

func (h *holder) tellLateness(machine *lateness) {
	for {
		time.Sleep(controlPeriod)
		machine.mu.Lock()
		samples := machine.samples
		machine.samples = nil
		machine.mu.Unlock()
		for _, s := range samples {
			h.say(record{What: "late", Until: s.due, Late: s.late})
		}
	}
}

func (h *holder) locker(client redislease.RedisClient) *redislease.Locker {
	opts := []redislease.LockerOption{redislease.WithTTL(h.TTL), redislease.WithPrefix(h.Prefix), redislease.WithObserver(h.observe)}
	if h.Fencing {
		opts = append(opts, redislease.WithFencing())
	}
	k, err := redislease.New(client, opts...)
	if err != nil {
		panic(err)
	}
	return k
}

func (h *holder) observe(_ context.Context, e redislease.Event) {
	switch e.Kind {
	case redislease.EventRenewed:
		h.say(record{What: "renewed", Key: e.Key, Fence: e.Fence})
	case redislease.EventRenewFailed:
		h.say(record{What: "unrenewed", Key: e.Key, Err: e.Err.Error()})
	}
}

// acquire returns nil if it failed, and has said why.
func (h *holder) acquire(k *redislease.Locker, key string) *redislease.Lease {
	verb := k.TryAcquire
	if h.Wait {
		verb = k.Acquire
	}
	l, err := verb(context.Background(), key)
	if err != nil {
		h.say(record{What: "failed", Key: key, Reason: reasonOf(err), Err: err.Error()})
		return nil
	}
	h.say(record{What: "acquired", Key: key, Token: l.Token(), Fence: l.Fence()})
	return l
}

// hold believes in a lease for as long as its context has not ended, and asks for nothing: the library's own watchdog
// has to end it. Belief is over when Err says so, too.
func (h *holder) hold(key string, release <-chan struct{}) {
	l := h.acquire(h.locker(h.Server.connect()), key)
	if l == nil {
		return
	}
	select {
	case <-l.Context().Done():
		for l.Err() == nil {
		}
		err := l.Err()
		h.say(record{What: "ended", Key: key, Fence: l.Fence(), Until: l.Until(), Reason: reasonOf(err), Err: err.Error()})
		<-release
	case <-release:
	}
	err := l.Release()
	h.say(record{What: "released", Key: key, Fence: l.Fence(), Reason: reasonOf(err), Err: text(err)})
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// paces are how writers spend the time between a check and its write, and between two writes: one keeps its processor
// busy, one sleeps, and one is slow to write, so that a stop often falls into the gap between check and write.
var paces = []struct{ gap, rest func() }{
	{func() {}, func() {
		for start := time.Now(); time.Since(start) < 200*time.Microsecond; {
		}
	}},
	{func() {}, func() { time.Sleep(200 * time.Microsecond) }},
	{func() { time.Sleep(20 * time.Millisecond) }, func() {}},
}

// write writes to the journal under a lease, and asks Err before each write. It notes when it began to ask and when it
// had its answer, so that a stop between the check and the write can be told from a wrong answer.
func (h *holder) write(key string, pace struct{ gap, rest func() }) {
	l := h.acquire(h.locker(h.Server.connect()), key)
	if l == nil {
		return
	}
	h.note("begin", key, time.Now(), time.Now())
	for {
		before := time.Now()
		err := l.Err()
		after := time.Now()
		if err != nil {
			h.say(record{What: "ended", Key: key, Until: l.Until(), Reason: reasonOf(err), Err: err.Error()})
			return
		}
		pace.gap()
		h.note("write", key, before, after)
		pace.rest()
	}
}

// note appends one line to the journal with one write.
func (h *holder) note(what, key string, before, after time.Time) {
	_, err := fmt.Fprintf(h.journal, "%s %s %s %d %d\n", h.Name, what, key, before.UnixNano(), after.UnixNano())
	if err != nil {
		panic(err)
	}
}

// churn acquires, renews and releases over and over, and notes from when to when it believed that it held the key. It
// says what else than success it met, a busy key excepted.
func (h *holder) churn(key string, stop <-chan struct{}) {
	k := h.locker(h.Server.connect())
	var n atomic.Int64
	for {
		select {
		case <-stop:
			h.say(record{What: "churned", Key: key, Late: time.Duration(n.Load())})
			return
		default:
		}
		l, err := k.TryAcquire(context.Background(), key)
		if err != nil {
			if !errors.Is(err, redislease.ErrNotAcquired) {
				h.say(record{What: "failed", Key: key, Reason: reasonOf(err), Err: err.Error()})
			}
			time.Sleep(time.Millisecond)
			continue
		}
		from := time.Now()
		if n.Add(1) == 1 {
			h.say(record{What: "acquired", Key: key, Token: l.Token()})
		}
		if err := l.Renew(context.Background()); err != nil {
			h.say(record{What: "unrenewed", Key: key, Reason: reasonOf(err), Err: err.Error()})
		}
		time.Sleep(rand.N(2 * time.Millisecond))
		if to := time.Now(); l.Err() == nil { // then it was held up to now at least
			h.note("held", key, from, to)
		}
		if err := l.Release(); err != nil {
			h.say(record{What: "unreleased", Key: key, Reason: reasonOf(err), Err: err.Error()})
		}
	}
}

// connect returns a client with go-redis' defaults, unless it is to be quick.
func (e endpoint) connect() redis.UniversalClient {
	o := &redis.UniversalOptions{Addrs: e.Addrs, Username: e.Username, Password: e.Password}
	if e.CA != nil {
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(e.CA)
		o.TLSConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	if e.Quick {
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 250*time.Millisecond, 250*time.Millisecond, 250*time.Millisecond
		o.DialerRetries, o.MaxRetries = 1, -1
	}
	switch e.Kind {
	case "sentinel":
		o.MasterName = redistest.MasterName
	case "cluster":
		c := o.Cluster()
		if e.Quick { // by itself go-redis looks for the nodes every ten seconds, and nobody tells it to look
			c.ClusterStateReloadInterval = interval
		}
		return redis.NewClusterClient(c)
	}
	return redis.NewUniversalClient(o)
}
