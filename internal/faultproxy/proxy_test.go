package faultproxy_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redislease/redislease/internal/faultproxy"
)

func TestRequestsAndRepliesPassUnchanged(t *testing.T) {
	server, p := start(t)
	c := dial(t, p)
	big := strings.Repeat("x", 1<<20)
	c.send("SET big "+big, "GET big", "RPUSH list a b", "LRANGE list 0 -1", "NONSENSE", "GET none")
	c.expect("+OK", "$"+big, ":2", "[a b]", "-ERR unknown command 'NONSENSE', with args beginning with: ", "$-1")
	_, _ = io.WriteString(c.nc, "SET inline 1\r\n\r\nINCR inline\r\n")
	c.expect("+OK", ":2")
	expectKey(t, server, "inline", "2")
}

func TestTheLogHoldsEveryRequest(t *testing.T) {
	_, p := start(t)
	one, two := dial(t, p), dial(t, p)
	one.do("set k v", "+OK")
	two.do("GET k", "$v")
	one.do("GET k", "$v")
	var got []string
	last := time.Time{}
	for i, req := range p.Log() {
		got = append(got, fmt.Sprintln(req.Seq, req.N, req.Name(), req.Args[1:]))
		if req.At.Before(last) || req.Forwarded.Before(req.At) || req.Replied.Before(req.At) {
			t.Errorf("request %d: at %v, forwarded %v, replied %v", i, req.At, req.Forwarded, req.Replied)
		}
		last = req.At
	}
	if want := []string{"1 1 SET [k v]\n", "2 1 GET [k]\n", "3 2 GET [k]\n"}; !slices.Equal(got, want) {
		t.Errorf("log %q, want %q", got, want)
	}
	if n := p.Count(faultproxy.Command("GET", "SET")); n != 3 {
		t.Errorf("Count: %d, want 3", n)
	}
	if n := p.Accepted(); n != 2 {
		t.Errorf("Accepted: %d, want 2", n)
	}
	if req := p.WaitForN(t, faultproxy.Command("GET"), 2, 0); req.Seq != 3 {
		t.Errorf("the second GET is request %d, want 3", req.Seq)
	}
}

func TestWaitForSeesARequestThatComesLater(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	p.On(faultproxy.Command("SET")).Do(faultproxy.HoldRequest())
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = io.WriteString(c.nc, encode("SET k v"))
	}()
	if req := p.WaitFor(t, faultproxy.Command("SET"), patience); req.Args[1] != "k" {
		t.Errorf("got %q", req.Args)
	}
	<-sent
}

// recorder notes how a test would have ended.
type recorder struct {
	testing.TB
	failure string
}

func (r *recorder) Fatalf(format string, args ...any) { r.failure = fmt.Sprintf(format, args...) }

func TestAWaitInVainFailsTheTestAndSaysWhatWasSeen(t *testing.T) {
	_, p := start(t)
	rule := p.On(faultproxy.Command("SET")).Do()
	c := dial(t, p)
	c.do("PING", "+PONG")
	c.do("PING", "+PONG")
	waits := map[string]func(testing.TB){
		"0 requests matched within 1ms, want 1": func(t testing.TB) { p.WaitFor(t, faultproxy.Command("SET"), time.Millisecond) },
		"2 requests matched within 1ms, want 3": func(t testing.TB) { p.WaitForN(t, faultproxy.Command("PING"), 3, time.Millisecond) },
		"0 hits of the rule within 1ms, want 1": func(t testing.TB) { rule.WaitHits(t, 1, time.Millisecond) },
	}
	for want, wait := range waits {
		r := &recorder{TB: t}
		wait(r)
		if r.failure != "faultproxy: "+want+"; seen: PING 2" {
			t.Errorf("got %q, want %q", r.failure, want)
		}
	}
}

func TestABlackHoleSwallowsOldAndNewConnections(t *testing.T) {
	server, p := start(t)
	old, idle := dial(t, p), dial(t, p)
	old.do("PING", "+PONG")
	idle.do("PING", "+PONG")
	p.BlackHole()
	fresh := dial(t, p)
	old.send("SET a 1")
	fresh.send("SET b 1")
	p.WaitForN(t, faultproxy.Command("SET"), 2, patience)
	old.expectSilence()
	fresh.expectSilence()

	// Also without a server: the client must not be able to tell.
	server.Kill()
	later := dial(t, p)
	later.send("PING")
	later.expectSilence()
	idle.expectSilence()
	server.Restart()

	p.Clear()
	old.send("SET a 2")
	old.expectSilence()
	fresh.expectSilence()
	expectKey(t, server, "a", "")
	dial(t, p).do("SET c 1", "+OK")
}

