package faultproxy

import (
	"bufio"
	"bytes"
	"io"
	"regexp"
	"slices"
	"testing"
	"testing/iotest"
)

// FuzzFrames reads any bytes as replies and as requests. A frame is what it took off the stream, no more and no less.
func FuzzFrames(f *testing.F) {
	for _, in := range []string{
		"", "\r\n", "\n", "+OK\r\n", "+OK\n", "-ERR no\r\n", ":1\r\n", "_\r\n", "#t\r\n", ",1.5\r\n", "(12345678901234567890\r\n",
		"$6\r\na\r\n\r\nb\r\n", "$0\r\n\r\n", "$-1\r\n", "$-2\r\n", "$1\r\nabc\r\n", "!5\r\nERR x\r\n", "=5\r\ntxt:a\r\n",
		"*3\r\n$1\r\na\r\n:2\r\n$-1\r\n", "*0\r\n", "*-1\r\n", "*2\r\n*1\r\n$1\r\nx\r\n+y\r\n", "~2\r\n:1\r\n:2\r\n", "%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
		">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n", "|1\r\n+ttl\r\n:9\r\n*1\r\n$1\r\na\r\n", "*2\r\n|1\r\n+ttl\r\n:9\r\n:1\r\n:2\r\n",
		"SET  a b\r\n", "PING\n", "*2\r\n$3\r\nGET\r\n$3\r\na\nb\r\n", "*+1\r\n:1\r\n", "|0\r\n", "*1\r\n", "HTTP/1.1 200 OK\r\n\r\n",
	} {
		f.Add([]byte(in))
	}
	long := regexp.MustCompile(`[0-9]{6}`) // a bulk string's room is made at once
	f.Fuzz(func(t *testing.T, in []byte) {
		if long.Match(in) {
			t.Skip()
		}
		for name, read := range map[string]func(*bufio.Reader) (frame, error){"reply": readFrame, "request": readRequest} {
			r := bufio.NewReader(bytes.NewReader(in))
			got, err := read(r)
			slow, slowErr := read(bufio.NewReader(iotest.OneByteReader(bytes.NewReader(in))))
			if !bytes.Equal(got.raw, slow.raw) || !slices.Equal(got.items, slow.items) || (err == nil) != (slowErr == nil) {
				t.Fatalf("%s: %q, %v; byte by byte %q, %v", name, got.raw, err, slow.raw, slowErr)
			}
			if err != nil {
				if (err == io.EOF) != (len(in) == 0) && name == "reply" {
					t.Fatalf("%s: %v of %q", name, err, in)
				}
				continue
			}
			rest, _ := io.ReadAll(r)
			if !bytes.Equal(append(slices.Clone(got.raw), rest...), in) {
				t.Fatalf("%s: %q was read as %q, and left %q", name, in, got.raw, rest)
			}
			if name == "reply" {
				for _, resp3 := range []bool{false, true} {
					for _, subscribed := range []bool{false, true} {
						if class := got.classify(resp3, subscribed); class != reply && got.kind != '*' && got.kind != '>' {
							t.Fatalf("%q is no message", got.raw)
						}
					}
				}
			}
			for cut := range got.raw {
				if f, err := read(bufio.NewReader(bytes.NewReader(got.raw[:cut]))); err == nil {
					t.Fatalf("%s: %q is whole, and so is %q", name, got.raw, f.raw)
				}
			}
		}
	})
}
