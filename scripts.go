package redislease

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// The scripts. Common to all: KEYS[1] is the lock's key, taken literally. The last of ARGV is written at the moment
// of sending and is '0' if nobody wants the command any more; that is refused before anything is done. A key of the
// wrong type is somebody else's. The step that changes the key is the last that can fail. Texts that every lease sends
// are terse, since they go out each time.
const (
	// refuseLua begins scripts about several tokens. held is the value, false without a key, or true if it is no
	// string.
	refuseLua = `if ARGV[#ARGV] == '0' then return redis.error_reply('ERR withdrawn') end
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' then
if not held.err:find('WRONGTYPE') then return held end
held = true
end
`

	// settleLua finds out what became of earlier tries, and takes the key if it is free.
	// ARGV: the unanswered tokens, a new token, the TTL in ms.
	// Returns {1, i}: the i-th token, from 1, holds the key. {1, 0}: it was free and is now the new token's.
	// {0, pttl}: it is another's, for pttl ms more; 0, -1 and -2 are no times.
	settleLua = refuseLua + `if held then
for i = 1, #ARGV - 1 do if held == ARGV[i] then return {1, i} end end
` + anothersLua + `redis.call('SET', KEYS[1], ARGV[#ARGV - 1], 'PX', ARGV[#ARGV])
return {1, 0}`

	anothersLua = `local pttl = redis.pcall('PTTL', KEYS[1])
return {0, type(pttl) == 'number' and pttl or -1}
end
`

	// fenceLua is settleLua for leases with a fence, the latest of which KEYS[2] keeps.
	// ARGV: the unanswered tokens, a new token, the least that a new fence may be, the caller's time in µs, for how long to
	// keep the fence in ms, the TTL in ms.
	// Returns what settleLua does; after a 1 and its index the fence follows, or -1 if it is not to be had any more. If
	// what is kept is no integer below 2^53 that is an error with the code FENCE. Lua's tostring would round the number.
	fenceLua = refuseLua + `local function last()
local v = redis.pcall('GET', KEYS[2])
if type(v) == 'table' and not v.err:find('WRONGTYPE') then return nil, v end
local n = not v and 0 or type(v) == 'string' and v:find('^-?%d+$') and tonumber(v)
if n and n < 2^53 then return n end
return nil, redis.error_reply('FENCE what is kept as the latest fence is no integer below 9007199254740992')
end
if held then
for i = 1, #ARGV - 4 do if held == ARGV[i] then
local n = last()
return {1, i, n and n >= 1 and n or -1}
end end
` + anothersLua + `local n, err = last()
if err then return err end
local time = redis.pcall('TIME')
time = time.err and tonumber(ARGV[#ARGV - 2]) or tonumber(time[1]) * 1000000 + tonumber(time[2])
local fence = math.max(n + 1, tonumber(ARGV[#ARGV - 3]), time)
if fence >= 2^53 then return redis.error_reply('FENCE no fence is left below 9007199254740992') end
redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[#ARGV - 1])
redis.call('SET', KEYS[1], ARGV[#ARGV - 4], 'PX', ARGV[#ARGV])
return {1, 0, fence}`

	// cleanUpLua is releaseLua for several tokens. ARGV: the tokens, '1'.
	cleanUpLua = refuseLua + `for i = 1, #ARGV - 1 do if held == ARGV[i] then held = nil end end
if held then return -1 end
`

	// oursLua begins scripts about one token, and goes on if the key is its own or gone. v.err is nil if v is a string.
	oursLua = `if ARGV[2]=='0' then return {err='ERR withdrawn'} end
local v=redis.pcall('GET',KEYS[1])
if v and v~=ARGV[1] then return v.err and not v.err:find('WRONGTYPE') and v or -1 end
`

	// renewLua extends the key if it is still ours. ARGV: the token, the TTL in ms.
	// Returns 1: extended. 0: the key is gone. -1: it is another's.
	// Without a key the command runs, too: a user who may not is found out by the first acquisition.
	renewLua = oursLua + `return redis.call('PEXPIRE',KEYS[1],ARGV[2])`

	// releaseLua deletes the key if it is still ours. ARGV: the token, '1'.
	// Returns 1: deleted. 2: deleted, but not published. 0: the key was gone. -1: it is another's.
	releaseLua = oursLua

	// deleteLua ends the scripts that delete the key. publishLua then tells those who wait for it; that it may not harms
	// nobody. Where a server refuses the script for that, deleteLua does without.
	deleteLua  = `return redis.call('DEL',KEYS[1])`
	publishLua = `local n=redis.call('DEL',KEYS[1])
if n==1 and type(redis.pcall('PUBLISH',KEYS[1]..'` + releasedSuffix + `',''))=='table' then return 2 end
return n`
)

