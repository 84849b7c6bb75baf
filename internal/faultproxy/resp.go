package faultproxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// maxLength bounds a bulk string and the number of elements, as Redis does (512 MB): a length beyond it is garbage.
const maxLength = 512 << 20

var errProtocol = errors.New("not RESP")

// frame is one value of RESP 2 or 3 as it came over the wire.
type frame struct {
	raw   []byte
	kind  byte     // type byte of the value itself, not of an attribute in front of it
	items []string // of an aggregate: the text of each element that is not one itself
}

// readFrame reads one value. It returns io.EOF only if the stream ends before the first byte.
func readFrame(r *bufio.Reader) (frame, error) {
	p := parser{r: r}
	if err := p.value(0); err != nil {
		if errors.Is(err, io.EOF) && len(p.raw) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	return p.frame, nil
}

// readRequest reads a command: an array of bulk strings, or an inline one (words on a line, without quoting). Its
// frame has the arguments as items; an empty line has none.
func readRequest(r *bufio.Reader) (frame, error) {
	first, err := r.Peek(1)
	if err != nil {
		return frame{}, err
	}
	if first[0] == '*' {
		return readFrame(r)
	}
	p := parser{r: r}
	line, err := p.line()
	p.items = strings.Fields(line)
	return p.frame, err
}

type parser struct {
	r *bufio.Reader
	frame
}

// value reads one value at a depth of nesting, 0 being the frame itself.
func (p *parser) value(depth int) error {
	line, err := p.line()
	if err != nil {
		return err
	}
	if line == "" {
		return fmt.Errorf("%w: empty line", errProtocol)
	}
	kind, rest := line[0], line[1:]
	if depth == 0 {
		p.kind = kind
	}
	switch kind {
	case '+', '-', ':', '_', ',', '#', '(':
		p.scalar(depth, rest)
		return nil
	case '$', '!', '=':
		return p.bulk(depth, rest)
	case '*', '~', '>':
		return p.elements(depth+1, 1, rest)
	case '%':
		return p.elements(depth+1, 2, rest)
	case '|':
		// An attribute belongs to the value that follows it. One level deeper its parts are nobody's elements.
		if err := p.elements(depth+2, 2, rest); err != nil {
			return err
		}
		return p.value(depth)
	}
	return fmt.Errorf("%w: type %q", errProtocol, kind)
}

func (p *parser) scalar(depth int, text string) {
	if depth == 1 {
		p.items = append(p.items, text)
	}
}

func (p *parser) bulk(depth int, length string) error {
	n, err := parseLength(length)
	if err != nil {
		return err
	}
	if n < 0 {
		p.scalar(depth, "")
		return nil
	}
	start := len(p.raw)
	p.raw = slices.Grow(p.raw, n+2)[:start+n+2]
	if _, err := io.ReadFull(p.r, p.raw[start:]); err != nil {
		return err
	}
	if p.raw[start+n] != '\r' || p.raw[start+n+1] != '\n' {
		return fmt.Errorf("%w: a bulk string of another length than %d", errProtocol, n)
	}
	p.scalar(depth, string(p.raw[start:start+n]))
	return nil
}

func (p *parser) elements(depth, perElement int, length string) error {
	n, err := parseLength(length)
	if err != nil {
		return err
	}
	for range max(n, 0) * perElement {
		if err := p.value(depth); err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) line() (string, error) {
	line, err := p.r.ReadBytes('\n')
	p.raw = append(p.raw, line...)
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(string(line[:len(line)-1]), "\r"), nil
}

func parseLength(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < -1 || n > maxLength {
		return 0, fmt.Errorf("%w: length %q", errProtocol, s)
	}
	return n, nil
}

// The commands that are confirmed once per channel, by messages among those of the channels. A confirmation is named
// like its command.
var subscriptions = []string{
	"subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe",
}

// replyClass tells what a frame from the server is to the requests that wait for their replies.
type replyClass int

const (
	reply        replyClass = iota // the answer to the oldest of them
	confirmation                   // one of the answers to a subscribe or unsubscribe
	message                        // nobody's answer: a publication, an invalidation
)

// classify needs to know the connection: in RESP 2 messages are arrays like any other, and only a connection that has
// subscribed can get one; in RESP 3 they have a type of their own.
func (f frame) classify(resp3, subscribed bool) replyClass {
	switch {
	case f.kind == '>' && len(f.items) == 0:
		return message
	case f.kind == '>', f.kind == '*' && !resp3 && subscribed && len(f.items) > 0:
		if slices.Contains(subscriptions, f.items[0]) {
			return confirmation
		}
		if f.kind == '>' || slices.Contains([]string{"message", "pmessage", "smessage"}, f.items[0]) {
			return message
		}
	}
	return reply
}
