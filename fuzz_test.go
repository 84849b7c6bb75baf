package redislease_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/stretchr/testify/require"

	"github.com/redislease/redislease"
)

// The fuzzers here run go-redis against a server in memory, each input in a bubble of its own.

// wire is such a server: it does the handshake and leaves every other command to answer.
type wire struct {
	mu       sync.Mutex // not held while time passes: a bubble's stands still then
	answer   func(args []string) (reply string, hangUp bool)
	commands int
}

const wireTimeout = 80 * time.Millisecond // less than a tenth of the TTLs of FuzzReplies: nothing is sent beside

// client returns a client of the server. It belongs to a bubble, so it has to be closed.
func (w *wire) client(protocol int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr:                     "127.0.0.1:1",
		Dialer:                   func(context.Context, string, string) (net.Conn, error) { return w.dial(), nil },
		Protocol:                 protocol,
		PoolSize:                 100, // see bubble
		MaxRetries:               -1,
		MinRetryBackoff:          -1,
		ReadTimeout:              wireTimeout,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

func (w *wire) dial() net.Conn {
	ours, theirs := net.Pipe()
	go func() {
		defer func() { _ = ours.Close() }()
		for r := bufio.NewReader(ours); ; {
			args, err := readCommand(r)
			if err != nil {
				return
			}
			reply, hangUp := "%1\r\n+proto\r\n:3\r\n", false
			if args[0] != "hello" {
				w.mu.Lock()
				if w.commands++; w.commands > 10_000 {
					panic("a tight loop: it would last for as long as virtual time stands still")
				}
				reply, hangUp = w.answer(args)
				w.mu.Unlock()
			} else if args[1] == "2" {
				reply = "*2\r\n+proto\r\n:2\r\n"
			}
			if _, err := io.WriteString(ours, reply); err != nil || hangUp {
				return
			}
		}
	}()
	return theirs
}

// readCommand reads a command as clients send it: an array of bulk strings.
func readCommand(r *bufio.Reader) ([]string, error) {
	length := func(kind byte) (int, error) {
		line, err := r.ReadString('\n')
		if err != nil {
			return 0, err
		}
		if line[0] != kind {
			return 0, fmt.Errorf("not what clients send: %q", line)
		}
		return strconv.Atoi(strings.TrimSpace(line[1:]))
	}
	n, err := length('*')
	args := make([]string, n)
	for i := range args {
		size, err := length('$')
		if err != nil {
			return nil, err
		}
		text := make([]byte, size+2)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, err
		}
		args[i] = string(text[:size])
	}
	return args, err
}

// lastOf is the last argument of a command, '0' if it was withdrawn.
func lastOf(args []string) string { return args[len(args)-1] }

// kindOf tells the library's commands apart.
func kindOf(args []string) string {
	if args[0] == "eval" {
		return scriptName(args[1])
	}
	return args[0]
}

// separate is a client that has a connection for each command, so that what a reply leaves behind on it does not matter.
type separate struct {
	*wire
	protocol int
}

func (s separate) Process(ctx context.Context, cmd redis.Cmder) error {
	client := s.client(s.protocol)
	defer func() { _ = client.Close() }()
	return client.Process(ctx, cmd)
}

// replies is an input of FuzzReplies: what is answered to each command, as bytes. Of settle there may be several, a NUL
// apart, for one settling script after the other.
type replies struct {
	protocol                   int
	hangUp                     bool // after each reply the connection is closed; else it stays open and silent
	watchdog                   bool // the renewals are those of the watchdog, not of Renew
	shared                     bool // the commands share connections
	check, set, renew, release string
	settles                    []string
}

