package redislease_test

import (
	"context"
	"encoding"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

// bubble runs a test in which hours pass in milliseconds, with a server and a client whose network the test decides
// about. A goroutine that is left behind fails it.
func bubble(t *testing.T, test func(t *testing.T, b *bubbled)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		b := &bubbled{T: t, start: time.Now()}
		b.redis = redis.NewClient(&redis.Options{
			Addr:            "127.0.0.1:1", // a name would be looked up outside of the bubble
			Dialer:          func(context.Context, string, string) (net.Conn, error) { return b.dial(m) },
			PoolSize:        100, // waiting for a turn uses timers from outside of the bubble
			DisableIdentity: true,
			MinRetryBackoff: -1,
		})
		b.operator = b.redis
		client := &hooked{b: b}
		b.client = client
		defer m.Close()
		defer func() { _ = b.redis.Close() }()
		test(t, b)
		b.fault(nil)
		synctest.Wait()
	})
}

// bubbled is a server in a bubble.
type bubbled struct {
	*testing.T
	redis    *redis.Client
	operator *redis.Client
	client   redislease.RedisClient // for Lockers: its commands are logged and meet the fault
	start    time.Time

	mu   sync.Mutex
	hook func(what string, execute func() error) error
	log  []sent
	deaf bool // nothing comes from subscriptions, and new ones are not answered either
}

// deafen makes all subscriptions silent, or those that are made from now on well again.
func (b *bubbled) deafen(deaf bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.deaf = deaf
}

// dial returns a connection to the server on which neither end waits for the other to read, as with sockets. A
// subscription that is changed while something is published would else wait for itself, and so would a server that
// publishes to who sends it a command.
func (b *bubbled) dial(m *miniredis.Miniredis) (net.Conn, error) {
	server, err := m.Dial()
	if err != nil {
		return nil, err
	}
	near, far := net.Pipe()
	go flow(server, far)
	go flow(far, server)
	return &socket{b: b, Conn: near}, nil
}

// flow passes on all that it reads, and never keeps the sender waiting.
func flow(to io.WriteCloser, from io.Reader) {
	var mu sync.Mutex
	var held []byte
	more := make(chan struct{}, 1)
	go func() {
		defer to.Close()
		for range more {
			mu.Lock()
			b := held
			held = nil
			mu.Unlock()
			_, _ = to.Write(b)
		}
	}()
	defer close(more)
	for b := make([]byte, 4096); ; {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		mu.Lock()
		held = append(held, b[:n]...)
		mu.Unlock()
		select {
		case more <- struct{}{}:
		default:
		}
	}
}

type socket struct {
	b *bubbled
	net.Conn

	mu  sync.Mutex
	sub bool // a subscription
}

// Read reads nothing of a subscription that has become silent.
func (c *socket) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		c.b.mu.Lock()
		deaf := c.b.deaf
		c.b.mu.Unlock()
		c.mu.Lock()
		silent := deaf && c.sub
		c.mu.Unlock()
		if err != nil || !silent {
			return n, err
		}
	}
}

func (c *socket) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.sub = c.sub || strings.Contains(string(b), "subscribe")
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// sent is a command that a Locker sent: "set", "settle", "renew" or "release".
type sent struct {
	what string
	at   time.Duration // since the start
}

type hooked struct {
	b           *bubbled
	look, reply func(redis.Cmder) // at each command before and after, if set
}

func (h *hooked) Process(ctx context.Context, cmd redis.Cmder) error {
	what := nameOf(cmd)
	if h.look != nil {
		h.look(cmd)
	}
	h.b.mu.Lock()
	h.b.log = append(h.b.log, sent{what, h.b.now()})
	hook := h.b.hook
	h.b.mu.Unlock()
	execute := func() error {
		err := h.b.redis.Process(ctx, cmd)
		if h.reply != nil {
			h.reply(cmd)
		}
		return err
	}
	if hook == nil {
		return execute()
	}
	err := hook(what, execute)
	if err != nil {
		cmd.SetErr(err)
	}
	return err
}

// nameOf tells the library's commands apart, as one who watches the network can.
func nameOf(cmd redis.Cmder) string {
	if cmd.Name() != "eval" {
		return cmd.Name()
	}
	script, _ := cmd.Args()[1].(string)
	return scriptName(script)
}

