package redislease

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"
)

// LockerOption is an option of [New].
type LockerOption interface{ applyLocker(*config) }

// Option is an option of a single acquisition, and of [New] for all acquisitions that do not say otherwise.
type Option interface {
	LockerOption
	apply(*config)
}

// config is all that options can say. Each acquisition works with one that validate has passed.
type config struct {
	prefix   string
	observer func(context.Context, Event)

	ttl            time.Duration
	margin         time.Duration
	interval       time.Duration
	maxHold        time.Duration
	maxRenewals    int
	acquireTimeout time.Duration
	backoff        func(attempt int) time.Duration
	fencing        bool
	ticks          int // how many ticks of the grid an interval has at least; only tests change it

	set    setting // what was given, as opposed to what is a default
	px     []byte  // the TTL as Redis gets it
	tick   time.Duration
	broken error // what an option found wrong with its own value
}

// setting names the options whose default depends on others or is not a value of their own.
type setting uint8

const (
	setTTL setting = 1 << iota
	setMargin
	setInterval
	setAcquireTimeout
)

// defaults holds every default. Those of margin, interval and the time of an acquisition depend on the TTL: resolve.
var defaults = config{
	ttl:         30 * time.Second,
	maxHold:     time.Hour,
	maxRenewals: math.MaxInt,
	ticks:       alarmTicks,
}

const (
	marginPart   = 10 // of the TTL
	intervalPart = 3  // of the TTL

	minTTL      = 100 * time.Millisecond
	minMargin   = time.Millisecond
	minInterval = time.Millisecond
	minBackoff  = time.Millisecond

	// NoMaxHold, given to [WithMaxHold], lets a lease be renewed for as long as its holder does not release it, even
	// if the holder hangs.
	NoMaxHold = time.Duration(math.MaxInt64)
)

type lockerOption func(*config)

func (o lockerOption) applyLocker(c *config) { o(c) }

type leaseOption func(*config)

func (o leaseOption) applyLocker(c *config) { o(c) }
func (o leaseOption) apply(c *config)       { o(c) }

// WithPrefix puts prefix before every key, as it is: the key in Redis is prefix+key. The default is none.
func WithPrefix(prefix string) LockerOption {
	return lockerOption(func(c *config) { c.prefix = prefix })
}

// WithObserver has f told of every [Event] of the Locker and its leases; see there on which goroutine. ctx has the
// values of the acquiring caller's context and is never cancelled. A panic of f is recovered and dropped.
func WithObserver(f func(ctx context.Context, e Event)) LockerOption {
	return lockerOption(func(c *config) {
		if c.observer = f; f == nil {
			c.broken = fmt.Errorf("WithObserver was given no function")
		}
	})
}

// WithTTL sets for how long Redis keeps the key without a renewal, and so for how long others have to wait when a
// holder dies. The default is 30 s, the least 100 ms; it is rounded down to whole milliseconds. Three times the 99th
// percentile of the work is a good start.
func WithTTL(ttl time.Duration) Option {
	return leaseOption(func(c *config) { c.ttl, c.set = ttl, c.set|setTTL })
}

// WithMargin sets how long before the key can expire the lease's context ends at the latest: the time that the work
// has to stop in. The default is a tenth of the TTL, the least 1 ms.
func WithMargin(margin time.Duration) Option {
	return leaseOption(func(c *config) { c.margin, c.set = margin, c.set|setMargin })
}

// WithRenewInterval sets the time from one renewal to the next. The default, also chosen by 0, is a third of the
// TTL, the least 1 ms; the most is half of what the margin leaves of the TTL, so that a second try fits in.
//
// Renewals go out early at random, so that those of leases taken together do not all come together: the first by up to
// half the interval, all others by up to an eighth; and on top by up to a 64th, so that those of one Locker that would be
// due shortly after each other go out as one.
func WithRenewInterval(interval time.Duration) Option {
	return leaseOption(func(c *config) {
		if c.interval, c.set = interval, c.set|setInterval; interval == 0 {
			c.set &^= setInterval
		}
	})
}

// WithMaxHold sets for how long a lease can be held, counted from the sending of its acquisition. After it nothing is
// renewed any more, the context ends with [ErrMaxHold], and the key lapses within a TTL. The default is one hour;
// [NoMaxHold] sets no limit.
func WithMaxHold(d time.Duration) Option {
	return leaseOption(func(c *config) { c.maxHold = d })
}

// WithMaxRenewals sets after how many confirmed renewals of its own the watchdog renews no more, 0 being never. When
// trust then ends, the reason is [ErrMaxHold]. By default the number has no limit.
func WithMaxRenewals(n int) Option {
	return leaseOption(func(c *config) { c.maxRenewals = n })
}

// WithAcquireTimeout sets how long an acquisition may take as a whole, whether it waits for a holder or for a Redis
// that does not answer. It never bounds the lease; a deadline on the context bounds both. By default Acquire and Do
// take as long as the context allows, TryAcquire and TryDo at most TTL − margin and at most 5 s. An acquisition whose time
// is up, or whose context has ended, while Redis owes an answer goes on listening and cleaning up for a tenth of the TTL,
// at most 100 ms.
func WithAcquireTimeout(d time.Duration) Option {
	return leaseOption(func(c *config) { c.acquireTimeout, c.set = d, c.set|setAcquireTimeout })
}

