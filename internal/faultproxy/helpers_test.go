package faultproxy_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redislease/redislease/internal/faultproxy"
	"github.com/redislease/redislease/internal/redistest"
)

const (
	patience = 20 * time.Second       // for what must happen
	moment   = 50 * time.Millisecond  // for what must not
	delay    = 100 * time.Millisecond // long against a round trip
)

func start(t *testing.T) (*redistest.Server, *faultproxy.Proxy) {
	t.Helper()
	server := redistest.Start(t)
	return server, faultproxy.Start(t, server.Addr())
}

// rawClient speaks RESP without a client library's pools, timeouts and retries.
type rawClient struct {
	t  *testing.T
	nc *net.TCPConn
	br *bufio.Reader
}

func dial(t *testing.T, p *faultproxy.Proxy) *rawClient {
	t.Helper()
	nc, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	return &rawClient{t: t, nc: nc.(*net.TCPConn), br: bufio.NewReader(nc)}
}

func encode(words string) string {
	args := strings.Fields(words)
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, arg := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(arg), arg)
	}
	return b.String()
}

// send writes the commands (words, separated by spaces) as one pipeline.
func (c *rawClient) send(commands ...string) {
	c.t.Helper()
	var b strings.Builder
	for _, words := range commands {
		b.WriteString(encode(words))
	}
	if _, err := io.WriteString(c.nc, b.String()); err != nil {
		c.t.Fatal(err)
	}
}

// expect reads one reply for each of want: "+OK", ":1", "$value", "-ERR ...", "[subscribe c 1]".
func (c *rawClient) expect(want ...string) {
	c.t.Helper()
	_ = c.nc.SetReadDeadline(time.Now().Add(patience))
	for _, w := range want {
		if got, err := c.read(); err != nil || got != w {
			c.t.Fatalf("got %q, %v; want %q", got, err, w)
		}
	}
}

// do sends one command and expects its reply.
func (c *rawClient) do(command, want string) {
	c.t.Helper()
	c.send(command)
	c.expect(want)
}

func (c *rawClient) expectError(want error) {
	c.t.Helper()
	_ = c.nc.SetReadDeadline(time.Now().Add(patience))
	if got, err := c.read(); !errors.Is(err, want) {
		c.t.Fatalf("got %q, %v; want the error %v", got, err, want)
	}
}

// expectSilence checks that the connection is open and nothing comes.
func (c *rawClient) expectSilence() {
	c.t.Helper()
	_ = c.nc.SetReadDeadline(time.Now().Add(moment))
	if _, err := c.br.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
		got, _ := c.br.Peek(c.br.Buffered())
		c.t.Fatalf("got %q, %v; want silence", got, err)
	}
}

func (c *rawClient) close() { _ = c.nc.Close() }

func (c *rawClient) reset() {
	_ = c.nc.SetLinger(0)
	_ = c.nc.Close()
}

func (c *rawClient) read() (string, error) {
	line, err := c.br.ReadString('\n')
	line = strings.TrimSuffix(line, "\r\n")
	if err != nil || line == "" {
		return line, err
	}
	n, _ := strconv.Atoi(line[1:])
	switch {
	case line[0] == '$' && n >= 0:
		body := make([]byte, n+2)
		_, err = io.ReadFull(c.br, body)
		return "$" + string(body[:n]), err
	case line[0] == '*', line[0] == '>', line[0] == '%':
		if line[0] == '%' {
			n *= 2
		}
		var parts []string
		for range n {
			part, err := c.read()
			if err != nil {
				return "", err
			}
			parts = append(parts, strings.TrimLeft(part, "$:+"))
		}
		return "[" + strings.Join(parts, " ") + "]", nil
	}
	return line, nil
}

// awaitKey waits until a key has a value on the server.
func awaitKey(t *testing.T, server *redistest.Server, key, want string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		got := server.Get(key)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s = %q, want %q", key, got, want)
		}
	}
}

func expectKey(t *testing.T, server *redistest.Server, key, want string) {
	t.Helper()
	if got := server.Get(key); got != want {
		t.Errorf("%s = %q, want %q", key, got, want)
	}
}

func expectRefused(t *testing.T, p *faultproxy.Proxy) {
	t.Helper()
	nc, err := net.Dial("tcp", p.Addr())
	if err == nil {
		_ = nc.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("dial: %v, want a refused connection", err)
	}
}
