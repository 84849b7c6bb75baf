package redislease_test

import (
	"bufio"
	"context"
	"encoding"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

// The stories about acquiring: testdata/stories.md has them all.

// kinds are those of the commands that a Locker sends.
var kinds = []string{"set", "settle", "renew", "release"}

// sentAny returns how many commands of any kind were sent so far.
func (b *bubbled) sentAny() (n int) {
	for _, kind := range kinds {
		n += len(b.sent(kind, 0))
	}
	return n
}

// other returns the Locker of another process, which the fault does not meet.
func (b *bubbled) other(opts ...redislease.LockerOption) *redislease.Locker {
	return newLocker(b, b.redis, opts...)
}

// answering returns a client without a server. reply says what Redis would, for a command of the kind.
func answering(reply func(what string) (any, error)) clientFunc {
	return func(_ context.Context, cmd redis.Cmder) error {
		for _, arg := range cmd.Args() {
			if m, ok := arg.(encoding.BinaryMarshaler); ok {
				if _, err := m.MarshalBinary(); err != nil {
					return err
				}
			}
		}
		v, err := reply(nameOf(cmd))
		if err != nil {
			cmd.SetErr(err)
			return err
		}
		switch c := cmd.(type) {
		case interface{ SetVal(bool) }:
			c.SetVal(v.(bool))
		case interface{ SetVal(any) }:
			c.SetVal(v)
		}
		return nil
	}
}

// agreeable says Yes to everything, for tests of what leases cost this process.
var agreeable = answering(func(what string) (any, error) {
	if what == "set" {
		return true, nil
	}
	return int64(1), nil
})

// acquireSlowly acquires the key even if this machine takes longer than the TTL for it now and then.
func acquireSlowly(t testing.TB, k *redislease.Locker, key string, opts ...redislease.Option) *redislease.Lease {
	t.Helper()
	l, err := k.Acquire(context.Background(), key, append(opts, redislease.WithAcquireTimeout(patience))...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Release() })
	return l
}

// process is another one, which runs the calling test once more and ends with it.
type process struct {
	*testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

const envServer = "REDISLEASE_TEST_SERVER" // set in another process: the server to use

// another starts a process, in which inAnother is true.
func another(t *testing.T, addr string) *process {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), envServer+"="+addr)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	in, err := cmd.StdinPipe() // closed when this process ends, however it does
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &process{t, cmd, in, bufio.NewReader(out)}
}

// inAnother returns the server's address in a process that another has started. It ends with its parent.
func inAnother() (addr string, ok bool) {
	if addr, ok = os.LookupEnv(envServer); ok {
		go func() {
			for in := bufio.NewScanner(os.Stdin); in.Scan(); {
				told <- in.Text()
			}
			os.Exit(1)
		}()
	}
	return addr, ok
}

// told has the lines that were written to this process.
var told = make(chan string, 1)

// line waits for a line that the process prints.
func (p *process) line() string {
	p.Helper()
	line, err := p.out.ReadString('\n')
	require.NoError(p, err)
	return strings.TrimSuffix(line, "\n")
}

func TestC01AnAcquireWhoseReplyIsLostIsNeverCalledHeldByAnother(t *testing.T) {
	t.Run("a grant that is settled in time is a lease", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		k := f.used(redislease.WithAcquireTimeout(patience))
		f.proxy.On(command("set", "orders")).Do(faultproxy.DropReply())
		l, err := k.TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		require.Equal(t, l.Token(), f.get("orders"))
		f.trusted(l, "orders")
		require.Equal(t, 1, f.proxy.Count(command("set", "orders")))
		require.NoError(t, l.Release())
		require.NoError(t, acquire(t, newLocker(t, f.operator), "orders").Release(), "the next one has it at once")
	})
	t.Run("also after the client's read timeout", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker()
			b.fault(func(what string, execute func() error) error {
				if err := execute(); what != "set" {
					return err
				}
				time.Sleep(500 * time.Millisecond)
				return os.ErrDeadlineExceeded
			})
			begun := b.now()
			l := b.acquire(k)
			require.Equal(t, begun+500*time.Millisecond, b.now())
			require.Equal(t, l.Token(), b.get("orders"))
			require.Equal(t, b.start.Add(begun+27*time.Second), l.Until())
			require.NoError(t, l.Release())
		})
	})
	for name, cleaned := range map[string]bool{"the clean-up gets through": true, "nothing gets through": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				defer time.Sleep(2 * time.Minute)
				k, other := b.locker(), b.other()
				b.fault(func(what string, execute func() error) error {
					if what == "release" && !cleaned {
						time.Sleep(time.Minute)
						return errReset
					}
					err := execute()
					if what != "release" {
						time.Sleep(time.Minute)
						return errReset
					}
					return err
				})
				begun := b.now()
				l, err := k.TryAcquire(context.Background(), "orders", redislease.WithAcquireTimeout(3*time.Second))
				require.Nil(t, l)
				require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
				require.NotErrorIs(t, err, redislease.ErrNotAcquired)
				require.Len(t, b.sent("release", begun), 1, "one clean-up, before it returns")
				if cleaned {
					require.Empty(t, b.get("orders"))
					l, err := other.TryAcquire(context.Background(), "orders")
					require.NoError(t, err, "the next one has it at once")
					require.NoError(t, l.Release())
				} else {
					require.NotEmpty(t, b.get("orders"))
					time.Sleep(begun + 30*time.Second - b.now())
					require.Empty(t, b.get("orders"), "a TTL after the SET it has lapsed")
				}
				require.Empty(t, b.sent("renew", begun), "and was never renewed")
			})
		})
	}
}