func scriptName(script string) string {
	switch {
	case strings.Contains(script, "PEXPIRE"):
		return "renew"
	case strings.Contains(script, "DEL"):
		return "release"
	default:
		return "settle"
	}
}

// fault makes f decide about each command of a Locker from now on.
func (b *bubbled) fault(f func(what string, execute func() error) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hook = f
}

func (b *bubbled) now() time.Duration { return time.Since(b.start) }

// sent returns when commands of the kind were sent, from a time on.
func (b *bubbled) sent(what string, from time.Duration) (at []time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.log {
		if s.what == what && s.at >= from {
			at = append(at, s.at)
		}
	}
	return at
}

// locker returns a Locker that has run its checks, so that a test sees only what it causes.
func (b *bubbled) locker(opts ...redislease.LockerOption) *redislease.Locker {
	k := newLocker(b, b.client, opts...)
	l, err := k.TryAcquire(context.Background(), "check")
	require.NoError(b, err)
	require.NoError(b, l.Release())
	b.mu.Lock()
	defer b.mu.Unlock()
	b.log = nil
	return k
}

func (b *bubbled) acquire(k *redislease.Locker, opts ...redislease.Option) *redislease.Lease {
	l, err := k.TryAcquire(context.Background(), "orders", opts...)
	require.NoError(b, err)
	return l
}

func (b *bubbled) get(key string) string { return b.redis.Get(context.Background(), key).Val() }

var (
	errReset    = errors.New("connection reset by peer")
	errReadonly = redisError("READONLY You can't write against a read only replica.")
)

type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}

func TestRenewalsKeepTheirCadenceForHours(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k, redislease.WithMaxHold(redislease.NoMaxHold))
		begun := b.now()
		for range 6 * 360 {
			time.Sleep(5 * time.Second)
			require.NoError(t, l.Err())
			require.Greater(t, b.operator.PTTL(context.Background(), "orders").Val(), 19*time.Second)
		}
		renewals := b.sent("renew", begun)
		require.InDelta(t, 3*3600/9.35, len(renewals), 40)
		gaps := map[time.Duration]bool{}
		for i, at := range renewals {
			gap, least := at-begun, 10*time.Second/2
			if i > 0 {
				gap, least = at-renewals[i-1], 10*time.Second*7/8
			}
			require.LessOrEqual(t, gap, 10*time.Second, "jitter only makes a renewal earlier")
			require.Greater(t, gap, least-100*time.Millisecond, "by a part of the interval and up to the tick before")
			gaps[gap] = true
		}
		require.Greater(t, len(gaps), 12, "renewals are spread")
		require.NoError(t, l.Release())
	})
}

func TestAFailedRenewalIsRepeatedWhileTrustLasts(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := b.locker(redislease.WithObserver(r.observe))
		l := b.acquire(k)
		b.fault(func(string, func() error) error { return errReset })
		time.Sleep(26 * time.Second)
		require.NoError(t, l.Err())
		tries := b.sent("renew", 0)
		for i := 1; i < len(tries); i++ {
			require.LessOrEqual(t, tries[i]-tries[i-1], 30*time.Second/20, "never later than a twentieth of the TTL")
			require.GreaterOrEqual(t, tries[i]-tries[i-1], 40*time.Millisecond, "never a tight loop")
		}
		require.Greater(t, len(tries), 10)
		b.fault(nil)
		time.Sleep(time.Minute)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
		require.Contains(t, r.kinds(), redislease.EventRenewFailed)
		require.NotContains(t, r.kinds(), redislease.EventLost)
	})
}

func TestALeaseThatIsNotConfirmedIsLostAtTheEndOfTrustAndNotEarlier(t *testing.T) {
	for name, fault := range map[string]func(string, func() error) error{
		"reset":    func(string, func() error) error { return errReset },
		"readonly": func(string, func() error) error { return errReadonly },
		"silent":   func(string, func() error) error { time.Sleep(5 * time.Minute); return errReset },
		"panic":    func(string, func() error) error { panic("a hook") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				var r record
				k := b.locker(redislease.WithObserver(r.observe))
				sentAt := b.now()
				l := b.acquire(k)
				b.fault(fault)
				<-l.Context().Done()
				require.Equal(t, sentAt+27*time.Second, b.now(), "the margin before the key can expire, to the nanosecond")
				require.Equal(t, l.Token(), b.get("orders"), "nobody else can have it yet")
				cause := context.Cause(l.Context())
				require.ErrorIs(t, cause, redislease.ErrUnconfirmed)
				require.ErrorIs(t, cause, redislease.ErrLost)
				var lost *redislease.LostError
				require.ErrorAs(t, cause, &lost)
				require.Error(t, lost.Err)
				if name == "readonly" {
					require.ErrorIs(t, cause, errReadonly)
				}
				end := b.now()
				time.Sleep(10 * time.Minute)
				require.Empty(t, b.sent("renew", end+1), "nothing is sent for a lease that has ended")
				require.Empty(t, b.get("orders"))
				require.Equal(t, redislease.EventLost, r.all()[len(r.all())-1].Kind)
				require.Equal(t, 27*time.Second, r.all()[len(r.all())-1].Held)
			})
		})
	}
}

