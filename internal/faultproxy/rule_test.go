package faultproxy_test

import (
	"io"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/redislease/redislease/internal/faultproxy"
)

func TestACutReplyLeavesTheCommandExecuted(t *testing.T) {
	for name, tt := range map[string]struct {
		action faultproxy.Action
		want   error
	}{
		"closed": {faultproxy.CloseAfter(), io.EOF},
		"reset":  {faultproxy.ResetAfter(), syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			server, p := start(t)
			rule := p.On(faultproxy.Command("set")).Do(tt.action)
			c := dial(t, p)
			c.do("PING", "+PONG")
			c.send("SET k v")
			c.expectError(tt.want)
			expectKey(t, server, "k", "v")
			if rule.Hits() != 1 || p.Count(faultproxy.Replied) != 2 {
				t.Errorf("%d hits, %d replied; want 1, 2", rule.Hits(), p.Count(faultproxy.Replied))
			}
		})
	}
}

func TestACutRequestIsNeverExecuted(t *testing.T) {
	for name, tt := range map[string]struct {
		action faultproxy.Action
		want   error
	}{
		"closed": {faultproxy.CloseBefore(), io.EOF},
		"reset":  {faultproxy.ResetBefore(), syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			server, p := start(t)
			p.On(faultproxy.Command("SET")).Times(1).Do(tt.action)
			c := dial(t, p)
			c.send("SET k v")
			c.expectError(tt.want)
			dial(t, p).do("SET other v", "+OK")
			expectKey(t, server, "k", "")
			if n := p.Count(faultproxy.Command("SET").And(faultproxy.Forwarded)); n != 1 {
				t.Errorf("%d forwarded, want 1", n)
			}
		})
	}
}

func TestACutComesBehindEarlierReplies(t *testing.T) {
	_, p := start(t)
	p.On(faultproxy.Command("SET")).Do(faultproxy.DelayReply(delay))
	p.On(faultproxy.Command("GET")).Do(faultproxy.CloseBefore())
	c := dial(t, p)
	c.send("SET k 1", "INCR k", "GET k")
	c.expect("+OK", ":2")
	c.expectError(io.EOF)
}

func TestADroppedReplyIsOfAnExecutedCommandAndTheConnectionIsSilent(t *testing.T) {
	server, p := start(t)
	p.On(faultproxy.Command("SET")).Times(1).Do(faultproxy.DropReply())
	c := dial(t, p)
	c.send("PING", "SET k v", "SET after v")
	c.expect("+PONG")
	awaitKey(t, server, "after", "v")
	expectKey(t, server, "k", "v")
	p.WaitForN(t, faultproxy.Replied, 3, patience)
	c.expectSilence()
	dial(t, p).do("GET k", "$v")
}

func TestADroppedRequestIsNeverExecutedAndTheConnectionIsSilent(t *testing.T) {
	server, p := start(t)
	p.On(faultproxy.Command("SET")).Times(1).Do(faultproxy.DropRequest())
	c := dial(t, p)
	c.send("PING", "SET k v", "SET after v")
	c.expect("+PONG")
	p.WaitForN(t, faultproxy.Any(), 3, patience)
	c.expectSilence()
	expectKey(t, server, "k", "")
	expectKey(t, server, "after", "")
	dial(t, p).do("GET k", "$-1")
}

func TestADelayedReplyDelaysTheOnesBehindIt(t *testing.T) {
	_, p := start(t)
	p.On(faultproxy.Command("SET")).Do(faultproxy.DelayReply(delay))
	c := dial(t, p)
	began := time.Now()
	c.send("PING", "SET k 1", "INCR k")
	c.expect("+PONG", "+OK", ":2")
	if took := time.Since(began); took < delay {
		t.Errorf("took %v, want at least %v", took, delay)
	}
	// The proxy waits for nothing but the delivery.
	set, incr := p.Log()[1], p.Log()[2]
	if took := incr.Replied.Sub(set.Replied); took >= delay {
		t.Errorf("INCR was executed %v after SET, want less than %v", took, delay)
	}
}

func TestADelayedRequestIsExecutedLate(t *testing.T) {
	_, p := start(t)
	delays := []time.Duration{0, delay}
	p.On(faultproxy.Command("INCR")).Times(2).Do(faultproxy.DelayRequestFunc(func() time.Duration {
		d := delays[0]
		delays = delays[1:]
		return d
	}))
	c := dial(t, p)
	c.send("INCR k", "INCR k", "INCR k")
	c.expect(":1", ":2", ":3")
	log := p.Log()
	for _, req := range log[1:] {
		if took := req.Forwarded.Sub(log[1].At); took < delay {
			t.Errorf("request %d was forwarded after %v, want at least %v", req.Seq, took, delay)
		}
	}
}

