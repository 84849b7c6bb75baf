package faultproxy

import (
	"bufio"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func TestReadFrame(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		kind     byte
		items    []string
	}{
		{"status", "+OK\r\n", '+', nil},
		{"error", "-ERR no\r\n", '-', nil},
		{"integer", ":1\r\n", ':', nil},
		{"null", "_\r\n", '_', nil},
		{"double", ",1.5\r\n", ',', nil},
		{"boolean", "#t\r\n", '#', nil},
		{"big number", "(123456789012345678901234567890\r\n", '(', nil},
		{"bulk with line ends in it", "$6\r\na\r\n\r\nb\r\n", '$', nil},
		{"empty bulk", "$0\r\n\r\n", '$', nil},
		{"null bulk", "$-1\r\n", '$', nil},
		{"bulk error", "!5\r\nERR x\r\n", '!', nil},
		{"verbatim", "=5\r\ntxt:a\r\n", '=', nil},
		{"array", "*3\r\n$1\r\na\r\n:2\r\n$-1\r\n", '*', []string{"a", "2", ""}},
		{"empty array", "*0\r\n", '*', nil},
		{"null array", "*-1\r\n", '*', nil},
		{"nested array", "*2\r\n*1\r\n$1\r\nx\r\n+y\r\n", '*', []string{"y"}},
		{"set", "~2\r\n:1\r\n:2\r\n", '~', []string{"1", "2"}},
		{"map", "%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n", '%', []string{"a", "1", "b"}},
		{"push", ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n", '>', []string{"message", "c", "m"}},
		{"attribute in front", "|1\r\n+ttl\r\n:9\r\n*1\r\n$1\r\na\r\n", '*', []string{"a"}},
		{"attribute inside", "*2\r\n|1\r\n+ttl\r\n:9\r\n:1\r\n:2\r\n", '*', []string{"1", "2"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// Twice in one stream, byte by byte: a frame must end exactly where the next begins.
			r := bufio.NewReader(iotest.OneByteReader(strings.NewReader(tt.in + tt.in)))
			for range 2 {
				f, err := readFrame(r)
				if err != nil {
					t.Fatal(err)
				}
				if string(f.raw) != tt.in || f.kind != tt.kind || !slices.Equal(f.items, tt.items) {
					t.Errorf("raw %q, kind %q, items %q; want kind %q, items %q", f.raw, f.kind, f.items, tt.kind, tt.items)
				}
			}
			if _, err := readFrame(r); err != io.EOF {
				t.Errorf("at the end: %v, want EOF", err)
			}
			for i := 1; i < len(tt.in); i++ {
				if _, err := readFrame(bufio.NewReader(strings.NewReader(tt.in[:i]))); err != io.ErrUnexpectedEOF {
					t.Errorf("cut to %q: %v, want an unexpected EOF", tt.in[:i], err)
				}
			}
		})
	}
}

func TestReadFrameRefusesWhatIsNotRESP(t *testing.T) {
	for _, in := range []string{
		"\r\n", "HTTP/1.1 200 OK\r\n", "$x\r\n", "$-2\r\n", "*9999999999\r\n", "$1\r\nabc\r\n", "*1\r\nx\r\n", "|1\r\n+a\r\nx\r\n",
	} {
		if _, err := readFrame(bufio.NewReader(strings.NewReader(in))); !errors.Is(err, errProtocol) {
			t.Errorf("%q: %v, want a protocol error", in, err)
		}
	}
}

func TestReadRequest(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		args     []string
	}{
		{"array of bulk strings", "*2\r\n$3\r\nGET\r\n$3\r\na\nb\r\n", []string{"GET", "a\nb"}},
		{"inline", "SET  a b\r\n", []string{"SET", "a", "b"}},
		{"inline without a carriage return", "PING\n", []string{"PING"}},
		{"empty line", "\r\n", nil},
		{"empty array", "*0\r\n", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, err := readRequest(bufio.NewReader(strings.NewReader(tt.in)))
			if err != nil || string(f.raw) != tt.in || !slices.Equal(f.items, tt.args) {
				t.Errorf("raw %q, args %q, %v; want %q", f.raw, f.items, err, tt.args)
			}
		})
	}
}

func TestClassify(t *testing.T) {
	items := func(words ...string) []string { return words }
	for _, tt := range []struct {
		name              string
		f                 frame
		resp3, subscribed bool
		want              replyClass
	}{
		{"status", frame{kind: '+'}, false, true, reply},
		{"error", frame{kind: '-'}, true, true, reply},
		{"array", frame{kind: '*', items: items("a")}, false, true, reply},
		{"an array of a client that never subscribed", frame{kind: '*', items: items("message", "c", "m")}, false, false, reply},
		{"message, RESP 2", frame{kind: '*', items: items("message", "c", "m")}, false, true, message},
		{"pattern message, RESP 2", frame{kind: '*', items: items("pmessage", "p", "c", "m")}, false, true, message},
		{"confirmation, RESP 2", frame{kind: '*', items: items("subscribe", "c", "1")}, false, true, confirmation},
		{"pong of a subscriber, RESP 2", frame{kind: '*', items: items("pong", "")}, false, true, reply},
		{"an array that reads like a message, RESP 3", frame{kind: '*', items: items("message", "c", "m")}, true, true, reply},
		{"message, RESP 3", frame{kind: '>', items: items("message", "c", "m")}, true, true, message},
		{"confirmation, RESP 3", frame{kind: '>', items: items("unsubscribe", "c", "0")}, true, true, confirmation},
		{"invalidation", frame{kind: '>', items: items("invalidate")}, true, false, message},
		{"empty push", frame{kind: '>'}, true, false, message},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.f.classify(tt.resp3, tt.subscribed); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}