// FuzzReplies has a server answer the library's commands with anything at all.
func FuzzReplies(f *testing.F) {
	const check = ":0\r\n"
	for _, set := range []string{"+OK\r\n", "$-1\r\n", "_\r\n", "+QUEUED\r\n", "$2\r\nOK\r\n", ":1\r\n", "#t\r\n", "#f\r\n", "$4\r\ntrue\r\n",
		"=6\r\ntxt:OK\r\n", ",1\r\n", "(1\r\n", "(-9\r\n", "*1\r\n+OK\r\n", "*-1\r\n", "%1\r\n+a\r\n:1\r\n", "~0\r\n", ">2\r\n+x\r\n+OK\r\n",
		">2\r\n+x\r\n:1\r\n+OK\r\n", "|1\r\n+ttl\r\n:9\r\n+OK\r\n", ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n+OK\r\n", "+OK", "+OK\n", "OK\r\n", "\r\n", "",
		"$2\r\nOK", "$9\r\nOK\r\n", "$-2\r\n", "+OK\r\n+OK\r\n", "HTTP/1.1 200 OK\r\n\r\n", ":99999999999999999999\r\n",
		"-READONLY You can't write against a read only replica.\r\n", "-ERR syntax error\r\n", "-LOADING\r\n", "-\r\n", "!7\r\nOOM no.\r\n",
		"-MOVED 1 127.0.0.1:2\r\n", "-ERR max number of clients reached\r\n", "*9223372036854775807\r\n"} {
		f.Add(byte(0), check, set, "*2\r\n:1\r\n:0\r\n", ":1\r\n", ":1\r\n")
		f.Add(byte(9), check, set, "*2\r\n:0\r\n:5000\r\n", ":1\r\n", ":1\r\n")
	}
	for _, settle := range []string{"*2\r\n:1\r\n:1\r\n", "*2\r\n:1\r\n:2\r\n", "*2\r\n:1\r\n:3\r\n", "*2\r\n:1\r\n:16\r\n", "*2\r\n:1\r\n:99\r\n", "*2\r\n:1\r\n:-1\r\n",
		"*2\r\n:0\r\n:-2\r\n", "*2\r\n:0\r\n:9223372036854775807\r\n", "*2\r\n:2\r\n:0\r\n", "*2\r\n$1\r\n1\r\n:0\r\n", "*1\r\n*2\r\n:1\r\n:0\r\n", "~2\r\n:1\r\n:0\r\n",
		"*2\r\n:1\r\n", "*3\r\n:1\r\n:0\r\n:0\r\n", "*2\r\n-ERR a\r\n-ERR b\r\n", "-NOSCRIPT no\r\n", "-OOMPH no\r\n", "-ERR a: OOMPH no\r\n", "*9223372036854775807\r\n",
		"\x00*2\r\n:1\r\n:1\r\n", "\x00-LOADING no\r\n\x00*2\r\n:1\r\n:2\r\n", "\x00\x00*2\r\n:1\r\n:0\r\n", "-OOM no\r\n\x00\x00*2\r\n:0\r\n:9\r\n", "-ERR Error running script: @user_script:1: OOM no\r\n", ":1\r\n", "$-1\r\n"} {
		f.Add(byte(1), check, "", settle, ":1\r\n", ":1\r\n")
		f.Add(byte(2), check, "+OK", settle, ":0\r\n", ":1\r\n")
		f.Add(byte(8), check, "!2\r\nno\r\n", settle, ":0\r\n", ":1\r\n")
	}
	for _, reply := range []string{":1\r\n", ":0\r\n", ":-1\r\n", ":2\r\n", ":-2\r\n", "+1\r\n", "+OK\r\n", "#t\r\n", "$1\r\n1\r\n", "_\r\n", "*1\r\n:1\r\n", "*0\r\n", ",1\r\n", "(1\r\n",
		"(99999999999999999999999999\r\n", ":1", "", "-ERR no\r\n", "-READONLY no\r\n", "-ERR x: -MASTERDOWN y\r\n", "-NOPERM no\r\n", "-OOMPH no\r\n", "-ERR x: OOMPH y\r\n", "-redis: nil\r\n", "*9223372036854775807\r\n"} {
		for _, mode := range []byte{0, 3, 4, 15} {
			f.Add(mode, check, "+OK\r\n", "", reply, ":1\r\n")
		}
		for _, mode := range []byte{1, 10} {
			f.Add(mode, check, "+OK\r\n", "", ":1\r\n", reply)
		}
		f.Add(byte(0), reply, "+OK\r\n", "", ":1\r\n", ":1\r\n")
	}
	// Lengths for which go-redis asks for memory at once would end the process, and are not the library's concern; those
	// that no allocation can satisfy are a panic.
	long := regexp.MustCompile(`[*$~>!=][+0]*[0-9]{4,16}\r|[|%][+0]*[0-9]{4,}`)
	f.Fuzz(func(t *testing.T, mode byte, check, set, settle, renew, release string) {
		r := replies{3 - int(mode&1), mode&2 == 0, mode&4 != 0, mode&8 != 0, check, set, renew, release, nil}
		for _, s := range []string{check, set, settle, renew, release} {
			if len(s) > 1000 || long.MatchString(s) {
				t.Skip()
			}
		}
		r.settles = strings.SplitN(settle, "\x00", 3) // so few that trust is never down to a third
		// go-redis does not notice that a pooled connection that is no socket was closed.
		r.hangUp = r.hangUp && !r.shared
		synctest.Test(t, func(t *testing.T) { newReplayed(t, r).run() })
	})
}

// replayed is an input of FuzzReplies while it is tried out.
type replayed struct {
	*testing.T
	replies
	wire   wire
	start  time.Time
	record record

	// What a plain go-redis command makes of each reply. SET is compared as text.
	read map[string]reading

	log     []logged // written by the server
	tokens  []string
	setSeen bool
	settled int
}

// logged is a command that the server got, and what it was answered.
type logged struct {
	kind   string
	at     time.Duration
	tokens []string
	reply  string
}

type reading struct {
	value any
	err   error
}

// meaning is what a reply says, by the rules for answers.
type meaning int

const (
	saysYes meaning = iota
	saysNo
	notExecuted
	unclear
)

func newReplayed(t *testing.T, r replies) *replayed {
	p := &replayed{T: t, replies: r, start: time.Now(), read: map[string]reading{}}
	p.wire.answer = p.answer
	for _, reply := range append(r.settles, r.check, r.renew, r.release) {
		p.read[reply] = p.readPlainly("eval", reply)
	}
	p.read["set"+r.set] = p.readPlainly("set", r.set)
	p.start = time.Now()
	return p
}