func TestC02AnAcquireThatIsCancelledBetweenGrantAndReplyRenewsNothing(t *testing.T) {
	const ttl = time.Second
	for name, cleaned := range map[string]bool{"the clean-up gets through": true, "it does not": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) { // no goroutine is left, or it fails
				k := b.locker(redislease.WithTTL(ttl))
				b.fault(func(what string, execute func() error) error {
					if what == "release" && !cleaned {
						return errReset
					}
					defer time.Sleep(500 * time.Millisecond)
					return execute()
				})
				begun := b.now()
				ctx, cancel := context.WithCancel(context.Background())
				time.AfterFunc(250*time.Millisecond, cancel)
				l, err := k.Acquire(ctx, "orders")
				require.Nil(t, l)
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, err, redislease.ErrOutcomeUnknown)
				require.LessOrEqual(t, b.now()-begun, 350*time.Millisecond, "a grace of a tenth of the TTL")
				if cleaned {
					require.Empty(t, b.get("orders"))
				}
				last := ttl
				for b.now() < begun+5*time.Second {
					left := b.operator.PTTL(context.Background(), "orders").Val()
					require.LessOrEqual(t, left, last, "it is never prolonged")
					if last = left; b.now() >= begun+ttl {
						require.Empty(t, b.get("orders"))
					}
					time.Sleep(10 * time.Millisecond)
				}
				require.Empty(t, b.sent("renew", begun))
			})
		})
	}
}

func TestC03HeldByAnotherAndATroubleAreDifferentErrors(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	f := newFaulty(t)
	k := f.used(redislease.WithAcquireTimeout(patience))
	held := acquire(t, newLocker(t, f.operator), "orders")
	l, err := k.TryAcquire(ctx, "orders")
	require.Nil(t, l)
	require.ErrorIs(t, err, redislease.ErrNotAcquired)
	require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown)
	var reply redis.Error
	require.False(t, errors.As(err, &reply), "no error of Redis")
	require.NoError(t, held.Release())

	l, err = k.TryAcquire(ctx, "orders")
	require.NoError(t, err)
	require.NoError(t, l.Err(), "no error, and so a lease that can be used")
	require.NoError(t, l.Release())

	f.proxy.On(faultproxy.Any()).Do(faultproxy.AnswerError("NOAUTH Authentication required."))
	for name, k := range map[string]*redislease.Locker{"used": k, "new": f.locker()} {
		l, err = k.TryAcquire(ctx, "orders")
		require.Nil(t, l, name)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired, name)
		require.ErrorAs(t, err, &reply, name)
		require.ErrorContains(t, err, "NOAUTH", name)
	}
	f.proxy.Clear()

	f.server.Kill()
	direct := newLocker(t, connect(t, f.addr))
	for name, k := range map[string]*redislease.Locker{"used": newLocker(t, f.operator), "new": direct} {
		l, err = k.TryAcquire(ctx, "orders")
		require.Nil(t, l, name)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired, name)
		var op *net.OpError
		require.ErrorAs(t, err, &op, name)
	}
}

