package sim

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/redislease/redislease"
)

const (
	ttlLeast = time.Second
	ttlMost  = 8 * time.Second
)

// The causes by which callers end their contexts.
var errOfCaller = errors.New("the caller has had enough")

// worker is a goroutine of a process that takes leases and works under them, in all the ways that the documentation
// allows.
type worker struct {
	w      *world
	p      *process
	locker *redislease.Locker
	place  uint64
}

func (k *worker) run() {
	for n := uint64(0); ; n++ {
		c := from(k.place, n)
		k.p.sleep(c.between(0, ttlMost))
		if k.w.healed(time.Now()) {
			return
		}
		k.acquire(c)
	}
}

// terms draws the options of an acquisition.
func (k *worker) terms(c *chance) (t terms, opts []redislease.Option) {
	t.ttl = c.between(ttlLeast, ttlMost).Truncate(time.Millisecond)
	t.margin, t.interval, t.maxHold, t.maxRenewals = t.ttl/10, t.ttl/3, time.Hour, -1
	opts = []redislease.Option{redislease.WithTTL(t.ttl)}
	add := func(p float64, o func() redislease.Option) {
		if c.hits(p) {
			opts = append(opts, o())
		}
	}
	add(0.2, func() redislease.Option { t.margin = t.ttl / 4; return redislease.WithMargin(t.margin) })
	add(0.2, func() redislease.Option { t.interval = t.ttl / 6; return redislease.WithRenewInterval(t.interval) })
	add(0.2, func() redislease.Option {
		t.maxHold = c.between(t.ttl/2, 4*t.ttl)
		return redislease.WithMaxHold(t.maxHold)
	})
	add(0.1, func() redislease.Option {
		t.maxRenewals = c.below(4)
		return redislease.WithMaxRenewals(t.maxRenewals)
	})
	add(0.3, func() redislease.Option {
		t.timeout = c.between(10*time.Millisecond, 3*t.ttl)
		return redislease.WithAcquireTimeout(t.timeout)
	})
	add(0.2, func() redislease.Option {
		d := c.between(0, time.Second)
		t.backoff = true
		return redislease.WithBackoff(func(int) time.Duration { return d })
	})
	add(0.5, func() redislease.Option { t.fencing = true; return redislease.WithFencing() })
	return t, opts
}

// context draws how long the caller's context lasts.
func (k *worker) context(c *chance, a *acquisition) (context.Context, func()) {
	ctx := context.WithValue(k.w.ctx, acquisitionKey{}, a)
	if c.hits(0.5) {
		return ctx, func() {}
	}
	causes := []error{context.DeadlineExceeded, context.Canceled, errOfCaller}
	d := c.between(0, 4*a.terms.ttl)
	if c.hits(0.1) {
		d = 0
	}
	a.ctxEnd = time.Now().Add(d)
	return k.p.ending(ctx, d, causes[c.below(len(causes))])
}

func (k *worker) acquire(c *chance) {
	a := &acquisition{p: k.p, key: k.w.keys[c.below(len(k.w.keys))]}
	var opts []redislease.Option
	a.terms, opts = k.terms(c)
	ctx, cancel := k.context(c, a)
	defer cancel()
	a.ctx = ctx
	verb := c.below(4)
	a.waiting = verb >= 2
	k.w.oracle.begin(a)
	given := a.key[len(prefix):]
	switch verb {
	case 0, 2:
		call := k.locker.TryAcquire
		if a.waiting {
			call = k.locker.Acquire
		}
		lease, err := call(ctx, given, opts...)
		k.p.gate()
		k.w.oracle.finish(a, lease, err)
		k.note(a, "acquire", err)
		if lease != nil {
			k.work(c, a)
			k.release(c, a)
		}
	default:
		k.do(ctx, c, a, given, opts)
	}
}

func (k *worker) do(ctx context.Context, c *chance, a *acquisition, given string, opts []redislease.Option) {
	call := k.locker.TryDo
	if a.waiting {
		call = k.locker.Do
	}
	var ran, alive, panicked bool
	var wanted error
	var err error
	returned := func() (returned bool) {
		defer func() { panicked = recover() != nil }()
		err = call(ctx, given, func(_ context.Context, l *redislease.Lease) error {
			ran = true
			k.p.gate()
			k.w.oracle.finish(a, l, nil)
			k.work(c, a)
			switch x := c.below(20); {
			case x == 0:
				wanted = errOfCaller
			case x == 1:
				k.release(c, a)
			case x == 2:
				k.w.oracle.releasing(a)
				panic("work")
			}
			if a.releases == 0 {
				k.w.oracle.releasing(a) // Do does it
			}
			alive = l.Err() == nil
			return wanted
		}, opts...)
		return true
	}()
	k.p.gate()
	if !ran {
		k.w.oracle.finish(a, nil, err)
	}
	k.note(a, "do", err)
	switch {
	case !returned && !panicked, !returned && !ran:
		k.w.oracle.violate(a, wrongDo, "it neither returned nor panicked")
	case !ran || panicked:
	case errors.Is(err, redislease.ErrOutcomeUnknown), errors.Is(err, redislease.ErrNotAcquired):
		k.w.oracle.violate(a, wrongDo, "%v, although the function ran", err)
	case wanted != nil && !errors.Is(err, wanted):
		k.w.oracle.violate(a, wrongDo, "%v instead of the function's error", err)
	case !alive && wanted != nil && !errors.Is(err, redislease.ErrLost) && !errors.Is(err, redislease.ErrReleased):
		k.w.oracle.violate(a, wrongDo, "%v, although the lease had ended", err)
	case err == nil && k.w.oracle.isLost(a):
		k.w.oracle.violate(a, wrongDo, "nil, although the lease was lost")
	case err == nil && !alive:
		k.w.oracle.violate(a, wrongDo, "nil, although the lease had ended")
	case err != nil && wanted == nil && !errors.Is(err, redislease.ErrLost) && !errors.Is(err, redislease.ErrReleased):
		k.w.oracle.violate(a, wrongDo, "%v", err)
	}
}