func TestSilentRenewalsAreJoinedByAtMostTwoOthers(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		hang := make(chan struct{})
		b.fault(func(string, func() error) error { <-hang; return errReset })
		time.Sleep(26 * time.Second)
		at := b.sent("renew", 0)
		require.Len(t, at, 3)
		require.Equal(t, 3, redislease.InFlight(l))
		require.Equal(t, 3*time.Second, at[1]-at[0], "a tenth of the TTL")
		require.Equal(t, 3*time.Second, at[2]-at[1])
		b.fault(nil)
		close(hang)
		time.Sleep(time.Minute)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}

func TestRepliesThatAreLateByHalfATTLLoseNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k, redislease.WithMaxHold(redislease.NoMaxHold))
		b.fault(func(what string, execute func() error) error {
			defer time.Sleep(15 * time.Second)
			return execute()
		})
		time.Sleep(6 * time.Hour)
		require.NoError(t, l.Err())
		b.fault(nil)
		require.NoError(t, l.Release())
		time.Sleep(time.Minute)
	})
}

func TestAnAnswerCountsFromItsOwnSendHoweverLate(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0 })
		sentAt := b.now()
		l := b.acquire(k)
		var n atomic.Int32
		b.fault(func(what string, execute func() error) error {
			if n.Add(1) == 1 {
				defer time.Sleep(16 * time.Second) // sent at 10, answered at 26
				return execute()
			}
			time.Sleep(time.Hour)
			return errReset
		})
		time.Sleep(26*time.Second + time.Millisecond)
		require.Equal(t, b.start.Add(sentAt+37*time.Second), l.Until())
		<-l.Context().Done()
		require.Equal(t, sentAt+37*time.Second, b.now())
		time.Sleep(2 * time.Hour)
	})
}

func TestTheLongestHoldIsOneHourUnlessSaidOtherwise(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		sentAt := b.now()
		l := b.acquire(b.locker())
		<-l.Context().Done()
		require.Equal(t, sentAt+time.Hour, b.now())
		require.ErrorIs(t, l.Err(), redislease.ErrMaxHold)
		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrMaxHold)
		time.Sleep(30 * time.Second)
		require.Empty(t, b.get("orders"), "the key lapses within a TTL")
		require.Empty(t, b.sent("renew", sentAt+time.Hour))
	})
}

func TestTheWatchdogRenewsNoMoreThanItMay(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0 })
		sentAt := b.now()
		l := b.acquire(k, redislease.WithMaxRenewals(3))
		time.Sleep(45 * time.Second)
		require.NoError(t, l.Renew(context.Background()), "does not count")
		<-l.Context().Done()
		require.Equal(t, sentAt+(45+27)*time.Second, b.now())
		require.ErrorIs(t, l.Err(), redislease.ErrMaxHold)
		require.Len(t, b.sent("renew", 0), 4)

		sentAt = b.now()
		require.ErrorIs(t, l.Release(), redislease.ErrMaxHold)
		l = b.acquire(k, redislease.WithMaxRenewals(0))
		<-l.Context().Done()
		require.Equal(t, sentAt+27*time.Second, b.now())
		require.ErrorIs(t, l.Err(), redislease.ErrMaxHold)
		require.Empty(t, b.sent("renew", sentAt))
	})
}