// verdict is what is known about a command after its answer.
type verdict uint8

const (
	unanswered verdict = iota
	yes                // executed, and it did what it is for
	no                 // executed, and it changed nothing: see code
	failed             // certainly not executed
	unknown            // may have been executed or not, now or later
)

// kind is what a command is for.
type kind uint8

const (
	kindSet kind = iota
	kindSettle
	kindRenew
	kindRelease
)

// token is what a key holds: the text of a random UUID.
type token [36]byte

func newToken(t *token) error {
	id, err := uuid.NewRandom()
	if err != nil {
		return fmt.Errorf("no random token: %w", err)
	}
	text := hex.AppendEncode(t[:0], id[:4])
	for _, part := range [][]byte{id[4:6], id[6:8], id[8:10], id[10:]} {
		text = hex.AppendEncode(append(text, '-'), part)
	}
	return nil
}

// MarshalBinary implements [encoding.BinaryMarshaler], by which go-redis writes arguments.
func (t *token) MarshalBinary() ([]byte, error) { return t[:], nil }

// Format keeps the token out of whatever a hook prints or traces.
func (t *token) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, "[token]") }

// target is what an acquisition, its lease and all their commands have in common.
type target struct {
	locker *Locker
	config *config
	ctx    context.Context // the caller's
	key    any             // the key in Redis, prefix included, ready to be an argument
	base   instant         // what readings of the clock are relative to
	ahead  atomic.Int64    // see clock.elapsed
	alarm  *alarm          // the one that was set last
	place  int             // there; guarded by its shard
	armed  atomic.Int64    // when it goes off, by the monotonic clock, which timers follow; 0: it is not known to
	signal chan struct{}   // an answer has come in, or an alarm went off: look again
	lease  atomic.Pointer[Lease]
}

// name is the key as the caller gave it.
func (t *target) name() string { return t.key.(string)[len(t.config.prefix):] }

// now reads the clock.
func (t *target) now() time.Duration {
	return t.locker.clock.elapsed(&t.base, t.config.margin/4, &t.ahead)
}

// wallClock is the time of day.
func (t *target) wallClock() time.Time {
	_, wall, _ := t.locker.clock.since(&t.base)
	return t.base.time.Add(wall)
}

// ring fills signal.
func (t *target) ring() { signal(t.signal) }

// command returns a command that is ready to run. Its context has ctx's values and ends when ctx does, but has no
// deadline: a late answer is of use.
func (t *target) command(ctx context.Context, o owner, k kind, token *token) *command {
	return &command{target: t, ctx: ctx, owner: o, kind: k, token: token}
}

// deletion returns a command that gives back the key if the token holds it. The caller's context does not end it.
func (t *target) deletion(o owner, token *token) *command {
	ctx := t.ctx
	if ctx.Done() != nil {
		ctx = context.WithoutCancel(ctx)
	}
	return t.command(ctx, o, kindRelease, token)
}

// owner is whoever a command is sent for: an acquisition, or a lease.
type owner interface {
	// wanted says what time it is for the owner, and whether it still wants c to be sent. It is asked just before each
	// write, on a goroutine of the client's.
	wanted(c *command) (now time.Duration, ok bool)
	// answered tells the owner that c's answer is known. It is called once, on c's own goroutine, or on that of its pipeline,
	// where it must not block.
	answered(c *command)
}