// work writes under a lease until it is done or lost, and now and then asks Redis, or has somebody else do something.
func (k *worker) work(c *chance, a *acquisition) {
	o := k.w.oracle
	steps := c.below(8)
	if c.hits(0.05) {
		steps = 100 // it hangs; a cap or the end of the world ends it
	}
	for range steps {
		k.p.sleep(c.between(0, a.terms.ttl))
		if !o.write(a) {
			return
		}
		k.send(c, a)
		if a.lease.Context().Err() != nil && c.hits(0.5) {
			return
		}
		switch x := c.below(20); {
		case x < 2:
			k.renew(c, a)
		case x == 2:
			runtime.Gosched()
		}
	}
}

// send sends a write to the place that checks fences, where it may land much later.
func (k *worker) send(c *chance, a *acquisition) {
	late := c.between(1, time.Millisecond)
	if c.hits(0.2) {
		late = c.between(0, 3*ttlMost)
	}
	time.AfterFunc(late, func() { k.w.oracle.landed(a) })
}

func (k *worker) renew(c *chance, a *acquisition) {
	ctx, cancel := k.p.ending(context.WithValue(a.ctx, manualKey{}, true), c.between(0, a.terms.ttl), context.DeadlineExceeded)
	defer cancel()
	until, start := a.lease.Until(), time.Now()
	err := a.lease.Renew(ctx)
	k.p.gate()
	k.w.oracle.renewed(a, ctx, start, until, err)
	k.note(a, "renew", err)
	if err == nil {
		k.w.oracle.write(a)
	}
}

// release releases a lease, now and then twice at once or once more.
func (k *worker) release(c *chance, a *acquisition) {
	once := func() {
		first, start := k.w.oracle.releasing(a), time.Now()
		err := a.lease.Release()
		k.p.gate()
		k.w.oracle.released(a, first, start, err)
		k.note(a, "release", err)
	}
	if d := c.between(0, 100*time.Millisecond); c.hits(0.1) {
		k.w.workers.Go(func() {
			k.p.sleep(d)
			once()
		})
	}
	once()
	if c.hits(0.2) {
		k.p.sleep(c.between(0, a.terms.ttl))
		once()
	}
}

// observe is the observer of all Lockers. It blocks, panics and calls back now and then.
func (k *worker) observe(ctx context.Context, e redislease.Event) {
	if e.Kind == redislease.EventPolling {
		k.w.oracle.polling(e)
		return
	}
	a := ctx.Value(acquisitionKey{}).(*acquisition)
	k.w.oracle.event(a, e)
	k.w.record(fmt.Sprintf("%s event %v of %d", k.p.name, e.Kind, a.id))
	c := from(k.place, name("event"), a.id, uint64(e.Kind), uint64(time.Now().UnixNano()))
	switch x := c.below(100); {
	case x < 3:
		k.w.oracle.observing(a)
		k.p.sleep(c.between(0, a.terms.ttl))
	case x < 5 && a.lease != nil && e.Kind != redislease.EventAcquired:
		k.w.oracle.observing(a)
		k.p.sleep(c.between(1, time.Microsecond)) // not at the instant of what it is told about
		first, start := k.w.oracle.releasing(a), time.Now()
		k.w.oracle.released(a, first, start, a.lease.Release())
	case x < 7:
		panic("observer")
	}
}

// note writes what the library has said into the history.
func (k *worker) note(a *acquisition, call string, err error) {
	said := "nil"
	for _, kind := range []struct {
		err  error
		text string
	}{
		{redislease.ErrNotAcquired, "held"}, {redislease.ErrOutcomeUnknown, "unknown"}, {redislease.ErrReleased, "released"},
		{redislease.ErrTaken, "taken"}, {redislease.ErrGone, "gone"}, {redislease.ErrUnconfirmed, "unconfirmed"},
		{redislease.ErrMaxHold, "max hold"},
	} {
		if errors.Is(err, kind.err) {
			said = kind.text
		}
	}
	if said == "nil" && err != nil {
		said = "another error"
	}
	k.w.record(fmt.Sprintf("%s %s of %d: %s", k.p.name, call, a.id, said))
}