func TestWhenTheCallersContextEndsRenewingStopsAndTrustRunsOut(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var r record
		k := b.locker(redislease.WithObserver(r.observe))
		why := errors.New("enough")
		ctx, cancel := context.WithCancelCause(context.Background())
		sentAt := b.now()
		l, err := k.TryAcquire(ctx, "orders")
		require.NoError(t, err)
		time.Sleep(4 * time.Second) // the first renewal is due after half the interval of 10 s, and a tick, at the earliest
		cancel(why)
		require.Equal(t, why, context.Cause(l.Context()))
		time.Sleep(23*time.Second - 1)
		require.NoError(t, l.Err(), "a write may still land")
		require.Empty(t, b.sent("renew", 0))
		time.Sleep(time.Nanosecond)
		require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed)
		require.ErrorIs(t, l.Err(), why)
		require.Equal(t, why, context.Cause(l.Context()), "the first cause stays")
		require.Equal(t, sentAt+27*time.Second, b.now())
		require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
		require.Empty(t, b.get("orders"))
		time.Sleep(time.Second)
		require.Equal(t, redislease.EventLost, r.all()[len(r.all())-1].Kind)
	})
}

func TestTheScheduleStartsAnewFromAManualRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		redislease.SetRandom(k, func() float64 { return 0 })
		sentAt := b.now()
		l := b.acquire(k)
		time.Sleep(5 * time.Second)
		require.NoError(t, l.Renew(context.Background()))
		time.Sleep(11 * time.Second)
		require.Equal(t, []time.Duration{sentAt + 5*time.Second, sentAt + 15*time.Second}, b.sent("renew", 0))
		require.NoError(t, l.Release())
	})
}

func TestRenewIsBoundedByItsContextAndByTrust(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		sentAt := b.now()
		l := b.acquire(b.locker())
		b.fault(func(_ string, execute func() error) error { time.Sleep(time.Hour); return errReset })
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := l.Renew(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, redislease.ErrLost)
		require.Equal(t, sentAt+time.Second, b.now())
		require.NoError(t, l.Err())

		require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrUnconfirmed)
		require.Equal(t, sentAt+27*time.Second, b.now())
		time.Sleep(2 * time.Hour)
	})
}

func TestARenewalWhoseAnswerNobodyKnowsIsNotConfirmed(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		b.fault(func(_ string, execute func() error) error { _ = execute(); return errReset })
		err := l.Renew(context.Background())
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.ErrorIs(t, err, errReset)
		b.fault(func(_ string, execute func() error) error { return errReset })
		err = l.Renew(context.Background())
		require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "it was never written")
		require.ErrorIs(t, err, errReset)
		b.fault(nil)
		require.NoError(t, l.Renew(context.Background()))
		require.NoError(t, l.Release())
	})
}

func TestALockerMadeUsedAndReleasedLeavesABubbleEmpty(t *testing.T) {
	for range 100 {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker()
			require.NoError(t, k.Do(context.Background(), "orders", func(context.Context, *redislease.Lease) error {
				time.Sleep(time.Minute)
				return nil
			}))
		})
	}
}

func TestASuspendedMachineFindsOutByItself(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		asked := b.acquire(k)
		s.Suspend(27 * time.Second)
		require.ErrorIs(t, asked.Err(), redislease.ErrUnconfirmed, "at once, where somebody asks")
		require.ErrorIs(t, asked.Release(), redislease.ErrUnconfirmed)

		watched := b.acquire(k)
		s.Suspend(time.Second)
		require.Equal(t, time.Now().Add(26*time.Second), watched.Until(), "the suspended time has been used up")
		require.NoError(t, watched.Renew(context.Background()))
		require.Equal(t, time.Now().Add(27*time.Second), watched.Until())
		time.Sleep(time.Second)
		at := b.now()
		s.Suspend(time.Hour / 4)
		<-watched.Context().Done()
		require.LessOrEqual(t, b.now()-at, time.Second, "within a second where nobody does")
		require.ErrorIs(t, watched.Release(), redislease.ErrUnconfirmed)

		rarely, err := k.TryAcquire(context.Background(), "rarely", redislease.WithTTL(10*time.Hour), redislease.WithMaxHold(redislease.NoMaxHold))
		require.NoError(t, err)
		often := b.acquire(k, redislease.WithTTL(5*time.Minute))
		at = b.now()
		s.Suspend(5 * time.Minute)
		<-often.Context().Done()
		require.LessOrEqual(t, b.now()-at, time.Second, "whatever else is held")
		require.ErrorIs(t, often.Release(), redislease.ErrUnconfirmed)
		time.Sleep(time.Minute)
		at = b.now()
		s.Suspend(10 * time.Hour)
		<-rarely.Context().Done()
		require.LessOrEqual(t, b.now()-at, time.Minute, "or soon, for how seldom it is renewed")
		require.ErrorIs(t, rarely.Release(), redislease.ErrUnconfirmed)
	})
}