// readPlainly has go-redis read a reply.
func (p *replayed) readPlainly(kind, reply string) (r reading) {
	defer func() {
		if v := recover(); v != nil {
			r = reading{err: fmt.Errorf("panic: %v", v)}
		}
	}()
	w := wire{answer: func([]string) (string, bool) { return reply, p.hangUp }}
	client := w.client(p.protocol)
	defer func() { _ = client.Close() }()
	ctx := context.Background()
	if kind == "set" {
		cmd := redis.NewStringCmd(ctx, "set", "key")
		_ = client.Process(ctx, cmd)
		text, err := cmd.Result()
		return reading{text, err}
	}
	v, err := client.Do(ctx, "eval").Result()
	return reading{v, err}
}

// answer is the server. What was withdrawn is refused, as Redis does it.
func (p *replayed) answer(args []string) (string, bool) {
	kind := kindOf(args)
	entry := logged{kind: kind, at: time.Since(p.start), tokens: args[4:max(4, len(args)-1)]}
	if kind == "set" {
		entry.tokens = args[2:3]
	}
	p.tokens = append(p.tokens, entry.tokens...)
	if lastOf(args) == "0" {
		return "-ERR withdrawn\r\n", false
	}
	if p.setSeen = p.setSeen || kind == "set"; !p.setSeen {
		entry.kind = "check"
	}
	if kind == "settle" {
		entry.reply = p.settles[min(p.settled, len(p.settles)-1)]
		p.settled++
	} else {
		entry.reply = map[string]string{"check": p.check, "set": p.set, "renew": p.renew, "release": p.release}[entry.kind]
	}
	p.log = append(p.log, entry)
	return entry.reply, p.hangUp
}

// sent returns the commands of some kinds from the n-th command on.
func (p *replayed) sent(n int, kinds ...string) (list []logged) {
	p.wire.mu.Lock()
	defer p.wire.mu.Unlock()
	for _, l := range p.log[n:] {
		if slices.Contains(kinds, l.kind) {
			list = append(list, l)
		}
	}
	return list
}

var notExecutedReply = regexp.MustCompile(`(?s)^(?:ERR .*: -?)?(?:NOSCRIPT|MOVED|ASK|TRYAGAIN|CLUSTERDOWN|LOADING|MASTERDOWN|READONLY|BUSY|NOAUTH|WRONGPASS|NOPERM|NOREPLICAS|MISCONF|OOM|CROSSSLOT|FENCE)(?: |$)`)

func (p *replayed) reading(l logged) reading {
	if l.kind == "set" {
		return p.read["set"+l.reply]
	}
	return p.read[l.reply]
}

// meaning says what the reply to a command means.
func (p *replayed) meaning(l logged) meaning {
	r := p.reading(l)
	var refused redis.Error
	switch {
	case l.kind == "set" && r.err == redis.Nil:
		return saysNo
	case errors.As(r.err, &refused) && notExecutedReply.MatchString(refused.Error()):
		return notExecuted
	case r.err != nil:
		return unclear
	case l.kind == "set":
		// A bool command takes 1 and true for OK, and any other text for a No.
		if r.value == "OK" || r.value == "1" || r.value == "true" {
			return saysYes
		}
		return saysNo
	case l.kind == "settle":
		if list, ok := r.value.([]any); ok && len(list) == 2 {
			who, ok1 := list[0].(int64)
			index, ok2 := list[1].(int64)
			switch {
			case ok1 && ok2 && who == 0:
				return saysNo
			case ok1 && ok2 && who == 1 && index >= 0 && index <= int64(len(l.tokens)):
				return saysYes
			}
		}
		return unclear
	}
	switch r.value {
	case int64(1):
		return saysYes
	case int64(0), int64(-1):
		return saysNo
	case int64(2): // deleted, and nobody was told
		if l.kind == "release" {
			return saysYes
		}
	}
	return unclear
}

// granted is the token that a Yes says holds the key.
func (p *replayed) granted(l logged) string {
	if l.kind == "settle" {
		if index := p.reading(l).value.([]any)[1].(int64); index > 0 {
			return l.tokens[index-1]
		}
	}
	return l.tokens[len(l.tokens)-1]
}

// reason is the reason of the loss that a No means.
func (p *replayed) reason(reply string) error {
	if p.read[reply].value == int64(0) {
		return redislease.ErrGone
	}
	return redislease.ErrTaken
}

const (
	fuzzedKey = "or\"ders"
	fuzzedTTL = time.Second
	fuzzedUse = fuzzedTTL - fuzzedTTL/10
)

func (p *replayed) run() {
	var client redislease.RedisClient = separate{&p.wire, p.protocol}
	if p.shared {
		c := p.wire.client(p.protocol)
		defer func() { _ = c.Close() }()
		client = c
	}
	defer time.Sleep(3 * fuzzedTTL) // for whatever is left behind
	k := newLocker(p, client, redislease.WithTTL(fuzzedTTL), redislease.WithObserver(p.record.observe))
	l, err := k.TryAcquire(context.Background(), fuzzedKey)
	require.LessOrEqual(p, time.Since(p.start), fuzzedUse+fuzzedTTL/10, "the useful life, and a grace")
	require.LessOrEqual(p, len(p.sent(0, "check", "set", "settle", "release")), 60, "no tight loop")
	p.acquired(l, err)
	if l != nil {
		p.held(l)
	}
	p.finish(l != nil)
}

