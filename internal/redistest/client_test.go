package redistest

import (
	"bufio"
	"reflect"
	"strings"
	"testing"
)

func TestReadReply(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		want     any
		wantErr  bool
	}{
		{"status", "+OK\r\n", "OK", false},
		{"error", "-ERR no\r\n", ReplyError("ERR no"), false},
		{"integer", ":-12\r\n", int64(-12), false},
		{"bulk", "$5\r\na\r\nbc\r\n", "a\r\nbc", false},
		{"empty bulk", "$0\r\n\r\n", "", false},
		{"null bulk", "$-1\r\n", nil, false},
		{"null array", "*-1\r\n", nil, false},
		{"empty array", "*0\r\n", []any{}, false},
		{"nested array", "*3\r\n:1\r\n*1\r\n$-1\r\n-E x\r\n", []any{int64(1), []any{nil}, ReplyError("E x")}, false},
		{"cut bulk", "$5\r\nab", nil, true},
		{"cut array", "*2\r\n:1\r\n", nil, true},
		{"bad length", "$x\r\n", nil, true},
		{"bad integer", ":x\r\n", int64(0), true},
		{"unknown type", "!3\r\n", nil, true},
		{"empty line", "\r\n", nil, true},
		{"nothing", "", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readReply(bufio.NewReader(strings.NewReader(tt.in)))
			if (err != nil) != tt.wantErr {
				t.Fatalf("error %v, want one: %t", err, tt.wantErr)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %#v, want %#v", got, tt.want)
			}
		})
	}
}