// slow is a context whose values take long to find, once it is told.
type slow struct {
	context.Context
	told atomic.Bool
}

func (s *slow) Value(key any) any {
	if s.told.Load() {
		time.Sleep(7 * time.Second)
	}
	return s.Context.Value(key)
}

func TestACallersContextHoldsUpNoOtherLeaseThatEndsAtTheSameMoment(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithMaxHold(5 * time.Second))
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		s := &slow{Context: ctx}
		_, err := k.TryAcquire(s, "slow")
		require.NoError(t, err)
		begun := b.now()
		l := b.acquire(k)
		s.told.Store(true)
		<-l.Context().Done()
		require.Equal(t, begun+5*time.Second, b.now())
		require.ErrorIs(t, l.Release(), redislease.ErrMaxHold)
		time.Sleep(time.Minute)
	})
}

func TestAStepOfTheWallClockLosesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		l := b.acquire(k)
		for _, step := range []time.Duration{time.Hour, -3 * time.Hour, 2 * time.Hour, time.Second} {
			s.Wall.Add(int64(step))
			require.NoError(t, l.Err())
			time.Sleep(40 * time.Second)
			require.NoError(t, l.Err())
		}
		require.NoError(t, l.Release())

		s.NoBoot.Store(true)
		l = b.acquire(k)
		s.Wall.Add(-int64(time.Hour))
		require.NoError(t, l.Err(), "a step back gives no extra life: the monotonic clock goes on")
		s.Wall.Add(int64(2 * time.Hour))
		require.ErrorIs(t, l.Err(), redislease.ErrUnconfirmed, "without a clock that decides, the greater counts")
		require.ErrorIs(t, l.Release(), redislease.ErrUnconfirmed)
	})
}

func TestReleaseIsBoundedWhateverTheWallClockDoes(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		for _, step := range []time.Duration{0, 300 * time.Millisecond, -300 * time.Millisecond, -time.Hour} {
			l := b.acquire(k)
			hang := make(chan struct{})
			b.fault(func(_ string, execute func() error) error { _ = execute(); <-hang; return errReset })
			s.Wall.Add(int64(step))
			go func() { time.Sleep(time.Second); s.Wall.Add(-int64(step)) }()
			begun := b.now()
			require.ErrorIs(t, l.Release(), redislease.ErrOutcomeUnknown)
			require.Equal(t, max(0, 2*time.Second), b.now()-begun, "two seconds, or half the TTL")
			b.fault(nil)
			close(hang)
			time.Sleep(time.Second)
		}
	})
}

func TestAWallClockSetForwardAndBackPutsOffNoEnd(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		s.NoBoot.Store(true)
		k := b.locker()
		redislease.SetSkew(k, &s)
		l := b.acquire(k)
		s.Wall.Add(int64(15 * time.Second))
		time.Sleep(5 * time.Second)
		require.NoError(t, l.Renew(context.Background()))
		renewedAt := b.now()
		b.fault(func(string, func() error) error { return errReset })
		s.Wall.Add(-int64(15 * time.Second))
		<-l.Context().Done()
		require.Equal(t, renewedAt+27*time.Second, b.now())
	})
}

func TestALeaseUnderAnothersContextIsLostForAReasonOfItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		outer := b.acquire(k)
		inner, err := k.TryAcquire(outer.Context(), "inner")
		require.NoError(t, err)
		require.NoError(t, b.operator.Set(context.Background(), "orders", "thief", 0).Err())
		<-inner.Context().Done()
		require.ErrorIs(t, context.Cause(inner.Context()), redislease.ErrTaken, "the outer one's")
		time.Sleep(time.Minute)
		require.ErrorIs(t, inner.Err(), redislease.ErrUnconfirmed)
		require.NotErrorIs(t, inner.Err(), redislease.ErrTaken, "nobody took its own key")
		require.ErrorContains(t, inner.Err(), "another token", "but the text says why it was not renewed")
		require.ErrorIs(t, inner.Release(), redislease.ErrUnconfirmed)
	})
}