// acquired checks the end of the acquisition against what was answered.
func (p *replayed) acquired(l *redislease.Lease, err error) {
	require.Equal(p, l != nil, err == nil)
	p.inspect(err, 1)
	asked := p.sent(0, "set", "settle")
	m := p.meaning(p.sent(0, "check")[0])
	require.Equal(p, m == saysYes || m == saysNo, len(asked) > 0, "a key is asked for once the scripts are known to run, and not before")
	if len(asked) == 0 {
		require.Error(p, err)
		require.NotErrorIs(p, err, redislease.ErrNotAcquired)
		require.NotErrorIs(p, err, redislease.ErrOutcomeUnknown)
		return
	}
	doubt := false
	for i, a := range asked {
		last := i == len(asked)-1
		switch p.meaning(a) {
		case saysYes:
			require.NoError(p, err, "Redis said yes")
			require.True(p, last, "nothing is asked after a Yes")
			require.Equal(p, p.granted(a), l.Token())
			require.Equal(p, fuzzedKey, l.Key())
			return
		case saysNo:
			require.ErrorIs(p, err, redislease.ErrNotAcquired)
			require.True(p, last, "nothing is asked after a No")
			return
		case notExecuted:
			if !doubt {
				require.Error(p, err)
				require.NotErrorIs(p, err, redislease.ErrNotAcquired)
				require.NotErrorIs(p, err, redislease.ErrOutcomeUnknown)
				var refused redis.Error
				require.ErrorAs(p, err, &refused)
				require.True(p, last, "a Try ends with a refusal")
				return
			}
		default:
			doubt = true
		}
	}
	require.ErrorIs(p, err, redislease.ErrOutcomeUnknown)
}

// inspect checks what is true of every error, which may match most of the three kinds of bad news.
func (p *replayed) inspect(err error, most int) {
	if err == nil {
		return
	}
	n := 0
	for _, kind := range []error{redislease.ErrNotAcquired, redislease.ErrOutcomeUnknown, redislease.ErrLost} {
		if errors.Is(err, kind) {
			n++
		}
	}
	require.LessOrEqual(p, n, most, "%v", err)
	require.NotErrorIs(p, err, context.Canceled)
	require.NotErrorIs(p, err, context.DeadlineExceeded)
	require.Contains(p, err.Error(), strconv.Quote(fuzzedKey))
	p.wire.mu.Lock()
	defer p.wire.mu.Unlock()
	for _, token := range p.tokens {
		require.NotContains(p, err.Error(), token)
	}
}

// held renews and releases the lease, and checks what comes of it.
func (p *replayed) held(l *redislease.Lease) {
	require.NoError(p, l.Err())
	carrier := slices.IndexFunc(p.log, func(sent logged) bool { return lastOf(sent.tokens) == l.Token() })
	trust := p.start.Add(p.log[carrier].at + fuzzedUse)
	require.Equal(p, time.Until(trust), time.Until(l.Until()), "counted from the command that carried the token")
	n := len(p.sent(0, "set", "settle", "check", "renew", "release"))
	m := p.meaning(logged{kind: "renew", reply: p.renew})
	var err error
	if p.watchdog {
		if m == saysYes || m == saysNo {
			time.Sleep(2 * fuzzedTTL)
		} else {
			<-l.Context().Done()
			require.Zero(p, time.Since(trust), "to the end of trust, and no longer")
		}
		err = l.Err()
		require.Equal(p, err, context.Cause(l.Context()))
	} else {
		begun := time.Now()
		err = l.Renew(context.Background())
		require.LessOrEqual(p, time.Since(begun), wireTimeout)
		// The watchdog's may be due at the same moment, and be told of a loss first.
		if sent := len(p.sent(n, "renew")); sent != 1 && !(sent == 0 && m == saysNo) {
			require.Equal(p, 2, sent)
		}
	}
	p.inspect(err, 1)
	require.LessOrEqual(p, len(p.sent(n, "renew")), 60, "no tight loop")
	lost := false
	switch {
	case m == saysYes:
		require.NoError(p, err)
		require.NoError(p, l.Err())
	case m == saysNo:
		lost = true
		require.ErrorIs(p, err, redislease.ErrLost)
		require.ErrorIs(p, err, p.reason(p.renew))
		require.Equal(p, err, l.Err())
	case p.watchdog:
		lost = true
		require.ErrorIs(p, err, redislease.ErrUnconfirmed)
		var le *redislease.LostError
		require.ErrorAs(p, err, &le)
		require.Error(p, le.Err)
	default:
		require.Error(p, err)
		require.Equal(p, m == unclear, errors.Is(err, redislease.ErrOutcomeUnknown), "%v", err)
		require.NotErrorIs(p, err, redislease.ErrLost)
		require.NoError(p, l.Err(), "it is as it was")
	}
	p.released(l, lost, lost && m == saysNo)
}