func TestAConnectionThatLostNothingInABlackHoleGoesOn(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	c.do("PING", "+PONG")
	p.BlackHole()
	p.Clear()
	c.do("PING", "+PONG")
}

func TestLostRepliesLeaveRequestsExecuted(t *testing.T) {
	server, p := start(t)
	p.SetReplies(faultproxy.Drop)
	c := dial(t, p)
	c.send("SET k v")
	awaitKey(t, server, "k", "v")
	c.expectSilence()
	p.Clear()
	c.expectSilence()
}

func TestHeldRequestsOfAClientThatHasGoneAreDeliveredLater(t *testing.T) {
	server, p := start(t)
	p.SetRequests(faultproxy.Hold)
	gone, waiting := dial(t, p), dial(t, p)
	gone.send("SET a 1", "SET b 1")
	waiting.send("INCR n")
	p.WaitForN(t, faultproxy.Any(), 3, patience)
	gone.close()
	if n := p.Count(faultproxy.Forwarded); n != 0 {
		t.Errorf("%d forwarded while held", n)
	}
	p.SetRequests(faultproxy.Pass)
	waiting.expect(":1")
	awaitKey(t, server, "b", "1")
	expectKey(t, server, "a", "1")
}

func TestHeldRepliesAreDeliveredLater(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	p.SetReplies(faultproxy.Hold)
	c.send("INCR n", "INCR n")
	p.WaitForN(t, faultproxy.Replied, 2, patience)
	c.expectSilence()
	p.SetReplies(faultproxy.Pass)
	c.expect(":1", ":2")
}

func TestLatencyGoesForEverything(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	c.do("PING", "+PONG")
	constant := func() time.Duration { return delay }
	p.DelayRequests(constant)
	p.DelayReplies(constant)
	began := time.Now()
	c.do("PING", "+PONG")
	if took := time.Since(began); took < 2*delay {
		t.Errorf("took %v, want at least %v", took, 2*delay)
	}
}

func TestALatencyCanBeTakenBack(t *testing.T) {
	_, p := start(t)
	tooLong := func() time.Duration { return 2 * patience }
	for _, takeBack := range []func(){
		func() { p.DelayRequests(nil); p.DelayReplies(nil) },
		p.Clear,
	} {
		p.DelayRequests(tooLong)
		p.DelayReplies(tooLong)
		takeBack()
		dial(t, p).do("PING", "+PONG")
	}
}

func TestSilenceIsForOpenConnectionsOnlyAndForEver(t *testing.T) {
	server, p := start(t)
	one, two := dial(t, p), dial(t, p)
	one.do("PING", "+PONG")
	two.do("PING", "+PONG")
	p.Silence(p.Log()[1].Conn)
	two.send("SET two 1")
	p.WaitFor(t, faultproxy.Command("SET"), patience)
	two.expectSilence()
	one.do("SET one 1", "+OK")

	p.Silence()
	p.Clear()
	one.send("SET one 2")
	one.expectSilence()
	dial(t, p).do("GET one", "$1")
	expectKey(t, server, "two", "")
}

func TestRefusedConnectionsAreAcceptedAgain(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	c.do("PING", "+PONG")
	for _, again := range []func(){p.Accept, p.Clear} {
		p.Refuse()
		p.Refuse() // changes nothing
		expectRefused(t, p)
		c.do("PING", "+PONG")
		again()
		again() // changes nothing
		dial(t, p).do("PING", "+PONG")
	}
}

func TestEndedConnectionsStillDeliverTheirRequests(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(*faultproxy.Proxy, ...int)
		want error
	}{
		"closed": {(*faultproxy.Proxy).CloseConns, io.EOF},
		"reset":  {(*faultproxy.Proxy).ResetConns, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			server, p := start(t)
			one, two := dial(t, p), dial(t, p)
			rule := p.On(faultproxy.Command("SET")).Do(faultproxy.HoldRequest())
			one.do("PING", "+PONG")
			two.do("PING", "+PONG")
			one.send("SET k v")
			rule.WaitHits(t, 1, patience)
			tt.end(p, p.WaitFor(t, faultproxy.Command("SET"), 0).Conn)
			one.expectError(tt.want)
			two.do("PING", "+PONG")
			rule.Release()
			awaitKey(t, server, "k", "v")

			tt.end(p)
			two.expectError(tt.want)
			dial(t, p).do("PING", "+PONG")
		})
	}
}