func TestARenewalThatWasStuckIsNotSentBeyondTheMost(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		l := b.acquire(k, redislease.WithMaxRenewals(1))
		var n, executed atomic.Int32
		b.fault(func(what string, execute func() error) error {
			if n.Add(1) == 1 {
				defer time.Sleep(4 * time.Second)
			} else {
				time.Sleep(2 * time.Second) // for a connection
			}
			err := execute()
			if err == nil {
				executed.Add(1)
			}
			return err
		})
		<-l.Context().Done()
		require.ErrorIs(t, l.Err(), redislease.ErrMaxHold)
		require.EqualValues(t, 2, n.Load())
		require.EqualValues(t, 1, executed.Load(), "the second was withdrawn when the first was confirmed")
	})
}

func TestDoSendsNoSecondReleaseOnItsFunctionsBehalf(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		begun := b.now()
		err := k.Do(context.Background(), "orders", func(_ context.Context, l *redislease.Lease) error {
			b.fault(func(what string, execute func() error) error { _ = execute(); return errReset })
			err := l.Release()
			require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
			return nil
		})
		require.ErrorIs(t, err, redislease.ErrReleased)
		require.Len(t, b.sent("release", begun), 1)
	})
}

func TestATimerFromBeforeASuspendIsNotReliedUpon(t *testing.T) {
	// The simulation found it: a timer follows the monotonic clock, so after a suspend it fires later by as much.
	bubble(t, func(t *testing.T, b *bubbled) {
		var s redislease.Skew
		k := b.locker()
		redislease.SetSkew(k, &s)
		redislease.SetRandom(k, func() float64 { return 0 })
		l := b.acquire(k)
		acquired := b.now()
		answer := make(chan struct{})
		b.fault(func(string, func() error) error { <-answer; return errReset })
		time.Sleep(10500 * time.Millisecond) // the first renewal is silent, and the second is due in 2.5 s
		s.Suspend(4 * time.Second)
		b.fault(func(string, func() error) error { return errReset })
		close(answer)
		time.Sleep(time.Second)
		at := b.sent("renew", acquired+10500*time.Millisecond)
		require.NotEmpty(t, at, "it is followed up soon after it failed")
		require.NoError(t, l.Err())
		b.fault(nil)
		require.NoError(t, l.Release())
	})
}

func TestAKeyFoundAfterItsLongestHoldIsGivenBack(t *testing.T) {
	// The simulation found it: a renewal was sent to confirm a lease that was over before it began.
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				_ = execute()
				return errReset
			case what == "settle" && b.now() < 12*time.Second:
				return errReadonly
			}
			return execute()
		})
		begun := b.now()
		l, err := k.Acquire(context.Background(), "orders", redislease.WithMaxHold(10*time.Second),
			redislease.WithAcquireTimeout(time.Minute))
		require.NoError(t, err)
		require.Greater(t, b.now()-begun, 11*time.Second)
		require.Empty(t, b.sent("renew", begun))
		require.Len(t, b.sent("release", begun), 1)
		require.WithinDuration(t, time.Now().Add(10*time.Second), l.Until(), 0, "another grant, with a hold of its own")
		require.NoError(t, l.Release())
	})
}

func TestATryWhoseContextEndsWhileALateGrantIsGivenBackSaysWhy(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		enough := errors.New("enough")
		ctx, cancel := context.WithCancelCause(context.Background())
		b.fault(func(what string, execute func() error) error {
			switch what {
			case "set":
				defer time.Sleep(2 * time.Second)
			case "release":
				time.AfterFunc(time.Millisecond, func() { cancel(enough) })
				time.Sleep(10 * time.Second)
			}
			return execute()
		})
		_, err := k.TryAcquire(ctx, "orders", redislease.WithMaxHold(time.Second))
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.ErrorIs(t, err, enough)
		time.Sleep(time.Minute)
	})
}

func TestTokensOlderThanTwoTTLsAreNotAskedAbout(t *testing.T) {
	// The simulation found it: they were, where nothing was in flight meanwhile.
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(time.Second), redislease.WithBackoff(func(int) time.Duration { return 3 * time.Second }))
		var asked []int
		b.client.(*hooked).look = func(cmd redis.Cmder) {
			if nameOf(cmd) == "settle" {
				asked = append(asked, len(cmd.Args())-5) // beside eval, the script, 1, the key and the TTL
			}
		}
		require.NoError(t, b.operator.Set(context.Background(), "orders", "by hand", 2*time.Second).Err())
		b.fault(func(what string, execute func() error) error {
			switch {
			case what == "set":
				_ = execute()
				return errReset
			case len(asked) == 1:
				return errReadonly
			}
			return execute()
		})
		l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Minute))
		require.NoError(t, err)
		require.Equal(t, []int{2, 1}, asked)
		require.NoError(t, l.Release())
	})
}