// released releases the lease twice; known says that Redis has said No about it before.
func (p *replayed) released(l *redislease.Lease, lost, known bool) {
	n := len(p.sent(0, "set", "settle", "check", "renew", "release"))
	m := p.meaning(logged{kind: "release", reply: p.release})
	definite := known || m == saysYes || m == saysNo
	for try := range 2 {
		begun := time.Now()
		err := l.Release()
		require.LessOrEqual(p, time.Since(begun), wireTimeout)
		if lost {
			p.inspect(err, 2) // it was lost, and the release is unknown
		} else {
			p.inspect(err, 1)
		}
		sent := 1 + try
		if definite {
			sent = 1
		}
		if known {
			sent = 0
		}
		require.Len(p, p.sent(n, "release"), sent)
		require.Equal(p, m == unclear && !known, errors.Is(err, redislease.ErrOutcomeUnknown), "%v", err)
		require.Equal(p, lost || m == saysNo, errors.Is(err, redislease.ErrLost), "%v", err)
		switch {
		case m == saysYes && !lost:
			require.NoError(p, err)
		case m == saysNo && !lost:
			require.ErrorIs(p, err, p.reason(p.release))
		case m == notExecuted && !known:
			var refused redis.Error
			require.ErrorAs(p, err, &refused)
		}
	}
	require.Error(p, l.Err())
	require.Error(p, l.Context().Err())
	renewals := len(p.sent(0, "renew"))
	time.Sleep(2 * fuzzedTTL)
	require.Len(p, p.sent(0, "renew"), renewals, "nothing is renewed after a release")
}

// finish checks the events.
func (p *replayed) finish(acquired bool) {
	synctest.Wait()
	ends, finals := 0, 0
	for _, e := range p.record.all() {
		if e.Kind == redislease.EventPolling {
			continue // it is about no key
		}
		p.inspect(e.Err, 1)
		switch e.Kind {
		case redislease.EventAcquired, redislease.EventNotAcquired, redislease.EventAcquireFailed:
			ends++
			require.Equal(p, e.Kind == redislease.EventNotAcquired, errors.Is(e.Err, redislease.ErrNotAcquired))
			require.Equal(p, acquired, e.Kind == redislease.EventAcquired)
		case redislease.EventLost, redislease.EventReleased:
			finals++
		}
	}
	require.Equal(p, 1, ends)
	require.Equal(p, acquired, finals == 1)
	require.LessOrEqual(p, finals, 1)
}

// shelf is what the library needs of Redis: keys with tokens that expire.
type shelf struct {
	keys  map[string]shelved
	seen  [][]string
	setAt time.Time // the last SET that took a key
	// renew, if set, answers the renewals.
	renew func() (reply string, hangUp bool)
}

type shelved struct {
	token string
	until time.Time
}

func (s *shelf) answer(args []string) (string, bool) {
	s.seen = append(s.seen, args)
	if lastOf(args) == "0" {
		return "-ERR withdrawn\r\n", false
	}
	kind, key, tokens := kindOf(args), args[1], args[2:3]
	if kind != "set" {
		key, tokens = args[3], args[4:len(args)-1]
	}
	now := time.Now()
	held, found := s.keys[key]
	found = found && now.Before(held.until)
	ours := found && slices.Contains(tokens, held.token)
	until := func() time.Time {
		ms, err := strconv.ParseInt(lastOf(args), 10, 64)
		if err != nil || ms <= 0 || ms > math.MaxInt64/int64(time.Millisecond) {
			panic("not a TTL: " + lastOf(args))
		}
		return now.Add(time.Duration(ms) * time.Millisecond)
	}
	switch {
	case kind == "set" && found:
		return "$-1\r\n", false
	case kind == "set":
		s.keys[key], s.setAt = shelved{tokens[0], until()}, now
		return "+OK\r\n", false
	case kind == "renew" && ours && s.renew != nil:
		return s.renew()
	case kind == "renew" && ours:
		s.keys[key] = shelved{held.token, until()}
	case kind == "release" && ours:
		delete(s.keys, key)
	case kind == "settle":
		panic("nothing is lost on the way")
	case found:
		return ":-1\r\n", false
	default:
		return ":0\r\n", false
	}
	return ":1\r\n", false
}

// count returns how many commands of the kind there were.
func (s *shelf) count(kind string) (n int) {
	for _, args := range s.seen {
		if kindOf(args) == kind && lastOf(args) != "0" {
			n++
		}
	}
	return n
}

// onShelf runs a test on a shelf, in a bubble.
func onShelf(t *testing.T, test func(t *testing.T, s *shelf, look func(func()), client redislease.RedisClient)) {
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{keys: map[string]shelved{}}
		w := &wire{answer: s.answer}
		client := w.client(3)
		defer func() {
			time.Sleep(time.Second) // for whatever is left behind
			_ = client.Close()
		}()
		look := func(f func()) {
			w.mu.Lock()
			defer w.mu.Unlock()
			f()
		}
		test(t, s, look, client)
	})
}

