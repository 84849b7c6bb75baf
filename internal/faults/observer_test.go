package faults_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease/internal/redistest"
)

// child is a holder as the test sees it.
type child struct {
	job
	*redistest.Process
	r  *round
	in *os.File

	mu      sync.Mutex
	records []record
	changed chan struct{} // closed and replaced when there is a record more
}

// start starts a child and does not wait for anything.
func (r *round) start(j job) *child {
	r.Helper()
	text, err := json.Marshal(j)
	require.NoError(r, err)
	self, err := os.Executable()
	require.NoError(r, err)
	outR, outW, err := os.Pipe()
	require.NoError(r, err)
	inR, inW, err := os.Pipe()
	require.NoError(r, err)
	stderr, err := os.CreateTemp(r.TempDir(), "stderr")
	require.NoError(r, err)

	c := &child{job: j, r: r, in: inW, changed: make(chan struct{})}
	read := make(chan struct{})
	r.Cleanup(func() { // after the process is killed
		<-read
		_ = inW.Close()
		text, _ := os.ReadFile(stderr.Name())
		require.Empty(r, string(text), "standard error of a child")
		_ = stderr.Close()
	})
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), envJob+"="+string(text))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = inR, outW, stderr
	c.Process = redistest.StartProcess(r, cmd)
	_, _ = outW.Close(), inR.Close()
	go func() {
		defer close(read)
		defer func() { _ = outR.Close() }()
		c.listen(bufio.NewScanner(outR))
	}()
	return c
}

// hold starts a child that holds leases, and returns when it has them all.
func (r *round) hold(e endpoint, change ...func(*job)) *child {
	r.Helper()
	j := job{Does: "hold", Name: "holder", Server: e, TTL: ttl, Wait: true}
	for i := range leases {
		j.Keys = append(j.Keys, fmt.Sprintf("{orders}:%d", i)) // in one slot
	}
	for _, f := range change {
		f(&j)
	}
	c := r.start(j)
	c.await("acquired", 1)
	return c
}

func (c *child) listen(lines *bufio.Scanner) {
	for lines.Scan() {
		var rec record
		if json.Unmarshal(lines.Bytes(), &rec) != nil {
			continue // a last line that was cut by a kill
		}
		c.mu.Lock()
		c.records = append(c.records, rec)
		close(c.changed)
		c.changed = make(chan struct{})
		c.mu.Unlock()
	}
}

// tell writes one line to the child: release, or finish.
func (c *child) tell(what string) {
	c.r.Helper()
	_, err := fmt.Fprintln(c.in, what)
	require.NoError(c.r, err)
}

// said returns the records of a kind so far, of one key or, with "", of all.
func (c *child) said(what, key string) (found []record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rec := range c.records {
		if rec.What == what && (key == "" || rec.Key == key) {
			found = append(found, rec)
		}
	}
	return found
}

// await waits until the child has said something n times of each of its keys.
func (c *child) await(what string, n int) {
	c.r.Helper()
	c.awaitThat(fmt.Sprintf("each lease %s", what), func() bool {
		for _, key := range c.Keys {
			if len(c.said(what, key)) < n {
				return false
			}
		}
		return true
	})
}

func (c *child) awaitThat(what string, done func() bool) {
	c.r.Helper()
	timeout := time.After(patience)
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		if done() {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			require.FailNow(c.r, "waited in vain for: "+what, "the child says: %v", c.summary())
		}
	}
}

// awaitRenewal waits until each lease has been renewed once more.
func (c *child) awaitRenewal() {
	c.r.Helper()
	before := map[string]int{}
	for _, key := range c.Keys {
		before[key] = len(c.said("renewed", key))
	}
	c.awaitThat("a renewal of each lease", func() bool {
		for _, key := range c.Keys {
			if len(c.said("renewed", key)) <= before[key] && len(c.said("ended", key)) == 0 {
				return false
			}
		}
		return true
	})
}

func (c *child) summary() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	for _, rec := range c.records {
		if rec.What != "late" {
			fmt.Fprintf(&b, "\n%s %s %s %s %s", rec.At.Format("05.000"), rec.What, rec.Key, rec.Reason, rec.Err)
		}
	}
	return b.String()
}

