package sim

import (
	"context"
	"encoding"
	"errors"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

type (
	acquisitionKey struct{} // of the acquisition in a context
	manualKey      struct{} // of a call of Renew
)

// client is a go-redis client in a process, wrapped as users wrap theirs. What the wrapper adds is a delay of less than
// ten microseconds, by which two commands of a process hardly ever set out at one instant, and a renewal and a release of
// a lease never, and now and then a hook that misbehaves.
type client struct {
	p     *process
	redis *redis.Client
}

func newClient(p *process) *client {
	c := from(p.place, name("client"))
	o := &redis.Options{
		Addr:            "127.0.0.1:1", // a name would be looked up outside of the bubble
		PoolSize:        10000,         // waiting for a turn uses timers from outside of the bubble
		DisableIdentity: true,
		MinRetryBackoff: -1, // its jitter would come from a source that all share
		Protocol:        2 + c.below(2),
		ReadTimeout:     []time.Duration{0, 300 * time.Millisecond, time.Second, -1}[c.below(4)],

		ContextTimeoutEnabled:    c.hits(0.5),
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		p.gate()
		conn := p.w.dial(p)
		if r := from(conn.place, name("dial")); r.hits(p.w.weather.refusedDials) && !p.w.healed(time.Now()) {
			p.w.count("connection refused")
			_ = conn.Close()
			return nil, &net.OpError{Op: "dial", Net: "sim", Err: syscall.ECONNREFUSED}
		}
		return conn, nil
	}
	return &client{p, redis.NewClient(o)}
}

var errOfHook = errors.New("a hook failed")

// Process implements [redislease.RedisClient].
func (c *client) Process(ctx context.Context, cmd redis.Cmder) error {
	a, _ := ctx.Value(acquisitionKey{}).(*acquisition)
	w, tokens := identify(cmd)
	o := c.p.w.oracle
	x := from(c.p.place, a.id, uint64(w), uint64(len(tokens)), uint64(time.Now().UnixNano()))
	time.Sleep(5*x.between(1, 2*time.Microsecond) + time.Duration(w))
	c.p.gate()
	called := o.calling(a, w, tokens, ctx.Value(manualKey{}) != nil)
	err := errOfHook // unless it returns
	defer func() {
		yes, index := isYes(cmd, w, err)
		o.answered(called, yes, isNo(cmd, w, err), index, err)
	}()
	err = c.process(x, []*acquisition{a}, []redis.Cmder{cmd}, func() error { return c.redis.Process(ctx, cmd) })
	if ctx.Err() != nil {
		time.Sleep(x.between(1, time.Microsecond)) // or all commands of an acquisition end at the instant at which its context does
	}
	return err
}

// Subscribe has waiters woken.
func (c *client) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	return c.redis.Subscribe(ctx, channels...)
}

// pipeline executes renewals as one pipeline.
func (c *client) pipeline(cmds []redis.Cmder) error {
	o := c.p.w.oracle
	x := from(c.p.place, name("pipeline"), uint64(time.Now().UnixNano()))
	time.Sleep(x.between(1, time.Microsecond))
	c.p.gate()
	o.gathered(len(cmds))
	owners, calls := make([]*acquisition, len(cmds)), make([]*call, len(cmds))
	for i, cmd := range cmds {
		_, tokens := identify(cmd)
		owners[i] = o.owner(tokens[0])
		calls[i] = o.calling(owners[i], whatRenew, tokens, false)
	}
	err := errOfHook
	defer func() {
		for i, cmd := range cmds {
			ofCommand := cmd.Err()
			if ofCommand == nil && cmd.(interface{ Val() any }).Val() == nil {
				ofCommand = err
			}
			yes, index := isYes(cmd, whatRenew, ofCommand)
			o.answered(calls[i], yes, isNo(cmd, whatRenew, ofCommand), index, ofCommand)
		}
	}()
	err = c.process(x, owners, cmds, func() error {
		ctx, p := context.Background(), c.redis.Pipeline()
		_ = p.BatchProcess(ctx, cmds...)
		_, err := p.Exec(ctx)
		return err
	})
	return err
}

// process executes commands, under a hook that may misbehave.
func (c *client) process(x *chance, owners []*acquisition, cmds []redis.Cmder, execute func() error) error {
	w := c.p.w
	if !x.hits(w.weather.hooks) || w.healed(time.Now()) {
		return execute()
	}
	set := func(err error) error {
		for _, cmd := range cmds {
			cmd.SetErr(err)
		}
		return err
	}
	switch x.below(5) {
	case 0:
		w.count("hook that fails before the command")
		return set(errOfHook)
	case 1:
		w.count("hook that fails after the command")
		_ = execute()
		return set(errOfHook)
	case 2:
		w.count("hook that sends a command twice")
		for _, a := range owners {
			w.oracle.hooked(a)
		}
		_ = execute()
		_ = set(nil)
		return execute()
	case 3:
		w.count("hook that panics")
		if x.hits(0.5) {
			_ = execute()
		}
		_ = set(errOfHook)
		panic(errOfHook)
	default:
		w.count("hook that is slow")
		err := execute()
		c.p.sleep(x.between(0, ttlMost))
		return err
	}
}

// identify tells what a command is, and its tokens. The last argument is not looked at: that is asking whether the
// command is still wanted.
func identify(cmd redis.Cmder) (w what, tokens []string) {
	args := cmd.Args()
	if w = whatSet; cmd.Name() == "eval" {
		w = scriptOf(args[1].(string))
	}
	for _, arg := range args[:len(args)-1] {
		if token, ok := arg.(encoding.BinaryMarshaler); ok {
			b, _ := token.MarshalBinary()
			tokens = append(tokens, string(b))
		}
	}
	return w, tokens
}

// isYes reads an answer as the documentation of the scripts says.
func isYes(cmd redis.Cmder, w what, err error) (yes bool, index int64) {
	if err != nil || cmd.Err() != nil {
		return false, 0
	}
	switch c := cmd.(type) {
	case interface{ Val() bool }:
		return c.Val(), 0
	case interface{ Val() any }:
		switch v := c.Val().(type) {
		case int64:
			return v == 1, 0
		case []any:
			if len(v) >= 2 && v[0] == int64(1) {
				index, _ = v[1].(int64)
				return true, index
			}
		}
	}
	return false, 0
}

// isNo: the answer says No, or that nothing was done.
func isNo(cmd redis.Cmder, w what, err error) bool {
	if err == nil {
		err = cmd.Err()
	}
	if err != nil && !errors.Is(err, redis.Nil) {
		return err.Error() == spoiltFence || slices.Contains(notExecuted, err.Error())
	}
	switch c := cmd.(type) {
	case interface{ Val() bool }:
		return !c.Val()
	case interface{ Val() any }:
		switch v := c.Val().(type) {
		case int64:
			return w != whatSettle && (v == 0 || v == -1)
		case []any:
			return w == whatSettle && len(v) == 2 && v[0] == int64(0)
		}
	}
	return false
}
