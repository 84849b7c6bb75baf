package faultproxy_test

import (
	"testing"
	"time"

	"github.com/redislease/redislease/internal/faultproxy"
)

func publish(t *testing.T, do func(...string) (any, error), channel, text string) {
	t.Helper()
	if n, err := do("PUBLISH", channel, text); err != nil || n != int64(1) {
		t.Fatalf("PUBLISH: %v, %v", n, err)
	}
}

func TestMessagesAreNobodysReplies(t *testing.T) {
	for proto, hello := range map[string]string{"RESP 2": "PING", "RESP 3": "HELLO 3"} {
		t.Run(proto, func(t *testing.T) {
			server, p := start(t)
			ping := p.On(faultproxy.Command("PING").And(faultproxy.ArgContains("held"))).Do(faultproxy.HoldReply())
			c := dial(t, p)
			c.send(hello, "SUBSCRIBE a b")
			if _, err := c.read(); err != nil {
				t.Fatal(err)
			}
			c.expect("[subscribe a 1]", "[subscribe b 2]")
			publish(t, server.Do, "a", "one")
			c.expect("[message a one]")

			// The reply to PING is held, and the message behind it waits as it would on a wire.
			c.send("PING held")
			p.WaitFor(t, faultproxy.ArgContains("held").And(faultproxy.Replied), patience)
			publish(t, server.Do, "b", "two")
			c.expectSilence()
			ping.Release()
			pong := map[string]string{"RESP 2": "[pong held]", "RESP 3": "$held"}[proto]
			c.expect(pong, "[message b two]")

			c.send("UNSUBSCRIBE a", "UNSUBSCRIBE", "PING")
			c.expect("[unsubscribe a 1]", "[unsubscribe b 0]")
			if got, err := c.read(); err != nil || got != "+PONG" && got != "[pong ]" {
				t.Errorf("PING: %q, %v", got, err)
			}
			for _, req := range p.Log() {
				if req.Replied.IsZero() {
					t.Errorf("%q got no reply", req.Args)
				}
			}
		})
	}
}

func TestARefusedSubscriptionIsAnOrdinaryReply(t *testing.T) {
	_, p := start(t)
	c := dial(t, p)
	c.do("ACL SETUSER default resetchannels", "+OK")
	c.send("SUBSCRIBE a b", "PING")
	c.expect("-NOPERM this user has no permissions to access one of the channels used as arguments", "+PONG")
	p.WaitFor(t, faultproxy.Command("PING").And(faultproxy.Replied), patience)
}

func TestALostConfirmationSilencesTheSubscription(t *testing.T) {
	server, p := start(t)
	p.On(faultproxy.Command("SUBSCRIBE")).Times(1).Do(faultproxy.DropReply())
	c := dial(t, p)
	c.send("SUBSCRIBE a")
	p.WaitFor(t, faultproxy.Command("SUBSCRIBE").And(faultproxy.Replied), patience)
	publish(t, server.Do, "a", "lost")
	c.expectSilence()
}

func TestLatencyGoesForMessagesToo(t *testing.T) {
	server, p := start(t)
	c := dial(t, p)
	c.do("SUBSCRIBE a", "[subscribe a 1]")
	p.DelayReplies(func() time.Duration { return delay })
	began := time.Now()
	publish(t, server.Do, "a", "late")
	c.expect("[message a late]")
	if took := time.Since(began); took < delay {
		t.Errorf("took %v, want at least %v", took, delay)
	}
}
