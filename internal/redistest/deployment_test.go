//go:build unix

package redistest_test

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redislease/redislease/internal/redistest"
)

func TestAReplicaIsPromotedWhenItsMasterIsKilled(t *testing.T) {
	t.Parallel()
	r := redistest.StartReplicated(t)
	if len(r.SentinelAddrs()) != 3 {
		t.Errorf("Sentinels: %v", r.SentinelAddrs())
	}
	r.AwaitMaster(r.First)
	do(t, r.First, "SET", "k", "v")
	redistest.AwaitReplica(t, r.First, r.Second)
	if got := r.Second.Get("k"); got != "v" {
		t.Errorf("at the replica: %q", got)
	}
	r.First.Kill()
	r.AwaitMaster(r.Second)
	if got := r.Second.Get("k"); got != "v" {
		t.Errorf("after the failover: %q", got)
	}
	do(t, r.Second, "SET", "k", "w")
}

func TestAClusterFailsOverAMasterThatIsKilled(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t)
	if len(c.Addrs()) != 6 {
		t.Errorf("nodes: %v", c.Addrs())
	}
	slot := c.Slot("k")
	master := c.Master(slot)
	if slices.Index(c.Nodes, master) > 2 {
		t.Error("a replica serves the slot")
	}
	do(t, master, "SET", "k", "v")
	replica := c.Replica(master)
	redistest.AwaitReplica(t, master, replica)
	master.Kill()
	if got := c.Master(slot); got != replica {
		t.Errorf("promoted: %s, want %s", got.Addr(), replica.Addr())
	}
	if got := replica.Get("k"); got != "v" {
		t.Errorf("after the failover: %q", got)
	}
}

func TestASlotMovesWithItsKeys(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t)
	slot := c.Slot("k")
	from := c.Master(slot)
	to := c.Master(c.Slot("other"))
	if from == to {
		t.Fatal("choose another key")
	}
	do(t, from, "SET", "k", "v", "PX", "60000")
	c.BeginMigration(slot, from, to)
	if got := from.Get("k"); got != "v" {
		t.Errorf("before its way: %q", got)
	}
	if n := c.MoveKeys(slot, from, to); n != 1 {
		t.Errorf("moved %d keys", n)
	}
	if _, err := from.Do("GET", "k"); err == nil || !strings.HasPrefix(err.Error(), "ASK ") {
		t.Errorf("on its way: %v", err)
	}
	c.EndMigration(slot, from, to)
	if _, err := from.Do("GET", "k"); err == nil || !strings.HasPrefix(err.Error(), "MOVED ") {
		t.Errorf("afterwards: %v", err)
	}
	if got := c.Master(slot); got != to {
		t.Errorf("the slot belongs to %s, want %s", got.Addr(), to.Addr())
	}
	if got, ttl := to.Get("k"), to.PTTL("k"); got != "v" || ttl <= 0 {
		t.Errorf("at its new node: %q, for %v", got, ttl)
	}
}

func TestAServerSpeaksTLSToThoseWhoTrustItsCertificate(t *testing.T) {
	t.Parallel()
	s := redistest.StartTLS(t, "--maxmemory-policy", "allkeys-lru")
	do(t, s.Server, "SET", "k", "v")
	for range 2 {
		nc, err := tls.Dial("tcp", s.TLSAddr(), s.Config())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(nc, "GET k\r\n")
		reply := make([]byte, 16)
		if n, err := nc.Read(reply); err != nil || string(reply[:n]) != "$1\r\nv\r\n" && string(reply[:n]) != "$-1\r\n" {
			t.Errorf("GET: %q, %v", reply[:n], err)
		}
		_ = nc.Close()
		s.Restart() // on the same ports, with the same certificate
	}
	if nc, err := tls.Dial("tcp", s.TLSAddr(), &tls.Config{MinVersion: tls.VersionTLS12}); err == nil {
		_ = nc.Close()
		t.Error("a client that knows nothing of the certificate trusts it")
	}
}

func TestAProcessCanBeStoppedAndKilled(t *testing.T) {
	var child *redistest.Process
	t.Run("inner", func(t *testing.T) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		cmd := exec.Command("/bin/sh", "-c", "while read line; do echo $line; done")
		cmd.Stdout = w
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		child = redistest.StartProcess(t, cmd)
		_ = w.Close()
		child.Pause()
		fmt.Fprintln(in, "hello")
		reply := make([]byte, 16)
		_ = r.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if n, err := r.Read(reply); err == nil {
			t.Errorf("a paused process says %q", reply[:n])
		}
		child.Resume()
		_ = r.SetReadDeadline(time.Now().Add(patience))
		if n, err := r.Read(reply); err != nil || string(reply[:n]) != "hello\n" {
			t.Errorf("resumed: %q, %v", reply[:n], err)
		}
		select {
		case <-child.Exited():
			t.Error("it has ended by itself")
		default:
		}
		child.Pause() // does not save it
	})
	select {
	case <-child.Exited():
	default:
		t.Error("the process survived its test")
	}
}

func TestFreePortIsAPortOfTheServersOwn(t *testing.T) {
	s := redistest.Start(t, "--unixsocket", redistest.FreePort)
	reply, _ := do(t, s, "CONFIG", "GET", "unixsocket").([]any)
	_, port, _ := net.SplitHostPort(s.Addr())
	if len(reply) != 2 || reply[1] == redistest.FreePort || reply[1] == port {
		t.Errorf("got %v", reply)
	}
}

func do(t *testing.T, s *redistest.Server, args ...string) any {
	t.Helper()
	reply, err := s.Do(args...)
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return reply
}