// FuzzKeys takes keys and prefixes of any bytes.
func FuzzKeys(f *testing.F) {
	for _, k := range [][4]string{
		{"", "orders", "", "orders"}, {"app:", "orders", "app:orders", ""}, {"app:", "orders", "app", ":orders"}, {"", "", "p", ""},
		{"", "{a}b", "{", "a}b"}, {"", "}{", "{}", "}{"}, {"\n", "\r\n", "\r", "\n"}, {"", "a\x00b", "a\x00", "b"}, {"", "\xff\xfe", "\xff", "\xfe"},
		{"$", "*1\r\n$4\r\nPING\r\n", "$*1\r\n", ""}, {"%s", "%d%!q(", "%%s", "\""}, {"Ⴀ", "é", "Ⴀ", "é"}, {" ", " ", "  ", ""},
		{"", strings.Repeat("long", 20_000), "long", strings.Repeat("long", 19_999)}, {"ORDERS", "orders", "orders", "ORDERS"},
	} {
		f.Add(k[0], k[1], k[2], k[3])
	}
	f.Fuzz(func(t *testing.T, prefix, key, otherPrefix, otherKey string) {
		onShelf(t, func(t *testing.T, s *shelf, look func(func()), client redislease.RedisClient) {
			ctx := context.Background()
			refused := func(err error, key string) {
				require.Error(t, err)
				require.Contains(t, err.Error(), strconv.Quote(key), "quoted")
				require.Equal(t, key == "", strings.Contains(err.Error(), "key is empty"))
			}
			k := newLocker(t, client, redislease.WithPrefix(prefix))
			l, err := k.TryAcquire(ctx, key)
			if key == "" {
				refused(err, key)
				look(func() { require.Empty(t, s.seen) })
				return
			}
			require.NoError(t, err)
			require.Equal(t, key, l.Key())
			look(func() {
				require.Equal(t, l.Token(), s.keys[prefix+key].token, "prefix and key, literally")
				require.Len(t, s.keys, 1)
			})
			require.NoError(t, l.Renew(ctx))

			_, err = k.TryAcquire(ctx, key)
			refused(err, key)
			require.ErrorIs(t, err, redislease.ErrNotAcquired)
			other, err := newLocker(t, client, redislease.WithPrefix(otherPrefix)).TryAcquire(ctx, otherKey)
			switch {
			case otherKey == "":
				refused(err, otherKey)
				require.NotErrorIs(t, err, redislease.ErrNotAcquired)
			case otherPrefix+otherKey == prefix+key:
				refused(err, otherKey)
				require.ErrorIs(t, err, redislease.ErrNotAcquired)
			default:
				require.NoError(t, err, "another key")
				require.Equal(t, otherKey, other.Key())
			}
			require.NoError(t, other.Release())

			look(func() { delete(s.keys, prefix+key) })
			err = l.Release()
			refused(err, key)
			require.ErrorIs(t, err, redislease.ErrGone)
			refused(l.Renew(ctx), key)
			look(func() {
				require.Empty(t, s.keys)
				for _, args := range s.seen {
					at := 3
					if args[0] == "set" {
						at = 1
					}
					require.Contains(t, []string{prefix + key, otherPrefix + otherKey}, args[at])
				}
			})
		})
	})
}

// settings is an input of FuzzOptions.
type settings struct {
	given                                          byte // a bit for each of the following in turn
	ttl, margin, interval, maxHold, acquireTimeout time.Duration
	maxRenewals                                    int
}

func (o *settings) options() (list []redislease.Option) {
	for i, option := range []redislease.Option{redislease.WithTTL(o.ttl), redislease.WithMargin(o.margin), redislease.WithRenewInterval(o.interval),
		redislease.WithMaxHold(o.maxHold), redislease.WithAcquireTimeout(o.acquireTimeout), redislease.WithMaxRenewals(o.maxRenewals)} {
		if o.given>>i&1 != 0 {
			list = append(list, option)
		}
	}
	return list
}

// resolve puts the defaults in place of what was not given, and returns what is wrong: a value, and the limit that it
// breaks.
func (o *settings) resolve() (wrong [][2]string) {
	given := func(i int) bool { return o.given>>i&1 != 0 }
	complain := func(value, limit any) { wrong = append(wrong, [2]string{fmt.Sprint(value), fmt.Sprint(limit)}) }
	if given(4) && o.acquireTimeout <= 0 {
		complain(o.acquireTimeout, "above 0")
	}
	if !given(3) {
		o.maxHold = time.Hour
	}
	if o.maxHold <= 0 {
		complain(o.maxHold, "above 0")
	}
	if !given(5) {
		o.maxRenewals = math.MaxInt
	}
	if o.maxRenewals < 0 {
		complain(o.maxRenewals, 0)
	}
	if !given(0) {
		o.ttl = 30 * time.Second
	}
	if o.ttl < 100*time.Millisecond {
		complain(o.ttl, 100*time.Millisecond)
		return wrong // what depends on it means nothing
	}
	o.ttl -= o.ttl % time.Millisecond
	if !given(1) {
		o.margin = o.ttl / 10
	}
	if !given(2) || o.interval == 0 {
		o.interval = o.ttl / 3
	}
	if o.interval < time.Millisecond {
		complain(o.interval, time.Millisecond)
	}
	switch {
	case o.margin < time.Millisecond:
		complain(o.margin, time.Millisecond)
	case o.margin >= o.ttl:
		complain(o.margin, o.ttl)
	case o.interval > (o.ttl-o.margin)/2:
		complain(o.interval, (o.ttl-o.margin)/2)
	}
	return wrong
}

const (
	year = 365 * 24 * time.Hour
	late = time.Microsecond // from the sending of a command to its write
)