func TestC04AWaitInVainSaysWhetherTheDeadlineTheCallerOrTheLibraryEndedIt(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		const wait = 300 * time.Millisecond
		timeout, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		_, err := k.Acquire(timeout, "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, context.Canceled)

		cancelled, stop := context.WithCancel(context.Background())
		time.AfterFunc(wait, stop)
		_, err = k.Acquire(cancelled, "orders")
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, context.DeadlineExceeded)

		_, err = k.Acquire(context.Background(), "orders", redislease.WithAcquireTimeout(wait)) // instead of a number of tries
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, context.Canceled)

		n := b.sentAny()
		time.Sleep(time.Hour)
		require.Equal(t, n, b.sentAny(), "nothing is left that would send something")
		require.Equal(t, "other", b.get("orders"))
		require.Len(t, b.operator.Keys(context.Background(), "*").Val(), 1)
	})
}

func TestC05ARedisThatAnswersLateIsNoReasonToGiveUp(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithTTL(time.Second))
		b.fault(func(_ string, execute func() error) error {
			time.Sleep(75 * time.Millisecond)
			defer time.Sleep(75 * time.Millisecond)
			return execute()
		})
		for i := range 100 {
			ctx, cancel := context.Background(), func() {}
			if i%2 == 1 {
				ctx, cancel = context.WithTimeout(ctx, 2*time.Second)
			}
			begun := b.now()
			l, err := k.Acquire(ctx, "orders")
			require.NoError(t, err)
			require.Equal(t, begun+150*time.Millisecond, b.now())
			require.NoError(t, l.Release())
			require.Empty(t, b.get("orders"))
			cancel()
		}
	})
}

func TestC06ACancelledWaiterReturnsAtOnceAndADeadContextSendsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker(redislease.WithBackoff(func(int) time.Duration { return 5 * time.Second }))
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		begun := b.now()
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(100*time.Millisecond, cancel)
		_, err := k.Acquire(ctx, "orders")
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, begun+100*time.Millisecond, b.now())

		n := b.sentAny()
		_, err = k.Acquire(ctx, "orders")
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, redislease.ErrNotAcquired)
		time.Sleep(time.Minute)
		require.Equal(t, n, b.sentAny())
	})
}

// herd has processes wait for one key at the same time, until wait is over, and returns when each of them tried.
func herd(n int, wait time.Duration, reply func(what string) (any, error), opts ...redislease.Option) (tries [][]time.Duration, errs []error) {
	tries, errs = make([][]time.Duration, n), make([]error, n)
	begun := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	var wg sync.WaitGroup
	for i := range n {
		k, err := redislease.New(answering(func(what string) (any, error) {
			if what == "renew" || what == "release" { // the check of the scripts
				return int64(0), nil
			}
			tries[i] = append(tries[i], time.Since(begun)) // one at a time
			return reply(what)
		}))
		wg.Go(func() {
			if errs[i] = err; err == nil {
				_, errs[i] = k.Acquire(ctx, "orders", opts...)
			}
		})
	}
	wg.Wait()
	return tries, errs
}

// heldByAnother is what a Redis says in which somebody else has the key, without a TTL.
func heldByAnother(what string) (any, error) {
	if what == "set" {
		return false, nil
	}
	return []any{int64(0), int64(-1)}, nil
}

func TestC07ManyWaitersPollLessAndLessAndNotInStep(t *testing.T) {
	for name, test := range map[string]struct {
		reply func(what string) (any, error)
		want  error
	}{
		"held by another": {heldByAnother, redislease.ErrNotAcquired},
		"read-only":       {func(string) (any, error) { return nil, errReadonly }, errReadonly},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const waiters, wait, grown = 200, 20 * time.Second, 6 * time.Second
				tries, errs := herd(waiters, wait, test.reply)
				buckets := make([]int, wait/(10*time.Millisecond))
				total := 0
				for i, at := range tries {
					require.ErrorIs(t, errs[i], test.want)
					require.ErrorIs(t, errs[i], context.DeadlineExceeded)
					for j := 1; j < len(at); j++ {
						gap := at[j] - at[j-1]
						require.Positive(t, gap)
						require.LessOrEqual(t, gap, 2*time.Second, "the cap")
						if at[j-1] < grown {
							continue
						}
						require.GreaterOrEqual(t, gap, time.Second, "jitter takes half of it at the most")
						buckets[at[j]/(10*time.Millisecond)]++
						total++
					}
				}
				mean := float64(total) / float64((wait-grown)/(10*time.Millisecond))
				require.Less(t, float64(slices.Max(buckets)), 12*mean, "no burst")
			})
		})
	}
	t.Run("with a backoff of its own", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			const base, most = time.Millisecond, 100 * time.Millisecond
			tries, errs := herd(20, 2*time.Second, heldByAnother, redislease.WithBackoff(func(attempt int) time.Duration {
				d := min(base<<min(attempt-1, 20), most)
				return d - rand.N(d/2)
			}))
			for i, at := range tries {
				require.ErrorIs(t, errs[i], redislease.ErrNotAcquired)
				require.Less(t, len(at), 10+int(2*time.Second/(most/2)))
				for j := 1; j < len(at); j++ {
					require.GreaterOrEqual(t, at[j]-at[j-1], base)
					require.LessOrEqual(t, at[j]-at[j-1], most)
				}
			}
		})
	})
}

