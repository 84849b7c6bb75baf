package faults_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

const (
	// ttl is that of all leases unless a test says otherwise. The other two follow from it by the library's defaults.
	ttl      = 2 * time.Second
	margin   = ttl / 10
	interval = ttl / 3

	// leases is how many a child holds, each on a client of its own.
	leases = 6

	// patience is how long a test waits for what has to happen. It is no assertion about speed.
	patience = 30 * time.Second

	// sideBySide is how many tests run at once. They wait most of the time, even on two processors.
	sideBySide = 4

	// mostTries is how often a round is run that this machine's own lateness spoils.
	mostTries = 5
)

var roundsFlag = flag.Int("faults.rounds", 1, "how often each test repeats its fault")

// silent keeps go-redis from writing about every connection that a test breaks.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

func TestMain(m *testing.M) {
	redis.SetLogger(silent{})
	if text := os.Getenv(envJob); text != "" {
		runChild(text)
		return
	}
	flag.Parse()
	explicit := false
	flag.Visit(func(f *flag.Flag) { explicit = explicit || f.Name == "test.parallel" })
	if !explicit {
		_ = flag.Set("test.parallel", fmt.Sprint(sideBySide))
	}
	code := m.Run()
	if testing.Verbose() {
		fmt.Println(total.String())
	}
	os.Exit(code)
}

// round is one run of a fault, which may have to be repeated.
type round struct {
	*testing.T
	machine *lateness
	spoiled int // leases whose figures say more about this machine than about the library
}

// rounds runs a fault as often as asked for. A round that was spoiled proves nothing, and is run again.
func rounds(t *testing.T, fault func(r *round)) {
	t.Parallel()
	for n := range *roundsFlag {
		for try := 1; ; try++ {
			spoiled := 0
			ok := t.Run(fmt.Sprintf("round %d try %d", n+1, try), func(t *testing.T) {
				r := &round{T: t, machine: watchLateness(t)}
				defer func() { spoiled = r.spoiled }()
				fault(r)
			})
			if !ok || spoiled == 0 {
				break
			}
			if try == mostTries {
				t.Fatalf("this machine's timers were too late in %d rounds in a row: nothing is proved", mostTries)
			}
		}
	}
}

// lateness watches how late this machine's timers are, beside what is measured.
type lateness struct {
	mu      sync.Mutex
	samples []sample
}

type sample struct {
	due  time.Time
	late time.Duration
}

const controlPeriod = 5 * time.Millisecond

func watchLateness(t *testing.T) *lateness {
	l := new(lateness)
	stop := l.start()
	t.Cleanup(stop)
	return l
}

// start begins to watch, and returns how to stop it.
func (l *lateness) start() (stop func()) {
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			due := time.Now().Add(controlPeriod)
			select {
			case <-end:
				return
			case <-time.After(time.Until(due)):
			}
			l.add(sample{due, time.Since(due)})
		}
	}()
	return func() { close(end); <-done }
}

// add keeps what was late enough to matter.
func (l *lateness) add(s sample) {
	if s.late < controlPeriod {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.samples = append(l.samples, s)
}

// worst returns how late a timer was that was due in the given time.
func (l *lateness) worst(from, to time.Time) (worst time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.samples {
		if s.due.Add(s.late).After(from) && s.due.Before(to) {
			worst = max(worst, s.late)
		}
	}
	return worst
}

// endpoint is where a Redis is, in a form that a child can be told.
type endpoint struct {
	Kind     string // single, sentinel or cluster
	Addrs    []string
	Username string
	Password string
	CA       []byte // it speaks TLS, and this signs its certificate
	Quick    bool   // clients give up early and repeat nothing
}

func single(addr string) endpoint { return endpoint{Kind: "single", Addrs: []string{addr}} }

// operator returns a client of the test's own.
func (r *round) operator(e endpoint) redis.UniversalClient {
	client := e.connect()
	r.Cleanup(func() { _ = client.Close() })
	return client
}

func (r *round) run(client redis.UniversalClient, args ...any) {
	r.Helper()
	require.NoError(r, client.Do(context.Background(), args...).Err(), "%v", args)
}