// FuzzOptions takes durations and numbers of any size.
func FuzzOptions(f *testing.F) {
	for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, 999_999, time.Millisecond, 100*time.Millisecond - 1, 100 * time.Millisecond, 100*time.Millisecond + 1,
		time.Second, 30 * time.Second, time.Hour, 50 * year, math.MaxInt64 - 1, math.MaxInt64} {
		for i := range 6 {
			all := [6]int64{int64(time.Minute), int64(time.Second), int64(7 * time.Second), int64(10 * time.Minute), int64(time.Second), 5}
			all[i] = int64(d)
			f.Add(byte(1<<i), byte(i), all[0], all[1], all[2], all[3], all[4], all[5])
			f.Add(byte(63), byte(i+1), all[0], all[1], all[2], all[3], all[4], all[5])
		}
		f.Add(byte(7), byte(0), int64(d), int64(d)/2, int64(d)/4, int64(0), int64(0), int64(0))
		f.Add(byte(7), byte(1), int64(d), int64(time.Millisecond), int64(time.Millisecond), int64(0), int64(0), int64(0))
		f.Add(byte(15), byte(2), int64(d), int64(time.Millisecond), int64(d)/3, int64(math.MaxInt64), int64(0), int64(0))
	}
	for _, interval := range []time.Duration{13500*time.Millisecond - 1, 13500 * time.Millisecond, 13500*time.Millisecond + 1} {
		f.Add(byte(7), byte(0), int64(30*time.Second), int64(3*time.Second), int64(interval), int64(0), int64(0), int64(0))
	}
	f.Fuzz(func(t *testing.T, given, how byte, ttl, margin, interval, maxHold, acquireTimeout, maxRenewals int64) {
		o := settings{given, time.Duration(ttl), time.Duration(margin), time.Duration(interval), time.Duration(maxHold), time.Duration(acquireTimeout), int(maxRenewals)}
		onShelf(t, func(t *testing.T, s *shelf, look func(func()), client redislease.RedisClient) {
			options := o.options()
			var all []redislease.LockerOption
			if how&4 != 0 { // else they are given to the acquisition
				for _, option := range options {
					all = append(all, option)
				}
				options = nil
			}
			var l *redislease.Lease
			k, err := redislease.New(clientFunc(func(ctx context.Context, cmd redis.Cmder) error {
				time.Sleep(late)
				return client.Process(ctx, cmd)
			}), all...)
			if err == nil {
				l, err = k.TryAcquire(context.Background(), "orders", options...)
			}
			if wrong := o.resolve(); len(wrong) > 0 {
				require.Error(t, err)
				require.True(t, slices.ContainsFunc(wrong, func(w [2]string) bool {
					return strings.Contains(err.Error(), w[0]) && strings.Contains(err.Error(), w[1])
				}), "%v names none of %v", err, wrong)
				look(func() { require.Empty(t, s.seen) })
				return
			}
			if given>>4&1 != 0 && o.acquireTimeout <= 2*late { // the checks, and SET
				require.Error(t, err)
				require.NotErrorIs(t, err, redislease.ErrNotAcquired)
				require.NotErrorIs(t, err, redislease.ErrOutcomeUnknown, "it was not sent")
				look(func() { require.Empty(t, s.keys) })
				return
			}
			if o.maxHold <= late && err != nil { // over before it is had
				require.NotErrorIs(t, err, redislease.ErrNotAcquired)
				return
			}
			require.NoError(t, err)
			look(func() {
				set := slices.IndexFunc(s.seen, func(args []string) bool { return args[0] == "set" })
				require.Equal(t, strconv.FormatInt(o.ttl.Milliseconds(), 10), lastOf(s.seen[set]))
				switch how % 4 {
				case 1:
					s.renew = func() (string, bool) { return "-READONLY no\r\n", false }
				case 2:
					s.renew = func() (string, bool) { return "", false }
				}
			})
			o.lives(t, s, look, l, how%4 == 1 || how%4 == 2)
		})
	})
}

// lives checks the life of a lease that has just been sent for.
func (o *settings) lives(t *testing.T, s *shelf, look func(func()), l *redislease.Lease, refused bool) {
	var start time.Time
	look(func() { start = s.setAt })
	end := min(o.ttl-o.margin, o.maxHold)
	require.NoError(t, l.Err())
	require.Equal(t, end, l.Until().Sub(start))
	deadline, capped := l.Context().Deadline()
	require.Equal(t, o.maxHold <= redislease.NoMaxHold-2*late, capped)
	if capped {
		require.Equal(t, o.maxHold, deadline.Sub(start))
	}
	most := 2000 * min(o.interval, year/20) // a bubble's time ends in the year 2262
	before := 0
	look(func() { before = s.count("renew") })
	renewals := func() (n int) {
		look(func() { n = s.count("renew") - before })
		return n
	}
	switch {
	case refused && end > most: // the watchdog looks at the clock twice in an interval
		time.Sleep(most)
	case refused:
		<-l.Context().Done()
		require.Equal(t, end, time.Since(start), "nothing was confirmed")
		require.ErrorIs(t, l.Err(), redislease.ErrLost)
	default:
		period := min(20*min(o.interval, 3*year), 3*min(o.ttl, 20*year))
		for range 7 {
			time.Sleep(period / 7)
			if l.Err() == nil {
				look(func() {
					left := time.Until(s.keys["orders"].until)
					require.LessOrEqual(t, time.Until(l.Until()), left-o.margin, "trust ends a margin before the key can expire")
				})
			}
		}
		passed := time.Since(start)
		n := renewals()
		require.LessOrEqual(t, n, o.maxRenewals)
		tick := o.interval/64 + 1
		require.LessOrEqual(t, n, int((passed+o.interval/2+tick)/(o.interval-o.interval/8-tick))+1, "the first by half an interval early")
		if n < o.maxRenewals && passed < o.maxHold {
			require.NoError(t, l.Err())
			require.GreaterOrEqual(t, n, int(passed/(o.interval+late))-1)
		} else if err := l.Err(); err != nil {
			require.ErrorIs(t, err, redislease.ErrMaxHold)
		}
	}
	n := renewals()
	require.LessOrEqual(t, n, 200, "no tight loop")
	lost := l.Err() != nil
	err := l.Release()
	require.Equal(t, lost, err != nil, "%v", err)
	time.Sleep(min(o.ttl, 20*year))
	require.Equal(t, n, renewals(), "nothing is renewed after the end")
	look(func() {
		held, found := s.keys["orders"]
		require.False(t, found && time.Now().Before(held.until))
	})
}