func TestADeadServerEndsConnectionsAndARestartedOneIsReached(t *testing.T) {
	server, p := start(t)
	c := dial(t, p)
	c.do("SET k v", "+OK")
	server.Kill()
	_ = c.nc.SetReadDeadline(time.Now().Add(patience))
	if got, err := c.read(); err != io.EOF && !strings.Contains(err.Error(), "reset") {
		t.Errorf("after Kill: %q, %v", got, err)
	}
	c = dial(t, p)
	c.send("PING")
	c.expectError(syscall.ECONNRESET)
	server.Restart()
	dial(t, p).do("GET k", "$-1")
}

func TestWhatIsNotRESPIsReset(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	_, _ = io.WriteString(c.nc, "*1\r\n$x\r\n")
	c.expectError(syscall.ECONNRESET)
}

func TestManyClientsGetTheirOwnRepliesInOrder(t *testing.T) {
	_, p := start(t)
	rng := rand.New(rand.NewPCG(1, 2))
	jitter := func() time.Duration { return time.Duration(rng.IntN(2_000)) * time.Microsecond }
	p.DelayRequests(jitter)
	p.DelayReplies(jitter)
	p.On(faultproxy.ArgContains("answered")).Do(faultproxy.Answer("+mine\r\n"), faultproxy.DelayReplyFunc(jitter))
	for i := range 16 {
		t.Run(fmt.Sprint("client ", i), func(t *testing.T) {
			t.Parallel()
			c := dial(t, p)
			for j := range 10 {
				c.send(fmt.Sprint("INCR n", i), "GET answered", fmt.Sprint("INCR n", i))
				c.expect(fmt.Sprint(":", 2*j+1), "+mine", fmt.Sprint(":", 2*j+2))
			}
		})
	}
}

func TestCloseEndsEveryGoroutine(t *testing.T) {
	server, p := start(t)
	hour := func() time.Duration { return time.Hour }
	for _, action := range []faultproxy.Action{
		faultproxy.HoldRequest(), faultproxy.HoldReply(), faultproxy.DropRequest(), faultproxy.DropReply(),
		faultproxy.DelayRequestFunc(hour), faultproxy.DelayReplyFunc(hour), faultproxy.CloseAfter(), faultproxy.ResetAfter(),
		faultproxy.CloseBefore(), faultproxy.ResetBefore(), faultproxy.Forward(),
	} {
		for _, leave := range []func(*rawClient){func(*rawClient) {}, (*rawClient).close, (*rawClient).reset} {
			rule := p.On(faultproxy.Command("INCR")).Do(action)
			c := dial(t, p)
			c.send("PING", "INCR k", "PING")
			rule.WaitHits(t, 1, patience)
			rule.Times(0) // removing it would release what it holds
			leave(c)
		}
	}
	dial(t, p) // never sends anything
	p.SetRequests(faultproxy.Hold)
	dial(t, p).send("PING")
	p.BlackHole()
	dial(t, p).send("PING")
	server.Pause()

	p.Close()
	p.Close() // changes nothing
	expectRefused(t, p)
	awaitNoGoroutine(t, "faultproxy.(*")
}

func TestAConnectionThatBothSidesHaveEndedLeavesNoGoroutine(t *testing.T) {
	_, p := start(t)
	p.On(faultproxy.Command("INCR")).Times(1).Do(faultproxy.CloseAfter())
	cut, plain, unused := dial(t, p), dial(t, p), dial(t, p)
	cut.send("INCR k")
	cut.expectError(io.EOF)
	plain.do("PING", "+PONG")
	for _, c := range []*rawClient{cut, plain, unused} {
		c.close()
	}
	awaitNoGoroutine(t, "faultproxy.(*conn)")
}

// awaitNoGoroutine waits until no goroutine runs a function of that name. Even one that has told Close of its end may
// need a moment to be gone.
func awaitNoGoroutine(t *testing.T, name string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		if !strings.Contains(string(stacks), name) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("goroutines are left:\n%s", stacks)
		}
	}
}
