package redistest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// MasterName is the name that the Sentinels of a Replicated know its master by.
const MasterName = "main"

// sentinelConf: Sentinels call a master dead that has been silent for a second, two of three decide, and an
// attempt at a failover that does not succeed is followed by another soon.
const sentinelConf = `sentinel monitor %[1]s 127.0.0.1 %[2]d 2
sentinel down-after-milliseconds %[1]s 1000
sentinel failover-timeout %[1]s 10000
sentinel parallel-syncs %[1]s 1
`

// syncAtOnce keeps a master from waiting for more replicas when one comes.
var syncAtOnce = []string{"--repl-diskless-sync-delay", "0"}

// Replicated is a master with a replica, watched over by three Sentinels.
type Replicated struct {
	First, Second *Server // the master and the replica as they were started
	Sentinels     []*Server
	t             testing.TB
}

// StartReplicated starts a master and a replica with the given arguments, and three Sentinels, and returns when these
// know of each other and of the replica, which is up to date. Like Start it must be called from the goroutine of the
// test.
func StartReplicated(t testing.TB, args ...string) *Replicated {
	t.Helper()
	args = append(slices.Clone(syncAtOnce), args...)
	r := &Replicated{t: t, First: Start(t, args...)}
	r.Second = Start(t, append([]string{"--replicaof", "127.0.0.1 " + strconv.Itoa(r.First.port)}, args...)...)
	for range 3 {
		s := newServer(t, []string{"--sentinel"})
		s.conf = filepath.Join(s.dir, "sentinel.conf")
		if err := os.WriteFile(s.conf, fmt.Appendf(nil, sentinelConf, MasterName, r.First.port), 0o600); err != nil {
			t.Fatalf("redistest: %v", err)
		}
		s.start()
		r.Sentinels = append(r.Sentinels, s)
	}
	await(t, "start of the replica", func() error { return r.Second.says("replication", "master_link_status:up") })
	for _, s := range r.Sentinels {
		await(t, "start of the Sentinels", func() error { return s.says("sentinel", "status=ok", "slaves=1,sentinels=3") })
	}
	return r
}

// SentinelAddrs returns the addresses of the Sentinels.
func (r *Replicated) SentinelAddrs() (addrs []string) {
	for _, s := range r.Sentinels {
		addrs = append(addrs, s.Addr())
	}
	return addrs
}

// AwaitMaster waits until s is the master, and all Sentinels that run say so.
func (r *Replicated) AwaitMaster(s *Server) {
	r.t.Helper()
	await(r.t, "failover", func() error {
		err := s.says("replication", "role:master")
		for _, sentinel := range r.Sentinels {
			if sentinel.up() {
				err = errors.Join(err, sentinel.says("sentinel", "address="+s.Addr()+","))
			}
		}
		return err
	})
}

// AwaitReplica waits until replica has got all that master has done so far. What master does meanwhile counts, too.
func AwaitReplica(t testing.TB, master, replica *Server) {
	t.Helper()
	await(t, "replication", func() error {
		done, err1 := master.offset("master_repl_offset:")
		got, err2 := replica.offset("slave_repl_offset:")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if got < done {
			return fmt.Errorf("the replica has got %d of %d bytes", got, done)
		}
		return nil
	})
}

func (s *Server) offset(name string) (int, error) {
	reply, err := s.Do("INFO", "replication")
	if err != nil {
		return 0, err
	}
	info, _ := reply.(string)
	_, rest, _ := strings.Cut(info, name)
	text, _, _ := strings.Cut(rest, "\r")
	return strconv.Atoi(text)
}

// says returns nil if the section of the server's INFO contains each of the texts.
func (s *Server) says(section string, texts ...string) error {
	reply, err := s.Do("INFO", section)
	if err != nil {
		return err
	}
	info, _ := reply.(string)
	for _, text := range texts {
		if !strings.Contains(info, text) {
			return fmt.Errorf("the server at %s does not say %q:\n%s", s.Addr(), text, info)
		}
	}
	return nil
}
