package faultproxy

import "time"

// Action is what happens to a request that a rule matches, or to its reply. Actions can be combined where that makes
// sense: Do(HoldRequest(), DropReply()). Whatever is behind a delayed or held request or reply on the same connection
// waits as well, and whatever is behind a dropped one is lost too: TCP delivers in order or not at all.
type Action func(*plan)

// plan is the sum of a rule's actions for one request.
type plan struct {
	gate    <-chan struct{} // the rule's: closed by its next Release
	request fate
	reply   fate
	local   bool   // the request is not forwarded
	answer  []byte // then: the reply, unless the connection is closed
}

// fate is what happens to one request or reply on its way.
type fate struct {
	delay func() time.Duration // nil: none
	gate  <-chan struct{}      // nil: not held
	drop  bool
	end   ending // instead of delivering it, end the connection
}

type ending int

const (
	goesOn ending = iota
	closes        // the other end reads EOF
	resets        // the other end's connection is reset
)

// Forward does nothing. It counts hits, and makes an exception from the rules behind it.
func Forward() Action { return func(*plan) {} }

// DelayRequest lets d go by before the request is forwarded.
func DelayRequest(d time.Duration) Action {
	return DelayRequestFunc(func() time.Duration { return d })
}

// DelayRequestFunc is DelayRequest with a duration of its own for every request. f is never called concurrently, and
// must not call the proxy.
func DelayRequestFunc(f func() time.Duration) Action {
	return func(p *plan) { p.request.delay = f }
}

// DelayReply lets d go by before the reply of the executed request is delivered.
func DelayReply(d time.Duration) Action {
	return DelayReplyFunc(func() time.Duration { return d })
}

// DelayReplyFunc is DelayReply with a duration of its own for every reply. f is never called concurrently, and must
// not call the proxy.
func DelayReplyFunc(f func() time.Duration) Action {
	return func(p *plan) { p.reply.delay = f }
}

// HoldRequest keeps the request back until Rule.Release or Proxy.Clear, and then forwards it even if its client has
// closed the connection meanwhile.
func HoldRequest() Action { return func(p *plan) { p.request.gate = p.gate } }

// HoldReply keeps the reply of the executed request back until Rule.Release or Proxy.Clear.
func HoldReply() Action { return func(p *plan) { p.reply.gate = p.gate } }

// DropRequest loses the request: it is never executed, and its connection stays open and silent.
func DropRequest() Action { return func(p *plan) { p.request.drop = true } }

// DropReply loses the reply of the executed request: its connection stays open and silent. Requests that follow on it
// are still executed.
func DropReply() Action { return func(p *plan) { p.reply.drop = true } }

// CloseBefore closes the connection (EOF) instead of forwarding the request: it is never executed.
func CloseBefore() Action { return func(p *plan) { p.local, p.reply.end = true, closes } }

// ResetBefore is CloseBefore with a reset.
func ResetBefore() Action { return func(p *plan) { p.local, p.reply.end = true, resets } }

// CloseAfter closes the connection (EOF) instead of delivering the reply: the request has been executed.
func CloseAfter() Action { return func(p *plan) { p.reply.end = closes } }

// ResetAfter is CloseAfter with a reset.
func ResetAfter() Action { return func(p *plan) { p.reply.end = resets } }

// Answer replies with the given RESP bytes ("+OK\r\n") instead of forwarding the request: it is never executed.
func Answer(resp string) Action {
	return func(p *plan) { p.local, p.answer = true, []byte(resp) }
}

// AnswerError is Answer with an error reply: AnswerError("READONLY You can't write against a read only replica.").
func AnswerError(text string) Action { return Answer("-" + text + "\r\n") }