// WithBackoff sets how long Acquire and Do wait before another try, while somebody holds the key or Redis fails. A release
// that is heard of is a reason to try at once, and of those in line for a key it is that of the first that counts. attempt
// counts from 1. What f returns counts as at least 1 ms, and the holder's remaining TTL may cut it short. The default
// doubles from 25 ms to 2 s, less up to half of it at random. f may be called by many goroutines at once.
func WithBackoff(f func(attempt int) time.Duration) Option {
	return leaseOption(func(c *config) {
		if c.backoff = f; f == nil {
			c.broken = fmt.Errorf("WithBackoff was given no function")
		}
	})
}

// WithFencing has each lease carry a fence, see [Lease.Fence]. It costs a second key in Redis and a script instead of a
// plain SET.
//
// The number is drawn in the script that takes the key: the greatest of the last one plus one, Redis' time in
// microseconds (the caller's where TIME is refused), and the greatest that this Locker has seen of any key plus one. It is
// kept for a week and the TTL under a key that begins with the lock's own and is in the same slot of a cluster: key:fence
// for a key with a hash tag ({…}), key:fence{key} for one without braces. A key with braces that are no hash tag is an
// error. If that key holds anything but an integer below 2^53 - 1 nothing is acquired, and the error has the code FENCE.
//
// So it grows although the kept number was lost (a flush, an eviction, a failover), since time has gone on, and although
// the clock was set back, since the number is kept. It can fall back only if both come together: the number is lost, the
// clock that stands in for it is behind, and the acquiring Locker has not seen a greater one itself.
func WithFencing() Option {
	return leaseOption(func(c *config) { c.fencing = true })
}

// resolve fills in the defaults that depend on other values, checks everything, and prepares what is sent. It is the
// only place that does; nothing is clamped.
func (c *config) resolve() error {
	if c.broken != nil {
		return c.broken
	}
	if c.ttl < minTTL {
		return fmt.Errorf("TTL %v is below the least, %v", c.ttl, minTTL)
	}
	c.ttl = c.ttl.Truncate(time.Millisecond)
	if c.set&setMargin == 0 {
		c.margin = c.ttl / marginPart
	}
	if c.set&setInterval == 0 {
		c.interval = c.ttl / intervalPart
	}
	switch most := (c.ttl - c.margin) / 2; {
	case c.margin < minMargin:
		return fmt.Errorf("margin %v is below the least, %v", c.margin, minMargin)
	case c.margin >= c.ttl:
		return fmt.Errorf("margin %v leaves nothing of TTL %v%s", c.margin, c.ttl, c.byDefault(setTTL))
	case c.interval < minInterval:
		return fmt.Errorf("renew interval %v is below the least, %v", c.interval, minInterval)
	case c.interval > most:
		return fmt.Errorf("renew interval %v%s is above the most, %v: half of TTL %v%s less margin %v%s", c.interval,
			c.byDefault(setInterval), most, c.ttl, c.byDefault(setTTL), c.margin, c.byDefault(setMargin))
	case c.maxHold <= 0:
		return fmt.Errorf("longest hold %v is not above 0", c.maxHold)
	case c.maxRenewals < 0:
		return fmt.Errorf("most renewals %d is below the least, 0", c.maxRenewals)
	case c.set&setAcquireTimeout != 0 && c.acquireTimeout <= 0:
		return fmt.Errorf("acquire timeout %v is not above 0", c.acquireTimeout)
	}
	c.px = strconv.AppendInt(nil, c.ttl.Milliseconds(), 10)
	c.tick = tick(c.interval / time.Duration(c.ticks))
	return nil
}

// byDefault marks a value in a message that nobody has given.
func (c *config) byDefault(s setting) string {
	if c.set&s == 0 {
		return " (default)"
	}
	return ""
}

// useful is the useful life of a lease that was just sent for.
func (c *config) useful() time.Duration { return c.ttl - c.margin }

// silence is after how long without an answer another renewal is sent beside the first. Three that are a tenth of the
// TTL apart keep a lease whose every answer is late by half a TTL; closer together they would not.
func (c *config) silence() time.Duration { return max(c.ttl/10, 50*time.Millisecond) }

// haste is the same for an acquisition, whose caller is waiting.
func (c *config) haste() time.Duration { return min(c.silence(), time.Second) }

// patience is for how long an acquisition waits for any answer before it counts that as a failure.
func (c *config) patience() time.Duration { return min(c.useful(), 5*time.Second) }

// grace is for how long an acquisition whose time is up still listens if something is unknown.
func (c *config) grace() time.Duration { return min(c.ttl/10, 100*time.Millisecond) }

// releaseBound is for how long Release waits for an answer.
func (c *config) releaseBound() time.Duration { return min(c.ttl/2, 2*time.Second) }

// keepFence is for how long Redis keeps the last fence: as long as the key, and long enough for any clock to come right.
func (c *config) keepFence() time.Duration { return later(c.ttl, 7*24*time.Hour) }

// with returns c as changed by the options of one acquisition.
func (c *config) with(opts []Option) (*config, error) {
	if len(opts) == 0 {
		return c, nil
	}
	own := *c
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("option %d of %d is nil", i+1, len(opts))
		}
		o.apply(&own)
	}
	return &own, own.resolve()
}