func TestC08APollFindsTheFreeKeyWheneverItBecameFree(t *testing.T) {
	const most = 2 * time.Second // between two polls
	for _, after := range []time.Duration{0, time.Millisecond, 30 * time.Millisecond, 300 * time.Millisecond, 2500 * time.Millisecond, 20 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, b *bubbled) {
				k := b.locker()
				held, err := b.other().TryAcquire(context.Background(), "orders")
				require.NoError(t, err)
				var freed atomic.Int64
				release := func() {
					if err := held.Release(); err != nil {
						t.Error(err)
					}
					freed.Store(int64(b.now()))
				}
				b.fault(func(what string, execute func() error) error {
					err := execute()
					if what == "set" && after == 0 {
						release() // while the No is on its way
					}
					return err
				})
				if after > 0 {
					time.AfterFunc(after, release)
				}
				l, err := k.Acquire(context.Background(), "orders")
				require.NoError(t, err)
				require.LessOrEqual(t, b.now()-time.Duration(freed.Load()), most)
				require.NoError(t, l.Release())
			})
		})
	}
	t.Run("nobody releases it", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker()
			require.NoError(t, b.operator.Set(context.Background(), "orders", "crashed", 5*time.Second).Err())
			begun := b.now()
			l, err := k.Acquire(context.Background(), "orders")
			require.NoError(t, err)
			require.GreaterOrEqual(t, b.now()-begun, 5*time.Second)
			require.LessOrEqual(t, b.now()-begun, 5*time.Second+26*time.Millisecond, "a tick later")
			require.NoError(t, l.Release())
		})
	})
}

func TestC09TrustCountsFromTheTryThatSucceededAndNotFromTheWait(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const ttl, useful = time.Second, 900 * time.Millisecond
		k := b.locker(redislease.WithTTL(ttl))
		held, err := b.other(redislease.WithTTL(ttl)).TryAcquire(context.Background(), "orders")
		require.NoError(t, err)
		b.fault(func(_ string, execute func() error) error {
			defer time.Sleep(20 * time.Millisecond)
			return execute()
		})
		begun := b.now()
		time.AfterFunc(3*time.Second, func() { _ = held.Release() })
		l, err := k.Acquire(context.Background(), "orders")
		require.NoError(t, err)
		require.GreaterOrEqual(t, b.now()-begun, 3*time.Second)
		tries := b.sent("settle", begun)
		require.Equal(t, b.start.Add(tries[len(tries)-1]+useful), l.Until())
		require.Equal(t, useful-20*time.Millisecond, time.Until(l.Until()))
		time.Sleep(3 * time.Second)
		require.NoError(t, l.Err())
		require.NoError(t, l.Release())
	})
}