// lost returns the keys of the leases that have ended by themselves.
func (c *child) lost() (keys []string) {
	for _, key := range c.Keys {
		if len(c.said("ended", key)) > 0 {
			keys = append(keys, key)
		}
	}
	return keys
}

// kept checks that no lease was lost, and that all can be released.
func (c *child) kept() {
	c.r.Helper()
	lost := c.lostToLateness()
	c.tell("release")
	c.await("released", 1)
	for _, rec := range c.said("released", "") {
		if !slices.Contains(lost, rec.Key) {
			require.Contains(c.r, []string{"", "unknown"}, rec.Reason, rec.Err) // its connection may have been lost
		}
	}
	total.add(func(t *totals) { t.kept += len(c.Keys) - len(lost) })
}

// lostToLateness returns the keys of the leases that have ended because this machine was late. No lease may have ended for
// another reason.
func (c *child) lostToLateness() (keys []string) {
	c.r.Helper()
	for _, key := range c.lost() {
		late := c.lateness(c.confirmed(key), c.said("ended", key)[0].At)
		require.Greater(c.r, late, c.TTL/20, "%s was lost: %s", key, c.summary())
		c.r.inconclusive(key, late)
		keys = append(keys, key)
	}
	return keys
}

// steady returns when each lease has been renewed once more. If the machine was too late for that nothing can be
// proved, and the round is over.
func (c *child) steady() {
	c.r.Helper()
	c.awaitRenewal()
	if len(c.lostToLateness()) > 0 {
		c.r.SkipNow()
	}
}

// inconclusive takes note of a lease about which nothing is proved.
func (r *round) inconclusive(key string, late time.Duration) {
	r.Helper()
	r.Logf("%s: inconclusive, this machine's timers were %v late", key, late)
	r.spoiled++
	total.add(func(t *totals) { t.spoiled++ })
}

// next is what a key holds for the next holder.
const next = "next"

// observer is another contender for the keys, and keeps asking Redis who has them. It is not the holder: another
// process, with connections of its own.
type observer struct {
	r      *round
	client redis.UniversalClient
	keys   []string
	takes  bool
	taken  map[string]bool // what the next holder has been seen to have; it takes none twice, so that a loss shows

	mu        sync.Mutex
	sightings map[string][]sighting
}

// sighting is what an observer has seen of a key, at some moment between sent and got.
type sighting struct {
	sent, got time.Time
	value     string
	pttl      time.Duration
}

const observePeriod = 4 * time.Millisecond

// observe watches the keys of a child, and takes each as soon as it is free.
func (r *round) observe(c *child, e endpoint) *observer { return r.observer(c, e, true) }

// watch watches the keys of a child, and takes none.
func (r *round) watch(c *child, e endpoint) *observer { return r.observer(c, e, false) }

func (r *round) observer(c *child, e endpoint, takes bool) *observer {
	e.Quick = true
	o := &observer{r: r, client: r.operator(e), takes: takes, taken: map[string]bool{}, sightings: map[string][]sighting{}}
	for _, key := range c.Keys {
		o.keys = append(o.keys, c.Prefix+key)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	r.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			o.look(ctx)
			time.Sleep(observePeriod)
		}
	}()
	for _, key := range o.keys {
		o.awaitThat("the first sighting of "+key, func() bool { return len(o.seen(key)) > 0 })
	}
	return o
}

// look asks for all keys at once.
func (o *observer) look(ctx context.Context) {
	type answers struct {
		get *redis.StringCmd
		ttl *redis.DurationCmd
	}
	all := make([]answers, len(o.keys))
	sent := time.Now()
	_, err := o.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range o.keys {
			if o.takes && !o.taken[key] {
				p.SetNX(ctx, key, next, time.Minute)
			}
			all[i] = answers{p.Get(ctx, key), p.PTTL(ctx, key)}
		}
		return nil
	})
	got := time.Now()
	// A command keeps no error if go-redis found no connection for its pipeline.
	if reply := redis.Error(nil); err != nil && !errors.As(err, &reply) {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, a := range all {
		value, err := a.get.Result()
		if err != nil && !errors.Is(err, redis.Nil) || a.ttl.Err() != nil {
			continue
		}
		key := o.keys[i]
		o.sightings[key] = append(o.sightings[key], sighting{sent, got, value, a.ttl.Val()})
		o.taken[key] = o.taken[key] || value == next
	}
}

