package redistest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	slots          = 16384
	clusterMasters = 3
	clusterNodes   = 2 * clusterMasters
)

// Cluster is a Redis Cluster of three masters with a replica each.
type Cluster struct {
	Nodes []*Server // the masters as they were started, then the replicas
	t     testing.TB
	ids   []string // of Nodes
}

// StartCluster starts a cluster, whose nodes get the given arguments, and returns when every node knows every other and
// the replicas are up to date. A master that is silent for a second is failed over. Like Start it must be called from
// the goroutine of the test.
func StartCluster(t testing.TB, args ...string) *Cluster {
	t.Helper()
	c := &Cluster{t: t}
	args = append(slices.Clone(syncAtOnce), args...)
	for range clusterNodes {
		c.Nodes = append(c.Nodes, Start(t, append([]string{
			"--cluster-enabled", "yes", "--cluster-port", FreePort, "--cluster-node-timeout", "1000",
		}, args...)...))
	}
	for i, s := range c.Nodes {
		id, _ := c.must(s, "CLUSTER", "MYID").(string)
		c.ids = append(c.ids, id)
		if i < clusterMasters {
			c.must(s, "CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
			c.must(s, "CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(i*slots/clusterMasters), strconv.Itoa((i+1)*slots/clusterMasters-1))
		}
		if i > 0 {
			c.must(s, "CLUSTER", "MEET", "127.0.0.1", strconv.Itoa(c.Nodes[0].port), strconv.Itoa(c.Nodes[0].extra))
		}
	}
	for _, s := range c.Nodes {
		await(t, "meeting of the nodes", func() error { return c.complete(s) })
	}
	for i, s := range c.Nodes[clusterMasters:] {
		c.must(s, "CLUSTER", "REPLICATE", c.ids[i])
	}
	for i, s := range c.Nodes {
		await(t, "start of the cluster", func() error {
			if i < clusterMasters {
				// A node that knows no replica of a master would not let it be failed over.
				return errors.Join(s.says("replication", "connected_slaves:1"), c.complete(s), c.sees(s, "slave", clusterMasters))
			}
			return errors.Join(s.says("replication", "master_link_status:up"), c.complete(s), c.sees(s, "slave", clusterMasters))
		})
	}
	return c
}

// Addrs returns the addresses of all nodes.
func (c *Cluster) Addrs() (addrs []string) {
	for _, s := range c.Nodes {
		addrs = append(addrs, s.Addr())
	}
	return addrs
}

// Slot returns the hash slot of a key.
func (c *Cluster) Slot(key string) int {
	c.t.Helper()
	for _, s := range c.Nodes {
		if s.up() {
			slot, _ := c.must(s, "CLUSTER", "KEYSLOT", key).(int64)
			return int(slot)
		}
	}
	c.t.Fatal("redistest: no node is up")
	return 0
}

// Master returns the node that serves the slot, by its own account. It waits for one, in the middle of a failover.
func (c *Cluster) Master(slot int) (master *Server) {
	c.t.Helper()
	await(c.t, fmt.Sprintf("search for the master of slot %d", slot), func() error {
		master = nil
		for i, s := range c.Nodes {
			if n, err := c.node(s, i); err == nil && n.serves(slot) {
				master = s
			}
		}
		if master == nil {
			return errors.New("nobody serves the slot")
		}
		return master.says("cluster", "cluster_enabled:1")
	})
	return master
}

// Replica returns a replica of the node that is up.
func (c *Cluster) Replica(of *Server) (replica *Server) {
	c.t.Helper()
	id := c.ids[slices.Index(c.Nodes, of)]
	await(c.t, "search for a replica", func() error {
		for i, s := range c.Nodes {
			if n, err := c.node(s, i); err == nil && n.master == id {
				replica = s
				return nil
			}
		}
		return errors.New("there is none")
	})
	return replica
}

// BeginMigration opens a slot for its way from one node to another: keys that from does not have are asked for at to.
func (c *Cluster) BeginMigration(slot int, from, to *Server) {
	c.t.Helper()
	c.must(to, "CLUSTER", "SETSLOT", strconv.Itoa(slot), "IMPORTING", c.ids[slices.Index(c.Nodes, from)])
	c.must(from, "CLUSTER", "SETSLOT", strconv.Itoa(slot), "MIGRATING", c.ids[slices.Index(c.Nodes, to)])
}

// MoveKeys moves the keys that from has of the slot, and returns how many these were.
func (c *Cluster) MoveKeys(slot int, from, to *Server) int {
	c.t.Helper()
	found, _ := c.must(from, "CLUSTER", "GETKEYSINSLOT", strconv.Itoa(slot), "1000").([]any)
	for _, key := range found {
		c.must(from, "MIGRATE", "127.0.0.1", strconv.Itoa(to.port), key.(string), "0", "5000")
	}
	return len(found)
}

// EndMigration gives the slot to its new node, and returns when all nodes that are up know.
func (c *Cluster) EndMigration(slot int, from, to *Server) {
	c.t.Helper()
	id := c.ids[slices.Index(c.Nodes, to)]
	for _, s := range []*Server{to, from} { // in this order a slot is never without a node
		c.must(s, "CLUSTER", "SETSLOT", strconv.Itoa(slot), "NODE", id)
	}
	for _, s := range c.Nodes {
		await(c.t, "end of the migration", func() error {
			if n, err := c.node(s, slices.Index(c.Nodes, to)); s.up() && (err != nil || !n.serves(slot)) {
				return fmt.Errorf("the node at %s does not know: %w", s.Addr(), err)
			}
			return nil
		})
	}
}

func (c *Cluster) must(s *Server, args ...string) any {
	c.t.Helper()
	reply, err := s.Do(args...)
	if err != nil {
		c.t.Fatalf("redistest: %v: %v", args, err)
	}
	return reply
}

// clusterNode is a line of CLUSTER NODES.
type clusterNode struct {
	id     string
	flags  []string
	master string // of a replica, else "-"
	ranges []string
}

// serves reports whether the node is a master that the slot belongs to.
func (n clusterNode) serves(slot int) bool {
	if !slices.Contains(n.flags, "master") || slices.Contains(n.flags, "fail") {
		return false
	}
	for _, r := range n.ranges {
		first, last, ok := strings.Cut(r, "-")
		if !ok {
			last = first
		}
		from, err1 := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		if err1 == nil && err2 == nil && from <= slot && slot <= to {
			return true
		}
	}
	return false
}

// node returns what s, if it is up, says of the i-th node.
func (c *Cluster) node(s *Server, i int) (clusterNode, error) {
	nodes, err := c.nodes(s)
	if err != nil {
		return clusterNode{}, err
	}
	for _, n := range nodes {
		if n.id == c.ids[i] {
			return n, nil
		}
	}
	return clusterNode{}, errors.New("unknown node")
}

func (c *Cluster) nodes(s *Server) (nodes []clusterNode, err error) {
	if !s.up() {
		return nil, errors.New("the node is not up")
	}
	reply, err := s.Do("CLUSTER", "NODES")
	if err != nil {
		return nil, err
	}
	text, _ := reply.(string)
	for line := range strings.Lines(text) {
		// id, address, flags, master, ping, pong, epoch, link state, slots
		if f := strings.Fields(line); len(f) >= 8 {
			nodes = append(nodes, clusterNode{f[0], strings.Split(f[2], ","), f[3], f[8:]})
		}
	}
	return nodes, nil
}

// complete returns nil if s knows all nodes and finds the cluster in order.
func (c *Cluster) complete(s *Server) error {
	reply, err := s.Do("CLUSTER", "INFO")
	if err != nil {
		return err
	}
	if info, _ := reply.(string); !strings.Contains(info, "cluster_state:ok") ||
		!strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r\n", clusterNodes)) {
		return fmt.Errorf("the node at %s finds the cluster incomplete:\n%s", s.Addr(), info)
	}
	nodes, err := c.nodes(s)
	for _, n := range nodes {
		if slices.Contains(n.flags, "handshake") || slices.Contains(n.flags, "noaddr") {
			return fmt.Errorf("the node at %s has not met all others", s.Addr())
		}
	}
	return err
}

// sees returns nil if s knows that many nodes with the flag.
func (c *Cluster) sees(s *Server, flag string, want int) error {
	nodes, err := c.nodes(s)
	got := 0
	for _, n := range nodes {
		if slices.Contains(n.flags, flag) {
			got++
		}
	}
	if err == nil && got != want {
		err = fmt.Errorf("the node at %s knows %d nodes that are %s, not %d", s.Addr(), got, flag, want)
	}
	return err
}