// FuzzFenceReplies has a server answer the script that draws a fence with anything at all: a lease has the fence that the
// reply gave to its token, or there is no lease.
func FuzzFenceReplies(f *testing.F) {
	for _, reply := range []string{"*3\r\n:1\r\n:0\r\n:41\r\n", "*3\r\n:1\r\n:1\r\n:41\r\n", "*3\r\n:1\r\n:1\r\n:-1\r\n", "*3\r\n:1\r\n:0\r\n:-1\r\n", "*3\r\n:1\r\n:1\r\n:0\r\n",
		"*3\r\n:1\r\n:2\r\n:41\r\n", "*3\r\n:1\r\n:3\r\n:41\r\n", "*3\r\n:1\r\n:0\r\n$2\r\n41\r\n", "*3\r\n:1\r\n:0\r\n,41\r\n", "*3\r\n:1\r\n:0\r\n(41\r\n", "*3\r\n:0\r\n:9\r\n:41\r\n",
		"*2\r\n:1\r\n:0\r\n", "*2\r\n:0\r\n:9\r\n", "*4\r\n:1\r\n:0\r\n:41\r\n:42\r\n", "*3\r\n:1\r\n:0\r\n:9223372036854775807\r\n", "*3\r\n:1\r\n:0\r\n:-9223372036854775808\r\n",
		":41\r\n", "+OK\r\n", "-FENCE spoilt\r\n", "-ERR no\r\n", "", "*3\r\n:1\r\n:0\r\n", "~3\r\n:1\r\n:0\r\n:41\r\n"} {
		f.Add(false, reply, "*3\r\n:1\r\n:1\r\n:42\r\n")
		f.Add(true, reply, "*2\r\n:0\r\n:9\r\n")
		f.Add(false, "", reply)
	}
	long := regexp.MustCompile(`[*$~>!=][+0]*[0-9]{4,16}\r|[|%][+0]*[0-9]{4,}`) // see FuzzReplies
	f.Fuzz(func(t *testing.T, resp2 bool, first, second string) {
		if len(first)+len(second) > 1000 || long.MatchString(first+"\n"+second) {
			t.Skip()
		}
		synctest.Test(t, func(t *testing.T) {
			protocol := 3
			if resp2 {
				protocol = 2
			}
			begun := time.Now()
			p := &replayed{T: t, replies: replies{protocol: protocol, hangUp: true}, start: begun, read: map[string]reading{}}
			for _, reply := range []string{first, second} {
				p.read[reply] = p.readPlainly("eval", reply)
			}
			fences := map[string][]int64{} // of each token, in the order of the replies
			refused := false
			n := 0
			p.wire.answer = func(args []string) (string, bool) {
				if args[2] != "2" {
					return ":0\r\n", true // the checks and the release
				}
				tokens := args[5 : len(args)-4]
				reply := second
				if n++; n == 1 {
					reply = first
				}
				if lastOf(args) == "0" {
					return "-ERR withdrawn\r\n", true
				}
				list, _ := p.read[reply].value.([]any)
				if len(list) == 2 && list[0] == int64(0) {
					_, refused = list[1].(int64)
				}
				if len(list) == 3 && list[0] == int64(1) {
					index, ok1 := list[1].(int64)
					fence, ok2 := list[2].(int64)
					if ok1 && ok2 && index >= 0 && index <= int64(len(tokens)) {
						token := lastOf(tokens)
						if index > 0 {
							token = tokens[index-1]
						}
						fences[token] = append(fences[token], fence)
					}
				}
				return reply, true
			}
			k := newLocker(t, separate{&p.wire, p.protocol}, redislease.WithTTL(fuzzedTTL), redislease.WithFencing())
			l, err := k.TryAcquire(context.Background(), "orders")
			p.wire.mu.Lock()
			drawn, refused := maps.Clone(fences), refused
			p.wire.mu.Unlock()
			defer time.Sleep(3 * fuzzedTTL) // for whatever is left behind
			if err != nil {
				require.Equal(t, errors.Is(err, redislease.ErrNotAcquired), refused && !errors.Is(err, redislease.ErrOutcomeUnknown), "%v", err)
				for _, fence := range slices.Concat(slices.Collect(maps.Values(drawn))...) {
					require.Less(t, fence, int64(1), "Redis said yes, and the fence: %v", err)
				}
				return
			}
			require.Positive(t, l.Fence())
			require.Contains(t, drawn[l.Token()], l.Fence())
			require.NoError(t, l.Err())
			_ = l.Release()
		})
	})
}