func TestAShortHoldNeedsNoConfirmation(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker(redislease.WithMaxHold(5 * time.Second)))
		require.Empty(t, b.sent("renew", 0), "there is all the trust that a grant needs")
		require.NoError(t, l.Release())
	})
}

func TestATokenThatRedisRepeatsIsKeptOutOfTheMessage(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		var token string
		b.client.(*hooked).look = func(cmd redis.Cmder) {
			if nameOf(cmd) == "set" {
				text, err := cmd.Args()[2].(encoding.BinaryMarshaler).MarshalBinary()
				require.NoError(t, err)
				token = string(text)
			}
		}
		var asRedisSaysIt redisError
		b.fault(func(what string, execute func() error) error {
			if what != "set" {
				time.Sleep(time.Minute)
				return errReset
			}
			_ = execute()
			asRedisSaysIt = redisError("ERR unknown command 'set', with args beginning with: 'orders' '" + token + "' 'nx' ")
			return asRedisSaysIt
		})
		_, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
		require.ErrorIs(t, err, asRedisSaysIt)
		require.ErrorContains(t, err, "unknown command")
		require.NotContains(t, err.Error(), token)
		time.Sleep(2 * time.Minute)
	})
}

// clustered is a client that can be told that a node may be gone.
type clustered struct {
	redislease.RedisClient
	reloads atomic.Int32
}

func (c *clustered) ReloadState(context.Context) {
	c.reloads.Add(1)
	panic("a wrapper")
}

func TestAClusterIsLookedAtAnewWhenACommandGetsNoAnswer(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		client := &clustered{RedisClient: b.client}
		b.client = client
		l := b.acquire(b.locker())
		require.Zero(t, client.reloads.Load())
		for name, test := range map[string]struct {
			fault func(string, func() error) error
			asks  bool
		}{
			"refused by Redis": {func(string, func() error) error { return errReadonly }, false},
			"no connection":    {func(string, func() error) error { return errReset }, true},
			"silent":           {func(string, func() error) error { time.Sleep(4 * time.Second); return errReadonly }, true},
		} {
			before := client.reloads.Load()
			b.fault(test.fault)
			time.Sleep(14 * time.Second)
			b.fault(nil)
			require.Equal(t, test.asks, client.reloads.Load() > before, name)
			time.Sleep(30 * time.Second)
			require.NoError(t, l.Err())
		}
		require.NoError(t, l.Release())
	})
}

func TestAPollInTheLastMillisecondOfAKeyIsFollowedByAnotherSoon(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "crashed", time.Second).Err())
		begun := b.now()
		l, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Hour),
			redislease.WithBackoff(func(n int) time.Duration {
				if n == 1 {
					return time.Second - 500*time.Microsecond
				}
				return time.Minute
			}))
		require.NoError(t, err)
		require.LessOrEqual(t, b.now()-begun, time.Second+26*time.Millisecond)
		require.NoError(t, l.Release())
	})
}

func TestAPTTLThatIsAlwaysZeroIsNoReasonToPollInATightLoop(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "by hand", 0).Err())
		b.client.(*hooked).reply = func(cmd redis.Cmder) {
			if c, ok := cmd.(interface{ SetVal(any) }); ok && nameOf(cmd) == "settle" {
				c.SetVal([]any{int64(0), int64(0)})
			}
		}
		begun := b.now()
		_, err := k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(time.Minute))
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.Less(t, len(b.sent("settle", begun)), 200)
	})
}

// moody is an error that cannot say what it is.
type moody struct{}

func (*moody) Error() string { panic("a hook's error") }

func TestAnErrorThatPanicsWhenItIsReadEndsNoProcess(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		l := b.acquire(b.locker())
		b.fault(func(string, func() error) error { return &moody{} })
		time.Sleep(12 * time.Second)
		b.fault(nil)
		time.Sleep(20 * time.Second)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}