// command is one Redis command on its way. It is executed at most once: go-redis is told not to repeat it.
//
// go-redis may write a command long after anybody cares, when a pool or a handshake has held it up. So the last
// argument of each command is the command itself, marshalled when it is written: that is when trust in the answer
// starts, and when a command that nobody wants becomes one that Redis refuses. An error instead would make go-redis
// close the connection and fail whatever else is in the same pipeline.
//
// A command is also the context that go-redis gets with it: its ctx, without a deadline.
type command struct {
	*target
	ctx    context.Context
	owner  owner
	token  *token      // the token it carries
	listed *[]*command // see others
	inline [6]any      // room for the arguments

	// For the owner, which guards them.
	next     *command      // in the owner's list of answers
	began    time.Duration // when it was sent off
	doubtful time.Duration // acquiring: when its outcome became unknown
	until    time.Duration // acquiring: until when a renewal of its token was tried; holding: how long a call waits for it
	waiter   chan struct{} // holding: filled when it is answered or given up, if a call waits for just this

	mu   sync.Mutex
	sent atomic.Int64 // when it was first written, by the owner's clock, plus 1; 0: not yet

	// The answer, fixed before the owner hears of it.
	code int64 // renew, release: what the script returned. settle: the PTTL in ms, or the fence: noFence: not to be had; 0: none
	err  error // with failed and unknown

	writes    int32 // how often it was really written, where it may have been executed; guarded by mu, like withdrawn
	withdrawn bool  // it is written no more
	refused   bool  // the latest write was answered by a node that did not execute it; guarded by mu
	verdict   verdict
	kind      kind
	beside    bool  // it is sent beside one that is silent
	piped     bool  // it goes with others, and has no goroutine of its own
	check     bool  // acquiring: only to see whether the script can be run
	taken     bool  // acquiring: its answer has been taken into account
	settled   bool  // acquiring: a later answer has said that its token does not hold the key
	cleaned   bool  // acquiring: its token has been given back
	arrived   bool  // holding: its answer has come in
	manual    bool  // holding: a renewal that Renew asked for
	handed    bool  // holding: the waiting call has to deliver the event of the loss that was found
	who       uint8 // settle: which token holds the key, from 1; 0: its own
}

var (
	settleArg, fenceArg, renewArg any = settleLua, fenceLua, renewLua
	releaseArg, cleanUpArg        any = releaseLua + publishLua, cleanUpLua + publishLua
	quietRelease, quietCleanUp    any = releaseLua + deleteLua, cleanUpLua + deleteLua

	stampOne  = []byte("1")
	stampZero = []byte("0")

	errWithdrawn = errors.New("withdrawn before it was sent")
	errRewritten = errors.New("the client answered a command that it never wrote as given: it rewrites arguments, or does not execute")
	errTwice     = errors.New("the client wrote the command more than once, so that a No proves nothing")
	errGoexit    = errors.New("the client ended the goroutine of the command")
)

// The wrappers tell go-redis not to send a command again that it got no answer to.
type (
	onceBool struct{ *redis.BoolCmd }
	once     struct{ *redis.Cmd }
)

func (onceBool) NoRetry() bool { return true }
func (once) NoRetry() bool     { return true }

// These are for a client of a Redis Cluster, which sends a command on to another node if the first one refuses it, and
// tells the command of that refusal. Whether there was one cannot be asked later: a client that pipelines would wait.
type (
	sentOnBool struct {
		onceBool
		of *command
	}
	sentOn struct {
		once
		of *command
	}
)

func (s sentOnBool) SetErr(err error) {
	s.of.refusedBy(err)
	s.onceBool.SetErr(err)
}

func (s sentOn) SetErr(err error) {
	s.of.refusedBy(err)
	s.once.SetErr(err)
}

// refusedBy takes note of what became of the latest write.
func (c *command) refusedBy(err error) {
	refused := notExecuted(err)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused = refused
}

// sendsOn: the client may send a command on to another node.
func (k *Locker) sendsOn() bool {
	_, ok := k.client.(reloader)
	return ok
}

// reloader is a client of a Redis Cluster.
type reloader interface{ ReloadState(ctx context.Context) }