func TestAHeldRequestReachesTheServerAfterItsClientHasGone(t *testing.T) {
	for name, leave := range map[string]func(*rawClient){
		"waiting": func(*rawClient) {}, "closed": (*rawClient).close, "reset": (*rawClient).reset,
	} {
		t.Run(name, func(t *testing.T) {
			server, p := start(t)
			rule := p.On(faultproxy.Command("SET")).Do(faultproxy.HoldRequest())
			c := dial(t, p)
			c.do("PING", "+PONG")
			c.send("SET k v", "PING")
			p.WaitForN(t, faultproxy.Command("PING"), 2, patience)
			leave(c)
			if n := p.Count(faultproxy.Forwarded); n != 1 {
				t.Errorf("%d requests forwarded, want 1", n)
			}
			expectKey(t, server, "k", "")

			rule.Release()
			awaitKey(t, server, "k", "v")
			p.WaitForN(t, faultproxy.Command("PING").And(faultproxy.Replied), 2, patience)
			if name == "waiting" {
				c.expect("+OK", "+PONG")
			}
		})
	}
}

func TestAHeldReplyIsDeliveredWhenReleasedAndLaterOnesAreHeldAnew(t *testing.T) {
	_, p := start(t)
	rule := p.On(faultproxy.Command("INCR")).Do(faultproxy.HoldReply())
	c := dial(t, p)
	for i, want := range []string{":1", ":2"} {
		c.send("INCR k")
		p.WaitForN(t, faultproxy.Replied, i+1, patience)
		c.expectSilence()
		rule.Release()
		c.expect(want)
	}
	c.send("INCR k")
	p.WaitForN(t, faultproxy.Replied, 3, patience)
	rule.Remove()
	c.expect(":3")
	c.do("INCR k", ":4")
}

func TestActionsCombine(t *testing.T) {
	server, p := start(t)
	rule := p.On(faultproxy.Command("SET")).Do(faultproxy.HoldRequest(), faultproxy.CloseAfter())
	c := dial(t, p)
	c.send("SET k v")
	rule.WaitHits(t, 1, patience)
	expectKey(t, server, "k", "")
	rule.Release()
	c.expectError(io.EOF)
	expectKey(t, server, "k", "v")
}

func TestAnAnswerKeepsItsPlaceInAPipeline(t *testing.T) {
	server, p := start(t)
	p.On(faultproxy.Command("INCR")).Times(1).Do(faultproxy.DelayReply(delay))
	p.On(faultproxy.Command("SET")).Do(faultproxy.AnswerError("READONLY no"))
	p.On(faultproxy.Command("GET")).Do(faultproxy.Answer("$4\r\nfake\r\n"))
	c := dial(t, p)
	c.send("INCR k", "SET k 9", "INCR k", "GET k")
	c.expect(":1", "-READONLY no", ":2", "$fake")
	expectKey(t, server, "k", "2")
	if n := p.Count(faultproxy.Forwarded); n != 2 {
		t.Errorf("%d forwarded, want 2", n)
	}
}

func TestTheFirstRuleWithTriesLeftDecides(t *testing.T) {
	_, p := start(t)
	set := faultproxy.Command("SET")
	answer := func(s string) faultproxy.Action { return faultproxy.Answer("+" + s + "\r\n") }
	p.On(set.And(faultproxy.ArgContains("exempt"))).Do(faultproxy.Forward())
	first := p.On(set).Skip(1).Times(1).Do(answer("first"))
	second := p.On(set).Times(2).Do(answer("second"))
	third := p.On(faultproxy.Not(faultproxy.Command("PING"))).Do(answer("third"))
	c := dial(t, p)
	c.send("SET k 1", "SET k 2", "SET an-exempt-key 1", "SET k 3", "SET k 4", "PING")
	c.expect("+second", "+first", "+OK", "+second", "+third", "+PONG")
	if got := []int{first.Hits(), second.Hits(), third.Hits()}; !slices.Equal(got, []int{1, 2, 1}) {
		t.Errorf("hits %v, want 1, 2, 1", got)
	}
	third.Remove()
	c.do("SET k 5", "+OK")
	first.Times(1)
	c.do("SET k 6", "+first")
}

func TestScriptsAreToldApartByTheirText(t *testing.T) {
	_, p := start(t)
	p.On(faultproxy.Command("EVAL").And(faultproxy.ArgContains("PEXPIRE"))).Do(faultproxy.AnswerError("ERR renew"))
	c := dial(t, p)
	c.do("EVAL return{redis.call('PEXPIRE',KEYS[1],ARGV[1])} 1 PEXPIRE 9", "-ERR renew")
	c.do("EVAL return(redis.call('DEL',KEYS[1])) 1 k", ":0")
}

func TestARuleCanMeanOneConnection(t *testing.T) {
	_, p := start(t)
	p.On(faultproxy.OnConn(2)).Do(faultproxy.AnswerError("ERR two"))
	one := dial(t, p)
	one.do("PING", "+PONG")
	dial(t, p).do("PING", "-ERR two")
	one.do("PING", "+PONG")
}

func TestClearReleasesAndRemovesRules(t *testing.T) {
	_, p := start(t)
	p.On(faultproxy.Command("INCR")).Times(1).Do(faultproxy.HoldRequest())
	p.On(faultproxy.Command("INCR")).Do(faultproxy.HoldReply())
	c := dial(t, p)
	c.send("INCR k", "INCR k")
	p.WaitForN(t, faultproxy.Any(), 2, patience)
	p.Clear()
	c.expect(":1", ":2")
	c.do("INCR k", ":3")
}