func TestC10AGrantThatComesAfterItsTrustIsNoLease(t *testing.T) {
	const ttl, useful = 400 * time.Millisecond, 360 * time.Millisecond
	t.Run("the SET alone is late", func(t *testing.T) {
		bubble(t, func(t *testing.T, b *bubbled) {
			k := b.locker(redislease.WithTTL(ttl), redislease.WithMaxRenewals(0))
			b.fault(func(what string, execute func() error) error {
				if what == "set" {
					defer time.Sleep(600 * time.Millisecond)
				}
				return execute()
			})
			begun := b.now()
			l := b.acquire(k)
			require.Less(t, b.now()-begun, useful, "settled in time, it is a lease")
			require.Equal(t, b.start.Add(begun+useful), l.Until())
			<-l.Context().Done()
			require.Equal(t, begun+useful, b.now())
			require.ErrorIs(t, l.Err(), redislease.ErrLost, "nothing left is not held")
			_ = l.Release()
			time.Sleep(time.Second)
		})
	})
	for _, late := range []time.Duration{600 * time.Millisecond, 399 * time.Millisecond} {
		for _, waiting := range []bool{false, true} {
			t.Run(fmt.Sprintf("everything is late by %v, waiting %v", late, waiting), func(t *testing.T) {
				bubble(t, func(t *testing.T, b *bubbled) {
					k := b.locker(redislease.WithTTL(ttl))
					b.fault(func(_ string, execute func() error) error {
						defer time.Sleep(late)
						return execute()
					})
					verb := k.TryAcquire
					if waiting {
						verb = k.Acquire
					}
					begun := b.now()
					l, err := verb(context.Background(), "orders", redislease.WithAcquireTimeout(3*time.Second))
					require.Nil(t, l)
					require.Error(t, err)
					require.NotErrorIs(t, err, redislease.ErrNotAcquired)
					require.NotEmpty(t, b.sent("release", begun), "it is given back")
					time.Sleep(10 * time.Second) // for what is late still, and what follows from it
					require.Empty(t, b.get("orders"))
					require.Empty(t, b.sent("renew", begun))
				})
			})
		}
	}
}

func TestC13DifferentPrefixesNeverContendAndEqualKeysAlwaysDo(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		ctx := context.Background()
		staging, production := w.locker(redislease.WithPrefix("staging:")), w.locker(redislease.WithPrefix("production:"))
		first, second := acquire(t, staging, "orders"), acquire(t, production, "orders")
		require.Equal(t, first.Token(), w.get("staging:orders"))
		require.Equal(t, second.Token(), w.get("production:orders"))
		_, err := w.locker(redislease.WithPrefix("staging:")).TryAcquire(ctx, "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)

		acquire(t, w.locker(redislease.WithPrefix("a:b")), "c")
		acquire(t, w.locker(redislease.WithPrefix("a")), "b:c")
		require.NotEmpty(t, w.get("a:bc"))
		require.NotEmpty(t, w.get("ab:c"))
		_, err = w.locker(redislease.WithPrefix("a:")).TryAcquire(ctx, "bc")
		require.ErrorIs(t, err, redislease.ErrNotAcquired, "the key in Redis is prefix and key as they are, and that alone counts")
	})
}

func TestC14ALeaseThatWasNeverAcquiredCanBeReleased(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		k := b.locker()
		require.NoError(t, b.operator.Set(context.Background(), "orders", "other", 0).Err())
		none, err := k.TryAcquire(context.Background(), "orders")
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
		n := b.sentAny()
		require.NoError(t, none.Release(), "a deferred one does no harm")
		require.ErrorIs(t, new(redislease.Lease).Release(), redislease.ErrReleased)
		for _, l := range []*redislease.Lease{none, {}} {
			require.Error(t, l.Context().Err())
			require.ErrorIs(t, context.Cause(l.Context()), redislease.ErrReleased)
			require.ErrorIs(t, l.Err(), redislease.ErrReleased)
			require.ErrorIs(t, l.Renew(context.Background()), redislease.ErrReleased)
			require.Empty(t, l.Token())
		}
		synctest.Wait()
		require.Equal(t, n, b.sentAny())
		require.Equal(t, "other", b.get("orders"))
	})
}

func TestC15TwoLeasesOfOneLockerAreTwoHolders(t *testing.T) {
	everywhere(t, func(t *testing.T, w *world) {
		k := w.locker()
		first := acquireSlowly(t, k, "orders", redislease.WithTTL(500*time.Millisecond), redislease.WithMaxRenewals(0))
		require.ErrorIs(t, ended(t, first), redislease.ErrLost)
		require.Eventually(t, func() bool { return w.get("orders") == "" }, patience, time.Millisecond)
		second := acquire(t, k, "orders")
		require.NotEqual(t, first.Token(), second.Token())
		require.ErrorIs(t, first.Release(), redislease.ErrLost)
		require.Equal(t, second.Token(), w.get("orders"))
		require.NoError(t, second.Renew(context.Background()))
	})
}