func (o *observer) seen(key string) []sighting {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.sightings[key])
}

func (o *observer) awaitThat(what string, done func() bool) {
	o.r.Helper()
	require.Eventually(o.r, done, patience, 2*time.Millisecond, what)
}

// last returns what was seen of a key last, "" if it is absent.
func (o *observer) last(key string) string {
	seen := o.seen(key)
	return seen[len(seen)-1].value
}

// awaitTaken waits until the next holder has all keys that the child has lost.
func (o *observer) awaitTaken(c *child) {
	o.r.Helper()
	for _, key := range c.lost() {
		o.awaitThat("the next holder of "+key, func() bool { return o.last(c.Prefix+key) == next })
	}
}

// undisturbed checks that the next holder's keys stay as they are: from the first sighting on no other value, and no
// TTL but the one that runs down.
func (o *observer) undisturbed(c *child) {
	o.r.Helper()
	time.Sleep(10 * observePeriod)
	for _, key := range c.lost() {
		var first *sighting
		for _, s := range o.seen(c.Prefix + key) {
			if s.value == next && first == nil {
				first = &s
			}
			if first == nil {
				continue
			}
			require.Equal(o.r, next, s.value, "%s was overwritten or deleted", key)
			// The end that a sighting tells of is as uncertain as its moment, which a client that looks for another node
			// does not tell for many seconds.
			const slack = time.Second
			changed := s.got.Add(s.pttl+slack).Before(first.sent.Add(first.pttl)) || first.got.Add(first.pttl+slack).Before(s.sent.Add(s.pttl))
			require.False(o.r, changed, "the TTL of %s was changed: first %+v, then %+v", key, *first, s)
		}
		require.NotNil(o.r, first, "%s was never taken", key)
	}
}

// figure is what was measured of one lease. Times are positive where the library is wrong.
type figure struct {
	key     string
	end     record        // that says so
	couldGo time.Time     // from then on the key could certainly be another's
	stale   time.Duration // how long it was believed after that: at least,
	most    time.Duration // and at most
	overlap time.Duration // how long it was believed after the next holder certainly had the key
	early   time.Duration // how much of the TTL since the last confirmation was left then; 0: the machine was late
	late    time.Duration // the machine, in the time that counts
}

// measure compares what the holder believed with what the observer saw.
func (o *observer) measure(c *child) (figures []figure) {
	o.r.Helper()
	for _, key := range c.lost() {
		ends := c.said("ended", key)
		require.Len(o.r, ends, 1, "%s: a lease ends once; %s", key, c.summary())
		f := figure{key: key, end: ends[0], overlap: -time.Hour}
		token := c.said("acquired", key)[0].Token
		var last sighting // of the lease's own token
		var gone, taken time.Time
		for _, s := range o.seen(c.Prefix + key) {
			switch {
			case s.value == token:
				last, gone = s, time.Time{}
			case gone.IsZero():
				gone = s.got
			}
			if s.value == next && taken.IsZero() {
				taken = s.got
			}
		}
		require.False(o.r, last.got.IsZero(), "%s: the observer never saw the lease's token", key)
		require.False(o.r, gone.IsZero(), "%s: the observer never saw it go", key)
		if !taken.IsZero() {
			f.overlap = f.end.At.Sub(taken)
		}
		// It goes when its TTL has run down, counted from the last sighting or the last renewal, unless it is deleted.
		confirmed := c.confirmed(key)
		first := last.sent.Add(last.pttl)
		f.couldGo = later(last.got.Add(last.pttl+time.Millisecond), confirmed.Add(c.TTL)) // a key lives through its last ms
		if gone.Before(first) {
			first = last.sent
		}
		f.couldGo = earlier(f.couldGo, gone)
		f.stale, f.most = f.end.At.Sub(f.couldGo), f.end.At.Sub(first)
		f.late = c.lateness(earlier(f.end.Until, f.couldGo), f.end.At)
		if c.lateness(confirmed.Add(-c.TTL/3), confirmed) <= c.TTL/20 {
			f.early = confirmed.Add(c.TTL).Sub(f.end.At)
		}
		figures = append(figures, f)
	}
	return figures
}