// run executes c and tells its owner. It belongs on a goroutine that can be left behind, whatever the client does.
func (c *command) run() {
	err := errGoexit
	defer func() {
		if r := recover(); r != nil {
			err = panicked(r)
		}
		c.conclude(err)
	}()
	if c.beside {
		c.locker.lookAnew()
	}
	err = c.process()
}

func panicked(r any) error { return fmt.Errorf("the client panicked: %v", r) }

// conclude tells c's owner what the answer, or err instead of it, means.
func (c *command) conclude(err error) {
	if c.judge(err); c.verdict != yes && c.verdict != no && !isReply(err) {
		c.locker.lookAnew()
	}
	if c.verdict == yes && c.kind == kindRelease {
		c.locker.published(c.code == 1 && !c.locker.quiet.Load())
	}
	c.owner.answered(c)
}

// lookAnew has a client of a Redis Cluster find out which nodes there are: one may be gone, and by itself go-redis looks
// every ten seconds only. go-redis sees to it that it is not done too often; a wrapper that blocks or panics there holds
// nothing up.
func (k *Locker) lookAnew() {
	if cluster, ok := k.client.(reloader); ok {
		go func() {
			defer func() { _ = recover() }()
			cluster.ReloadState(context.Background())
		}()
	}
}

// process has the client execute c. A refused SET costs go-redis a fifth of the allocations if it is read as a bool; the
// price is that a reply of another form, from a proxy say, is not told from a Yes or a No.
//
// What is on the stack while the client writes c, from run to the reading of the clock, is kept small: then a command
// that goes through an AutoPipeline gets by with the 2 kB that a goroutine starts with, and a tenth of its time is saved.
func (c *command) process() error {
	if c.kind != kindSet {
		cmd, given := c.scripted()
		return c.answer(cmd, c.locker.client.Process(c, given))
	}
	cmd, given := c.plain()
	processed := c.locker.client.Process(c, given)
	acquired, err := cmd.Result()
	if c.verdict = no; acquired {
		c.verdict = yes
	}
	return firstError(err, processed)
}

func (c *command) plain() (cmd *redis.BoolCmd, given redis.Cmder) {
	cmd = redis.NewBoolCmd(c, c.arguments()...)
	if c.locker.sendsOn() {
		return cmd, sentOnBool{onceBool{cmd}, c}
	}
	return cmd, onceBool{cmd}
}

func (c *command) scripted() (cmd *redis.Cmd, given redis.Cmder) {
	cmd = redis.NewCmd(c, c.arguments()...)
	if c.locker.sendsOn() {
		return cmd, sentOn{once{cmd}, c}
	}
	return cmd, once{cmd}
}

// pipeline has a client execute commands with one write and one read.
type pipeline func(cmds []redis.Cmder) error

// pipelined returns how to have client do that, or nil.
func pipelined(client RedisClient) pipeline {
	c, ok := client.(*redis.Client)
	if !ok {
		return nil
	}
	return func(cmds []redis.Cmder) error {
		ctx, p := context.Background(), c.Pipeline()
		if err := p.BatchProcess(ctx, cmds...); err != nil {
			return err
		}
		_, err := p.Exec(ctx)
		return err
	}
}

// run executes scripts and tells their owners. Like a command's run it belongs on a goroutine that can be left behind.
func (p pipeline) run(list []*command) {
	asked, cmds := make([]*redis.Cmd, len(list)), make([]redis.Cmder, len(list))
	for i, c := range list {
		c.piped = true
		asked[i] = redis.NewCmd(c, c.arguments()...)
		cmds[i] = once{asked[i]}
	}
	err := errGoexit
	defer func() {
		if r := recover(); r != nil {
			err = panicked(r)
		}
		for i, c := range list {
			ofProcess := err
			if asked[i].Val() != nil { // it is about another one
				ofProcess = nil
			}
			c.conclude(c.answer(asked[i], ofProcess))
		}
	}()
	err = p(cmds)
}

// answer reads the answer to a script.
func (c *command) answer(cmd *redis.Cmd, ofProcess error) error {
	reply, err := cmd.Result()
	if err = firstError(err, ofProcess); err != nil {
		return err
	}
	return c.read(reply)
}