// TestC16NoTwoLeasesEverHaveTheSameToken draws tokens in two processes of one host at once. They cannot be given the same
// pid; but what of a token is made of a pid, a clock, a counter or a name is not random, and that shows. Hence fewer
// tokens than in the story.
func TestC16NoTwoLeasesEverHaveTheSameToken(t *testing.T) {
	const workers, each = 64, 100
	k := newLocker(t, agreeable, redislease.WithAcquireTimeout(patience))
	draw := func() []string {
		tokens := make([]string, workers*each)
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() {
				for j := range each {
					l, err := k.TryAcquire(context.Background(), "orders")
					if err != nil {
						t.Error(err)
						return
					}
					tokens[i*each+j] = l.Token()
					_ = l.Release()
				}
			})
		}
		wg.Wait()
		return tokens
	}
	if _, ok := inAnother(); ok {
		fmt.Println(strings.Join(draw(), "\n"))
		os.Exit(0)
	}
	t.Parallel()
	other := another(t, "none")
	tokens := draw()
	for range workers * each {
		tokens = append(tokens, other.line())
	}
	seen := map[string]bool{}
	var ones [128]int
	for _, token := range tokens {
		id, err := uuid.Parse(token)
		require.NoError(t, err)
		require.False(t, seen[token], "twice")
		seen[token] = true
		for bit := range ones {
			ones[bit] += int(id[bit/8] >> (bit % 8) & 1)
		}
	}
	random := 0
	for _, n := range ones {
		if part := float64(n) / float64(len(tokens)); part > 0.45 && part < 0.55 { // off by more than ten sigma
			random++
		}
	}
	require.Equal(t, 122, random, "bits that look like those of a coin")
}

func TestC17AProcessThatIsStartedAnewDoesNotTakeItsOldKeyForItsOwn(t *testing.T) {
	const ttl = 4 * time.Second
	if addr, ok := inAnother(); ok {
		l := acquireSlowly(t, newLocker(t, connect(t, addr), redislease.WithTTL(ttl), redislease.WithFencing()), "orders")
		fmt.Println(l.Token())
		fmt.Println(l.Fence())
		select {}
	}
	t.Parallel()
	w := newWorld(t, redistest.Start(t).Addr())
	first := another(t, w.addr)
	token, fence := first.line(), first.line()
	require.Equal(t, token, w.get("orders"))
	require.Equal(t, fence, w.get(ordersFence))
	require.NoError(t, first.cmd.Process.Kill())
	_ = first.cmd.Wait()

	ctx := context.Background()
	k := w.locker(redislease.WithTTL(ttl), redislease.WithFencing())
	asked, left := time.Now(), w.pttl("orders")-2*time.Millisecond
	l, err := k.TryAcquire(ctx, "orders")
	if time.Since(asked) < left {
		require.ErrorIs(t, err, redislease.ErrNotAcquired)
	}
	_ = l.Release()
	l = acquireSlowly(t, k, "orders")
	require.GreaterOrEqual(t, time.Since(asked), left, "not before the old key has lapsed")
	require.NotEqual(t, token, l.Token())
	before, err := strconv.ParseInt(fence, 10, 64)
	require.NoError(t, err)
	require.Greater(t, l.Fence(), before)
	require.NoError(t, l.Release())
}

func TestC18OneLockerWithOneBackoffServesManyWaiters(t *testing.T) {
	bubble(t, func(t *testing.T, b *bubbled) {
		const waiters, keys = 50, 10
		var mu sync.Mutex
		asked := map[int]int{}
		opts := []redislease.Option{redislease.WithTTL(10 * time.Second), redislease.WithBackoff(func(attempt int) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			asked[attempt]++
			return min(time.Millisecond<<min(attempt-1, 10), 100*time.Millisecond)
		})}
		k := b.locker()
		for i := range keys {
			require.NoError(t, b.operator.Set(context.Background(), fmt.Sprint("orders:", i), "other", time.Second).Err())
		}
		var wg sync.WaitGroup
		for i := range waiters {
			wg.Go(func() {
				l, err := k.Acquire(context.Background(), fmt.Sprint("orders:", i%keys), opts...)
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(10 * time.Millisecond)
				if err := l.Release(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.GreaterOrEqual(t, asked[1], keys, "whoever waits begins at the base")
		for attempt := 2; attempt <= len(asked); attempt++ {
			require.Positive(t, asked[attempt])
			require.LessOrEqual(t, asked[attempt], asked[attempt-1], "and leaves out no step")
		}
	})
}