// confirmed returns when the child last said that a lease was renewed, or acquired.
func (c *child) confirmed(key string) (at time.Time) {
	for _, rec := range append(c.said("acquired", key), c.said("renewed", key)...) {
		at = rec.At
	}
	return at
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// lateness returns how late the timers of the child, or those of the test beside it, were in a time.
func (c *child) lateness(from, to time.Time) time.Duration {
	worst := c.r.machine.worst(from, to)
	for _, rec := range c.said("late", "") {
		if rec.Until.Add(rec.Late).After(from) && rec.Until.Before(to) {
			worst = max(worst, rec.Late)
		}
	}
	return worst
}

// conclusive reports whether something can be said about a lease, and takes note if not. What is right at most is
// right however late the machine was, and what is wrong at least may have gone through several goroutines.
func (o *observer) conclusive(c *child, f figure, limit time.Duration) bool {
	o.r.Helper()
	late := c.TTL / 20 // half of the margin
	if f.stale > limit {
		late /= 2
	}
	if f.most <= limit || f.late <= late {
		return true
	}
	o.r.inconclusive(f.key, f.late)
	return false
}

// inTime checks the promise: every belief has ended for one of the reasons, before the key could be another's, and not
// before its trust had ended; and the next holder is left alone.
func (o *observer) inTime(c *child, reasons ...string) {
	o.r.Helper()
	o.awaitTaken(c)
	o.undisturbed(c)
	var spans []time.Duration
	for _, f := range o.measure(c) {
		require.Contains(o.r, reasons, f.end.Reason, "%s: %s", f.key, f.end.Err)
		if f.end.Reason == "unconfirmed" {
			require.False(o.r, f.end.At.Before(f.end.Until), "%s: ended before the end of trust", f.key)
			require.Less(o.r, f.early, c.TTL/10+c.TTL/3, "%s: trust ended a renewal too early", f.key)
		}
		if !o.conclusive(c, f, 0) {
			continue
		}
		require.LessOrEqual(o.r, f.stale, time.Duration(0), "%s was believed in after it could be another's", f.key)
		require.LessOrEqual(o.r, f.overlap, time.Duration(0), "%s was believed in while another had it", f.key)
		spans = append(spans, -f.stale)
		total.add(func(t *totals) { t.inTime++; t.stale = max(t.stale, f.stale); t.overlap = max(t.overlap, f.overlap) })
	}
	if len(spans) > 0 {
		o.r.Logf("%d leases ended %v to %v before the key could be another's", len(spans), slices.Min(spans), slices.Max(spans))
	}
}

// told checks what holds where Redis itself loses a key under its holder: the holder is told the reason within the
// given time, and the next holder is left alone.
func (o *observer) told(c *child, within time.Duration, reasons ...string) {
	o.r.Helper()
	o.awaitTaken(c)
	o.undisturbed(c)
	for _, f := range o.measure(c) {
		require.Contains(o.r, reasons, f.end.Reason, "%s: %s", f.key, f.end.Err)
		if !o.conclusive(c, f, within) {
			continue
		}
		require.LessOrEqual(o.r, f.stale, within, "%s: told too late", f.key)
		o.r.Logf("%s: told %v after Redis had lost the key; overlap %v", f.key, f.stale, f.overlap)
		total.add(func(t *totals) { t.told++; t.toldAfter = max(t.toldAfter, f.stale) })
	}
}

// totals are what all tests together have measured.
type totals struct {
	mu        sync.Mutex
	kept      int // leases that came through
	inTime    int // that ended in time
	told      int // whose key Redis lost
	spoiled   int
	stale     time.Duration // the greatest; negative: in time by that much
	overlap   time.Duration
	toldAfter time.Duration
	gaps      int // writes between whose check and landing the process was stopped
	writes    int // of stopped holders
}

var total = &totals{stale: -time.Hour, overlap: -time.Hour}

func (t *totals) add(f func(*totals)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(t)
}

func (t *totals) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintf("faults: %d leases kept, %d ended in time (stale belief %v, overlap %v), %d told that Redis lost the key (at most %v later), "+
		"%d inconclusive and run again; %d writes of stopped holders, %d in the gap between check and write",
		t.kept, t.inTime, max(t.stale, 0), max(t.overlap, 0), t.told, t.toldAfter, t.spoiled, t.writes, t.gaps)
}