// firstError prefers the error of the command: some clients return from Process before there is any.
func firstError(ofCommand, ofProcess error) error {
	if ofCommand != nil {
		return ofCommand
	}
	return ofProcess
}

// others returns the commands whose tokens c also asks about, or gives back.
func (c *command) others() []*command {
	if c.listed == nil {
		return nil
	}
	return *c.listed
}

func (c *command) arguments() []any {
	args := c.inline[:0]
	if c.kind == kindSet {
		return append(args, "set", c.key, c.token, "nx", "px", c)
	}
	fenced := c.fenced()
	if args = append(args, "eval", c.script(), "1", c.key); fenced {
		args[2] = "2"
		args = append(args, fenceKey(c.key.(string)))
	}
	for _, other := range c.others() {
		args = append(args, other.token)
	}
	if args = append(args, c.token); fenced {
		args = append(args, c.locker.fences.Load()+1, c.wallClock().UnixMicro(), c.config.keepFence().Milliseconds())
	}
	return append(args, c)
}

// fenced: c draws a fence, or asks for one.
func (c *command) fenced() bool { return c.kind == kindSettle && c.config.fencing }

// script is the text, as an argument.
func (c *command) script() any {
	switch {
	case c.fenced():
		return fenceArg
	case c.kind == kindSettle:
		return settleArg
	case c.kind == kindRenew:
		return renewArg
	case len(c.others()) > 0 && c.locker.quiet.Load():
		return quietCleanUp
	case len(c.others()) > 0:
		return cleanUpArg
	case c.locker.quiet.Load():
		return quietRelease
	default:
		return releaseArg
	}
}

// stamp is the last argument: the TTL, or '1' where none is needed.
func (c *command) stamp() []byte {
	if c.kind == kindRelease {
		return stampOne
	}
	return c.config.px
}

// read takes a script's reply apart.
func (c *command) read(reply any) error {
	switch r := reply.(type) {
	case int64:
		if c.kind != kindSettle && r >= -1 && (r <= 1 || r == 2 && c.kind == kindRelease) {
			c.code = r
			if c.verdict = no; r >= 1 {
				c.verdict = yes
			}
			return nil
		}
	case []any:
		if c.kind == kindSettle && c.readSettled(r) {
			return nil
		}
	}
	return fmt.Errorf("a reply of an unexpected form (%T)", reply)
}

// readSettled takes the reply to a settling script apart, and returns false if it is none.
func (c *command) readSettled(reply []any) bool {
	var numbers [3]int64
	if len(reply) > len(numbers) {
		return false
	}
	for i, v := range reply {
		n, ok := v.(int64)
		if !ok {
			return false
		}
		numbers[i] = n
	}
	ours, who, fence := numbers[0], numbers[1], numbers[2]
	length := 2
	if ours == 1 && c.fenced() {
		length = 3
	}
	switch {
	case len(reply) != length:
		return false
	case ours == 0:
		c.verdict, c.code = no, who // which is the PTTL
		return true
	case ours != 1 || who < 0 || who > int64(len(c.others()))+1:
		return false
	case length == 3 && fence < 1 && (who == 0 || fence != noFence):
		return false
	}
	c.verdict, c.who, c.code = yes, uint8(who), fence
	return true
}

// holder returns the command whose token holds the key after a Yes to c.
func (c *command) holder() *command {
	if i := int(c.who); i > 0 && i <= len(c.others()) {
		return c.others()[i-1]
	}
	return c
}

// judge decides what the answer, or the lack of it, means.
func (c *command) judge(err error) {
	ended := c.ctx.Err() != nil
	c.mu.Lock()
	writes, withdrawn := c.writes, c.withdrawn || ended
	c.withdrawn = true // an answered command is written no more, whatever a hook goes on doing with it
	c.mu.Unlock()
	switch {
	case writes == 0 && withdrawn:
		c.verdict, c.err = failed, errWithdrawn
	case writes == 0 && err == nil:
		c.verdict, c.err = failed, errRewritten
	case writes == 0 || err != nil && writes == 1 && notExecuted(err):
		c.verdict, c.err = failed, ofClient(c.redact(err))
	case err != nil:
		c.verdict, c.err = unknown, ofClient(c.redact(err))
	case writes > 1 && c.verdict == no && (c.kind == kindSet || c.kind == kindRelease && !c.check):
		// The No may be about what an earlier write of the same command did. The settling script, however often it is
		// executed, recognises its own token, and a renewal changes nothing that could make it say No.
		c.verdict, c.err = unknown, errTwice
	}
}

// redact keeps c's tokens out of the message of err: Redis repeats the arguments of a command that it does not know.
func (c *command) redact(err error) error {
	if !isReply(err) { // the Error of a hook's error may do anything
		return err
	}
	text := err.Error()
	clean := text
	for _, other := range append([]*command{c}, c.others()...) {
		clean = strings.ReplaceAll(clean, string(other.token[:]), "[token]")
	}
	if clean == text {
		return err
	}
	return &redacted{err, clean}
}

// notExecutedCodes are those of error replies by which Redis says that it did nothing.
var notExecutedCodes = []string{"NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN",
	"READONLY", "BUSY", "NOAUTH", "WRONGPASS", "NOPERM", "NOREPLICAS", "MISCONF", "OOM", "CROSSSLOT", "FENCE"}

// notExecuted: err is an error reply with such a code. Redis 6.2 and miniredis put text before the code of an error
// that comes out of a script.
func notExecuted(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	code, text, _ := strings.Cut(reply.Error(), " ")
	for _, c := range notExecutedCodes {
		if code == c || code == "ERR" && (strings.Contains(text, ": "+c+" ") || strings.Contains(text, ": -"+c+" ")) {
			return true
		}
	}
	return false
}

// isReply: err is an error reply of Redis, or of something that speaks for it.
func isReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// outcome is the verdict once the answer has come in. Its owner's mutex is held.
func (c *command) outcome() verdict {
	if !c.arrived {
		return unanswered
	}
	return c.verdict
}

// withdraw keeps c from being sent, unless it has been, and returns whether it was in time.
func (c *command) withdraw() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.withdrawn = c.withdrawn || c.writes == 0
	return c.writes == 0
}

// writeNoMore keeps c from being written again, and returns how often it has been.
func (c *command) writeNoMore() int32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.withdrawn = true
	return c.writes
}

// sentAt returns when c was first written, and whether it was.
func (c *command) sentAt() (time.Duration, bool) {
	sent := c.sent.Load()
	return time.Duration(sent - 1), sent != 0
}

// sentTime is when a command that was answered had been sent.
func (c *command) sentTime() time.Duration {
	sent, _ := c.sentAt()
	return sent
}

// MarshalBinary implements [encoding.BinaryMarshaler]: go-redis is about to write c.
func (c *command) MarshalBinary() ([]byte, error) {
	now, ok := c.owner.wanted(c)
	return c.written(now, ok), nil
}

// written takes note that c is about to be written, and returns its last argument.
func (c *command) written(now time.Duration, ok bool) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writes > 0 && c.refused { // MOVED or ASK: it goes to another node
		c.writes--
	}
	c.refused = false
	c.withdrawn = c.withdrawn || !ok && c.writes == 0
	if !ok || c.withdrawn {
		return stampZero
	}
	if c.sent.Load() == 0 {
		c.sent.Store(int64(now) + 1)
	}
	c.writes++
	return c.stamp()
}

// Format prints the last argument, for hooks that print or trace commands.
func (c *command) Format(f fmt.State, _ rune) { _, _ = f.Write(c.stamp()) }

// Deadline implements [context.Context].
func (c *command) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements [context.Context].
func (c *command) Done() <-chan struct{} { return c.ctx.Done() }

// Err implements [context.Context].
func (c *command) Err() error { return c.ctx.Err() }

// Value implements [context.Context].
func (c *command) Value(key any) any { return c.ctx.Value(key) }

// signal fills a channel of capacity 1 that somebody waits on. A nil channel stands for nobody.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
