package redislease_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var simBuilds = flag.Bool("sim.builds", false, "run the tests of the simulation that build the library anew, some of them broken on purpose")

// mutantSeeds is how many worlds a mutant may survive at most.
const mutantSeeds = 1000

// mutant is the library with one thing wrong.
type mutant struct {
	name   string
	lua    bool // the change is in a script
	edits  []edit
	caught []string // by which invariants
}

// edit replaces a text that is in a file exactly once.
type edit struct{ file, old, new string }

var mutants = []mutant{
	{name: "trust counts from the answer to the acquisition",
		edits:  []edit{{"acquire.go", "return newLease(a.target, a.winner.token, fence, start, sent)", "return newLease(a.target, a.winner.token, fence, start, a.now())"}},
		caught: []string{"a lease's context is not done one margin before its key can expire"}},
	{name: "trust counts from the answer to a renewal",
		edits:  []edit{{"lease.go", "l.schedule.confirm(c.sentTime(), l", "l.schedule.confirm(now, l"}},
		caught: []string{"a lease's context is not done one margin before its key can expire"}},
	{name: "trust counts from the settling send",
		edits:  []edit{{"acquire.go", "		if a.holds(h, c.code); h != c {", "		if h != c {\n			h.sent.Store(c.sent.Load())\n		}\n		if a.holds(h, c.code); h != c {"}},
		caught: []string{"a lease's context is not done one margin before its key can expire", "Err is nil though the key is not the lease's", "a renewal did not follow when it was due"}},
	{name: "Err does not look at the clock",
		edits:  []edit{{"lease.go", "	found := l.lookLocked(l.now())\n	err := l.causeLocked()", "	found := found{}\n	err := l.causeLocked()"}},
		caught: []string{"Err is nil though the key is not the lease's"}},
	{name: "one token for SET and for settling",
		edits: []edit{{"acquire.go", "kindSettle, new(token))", "kindSettle, &a.token)"},
			{"acquire.go", "	if !a.draw(now, c) {\n		return false\n	}\n	c.began", "	if !a.asked && !a.draw(now, c) {\n		return false\n	}\n	c.began"}},
		caught: []string{"a command that may take the key carries a token that was sent before"}},
	{name: "go-redis may send a SET again",
		edits:  []edit{{"scripts.go", "func (onceBool) NoRetry() bool { return true }", "func (onceBool) NoRetry() bool { return false }"}},
		caught: []string{"a command that may take the key carries a token that was sent before"}},
	{name: "a No to a command written twice is believed",
		edits:  []edit{{"scripts.go", "case writes > 1 && c.verdict == no && (", "case false && ("}},
		caught: []string{"an acquisition that took nothing left the key with a token of its own", "ErrNotAcquired though nobody else held the key", "Release returned what is not so"}},
	{name: "silence is taken for a No",
		edits:  []edit{{"scripts.go", "		c.verdict, c.err = unknown, ofClient(c.redact(err))", "		c.verdict, c.err = no, nil"}},
		caught: []string{"an acquisition that took nothing left the key with a token of its own", "ErrNotAcquired though nobody else held the key", "a loss has a reason that is not so"}},
	{name: "held by another, although a command is unanswered",
		edits:  []edit{{"acquire.go", "		if at, sent := c.sentAt(); sent && !c.taken && now-at < a.config.ttl {\n			return true", "		if at, sent := c.sentAt(); sent && !c.taken && now-at < a.config.ttl {\n			return false"}},
		caught: []string{"an acquisition that took nothing left the key with a token of its own", "ErrNotAcquired though nobody else held the key"}},
	{name: "a lease that has ended is renewed",
		edits: []edit{{"lease.go", "		c.withdraw()\n		signal(c.waiter)", "		signal(c.waiter)"},
			{"lease.go", "	ok := l.state == stateHeld && now < l.schedule.end()\n	return now, ok && (c.manual || l.inner.Err() == nil && !l.schedule.capped(now))", "	return now, true"}},
		caught: []string{"a renewal was written for a lease that has ended, or that nobody has"}},
	{name: "a caller whose context has ended is renewed for",
		edits:  []edit{{"watchdog.go", "l.schedule.stopped = l.inner.Err() != nil", "l.schedule.stopped = false"}},
		caught: []string{"a renewal was asked for although the caller's context had ended"}},
	{name: "the longest hold is ignored",
		edits:  []edit{{"watchdog.go", "return later(s.start, s.config.maxHold)", "return forever"}},
		caught: []string{"a renewal was written beyond a cap", "a lease was held beyond its longest hold"}},
	{name: "the most renewals are ignored",
		edits:  []edit{{"watchdog.go", "return s.count >= s.config.maxRenewals || now >= s.longest()", "return now >= s.longest()"}},
		caught: []string{"a renewal was written beyond a cap"}},
	{name: "no margin",
		edits:  []edit{{"options.go", "return c.ttl - c.margin }", "return c.ttl }"}},
		caught: []string{"a lease's context is not done one margin before its key can expire"}},
	{name: "an unanswered DEL is sent again",
		edits:  []edit{{"lease.go", "		c, sentInTime = l.delete(now)\n", "		if c, sentInTime = l.delete(now); !c.arrived {\n			c, sentInTime = l.delete(now)\n		}\n"}},
		caught: []string{"a release was sent more than once for one call", "a call took longer than its bound"}},
	{name: "Release has no bound",
		edits:  []edit{{"lease.go", "	until := later(now, l.config.releaseBound())", "	until := later(now, l.config.releaseBound()*100)"}},
		caught: []string{"a call took longer than its bound"}},
	{name: "the pause after a failed renewal takes the trust that is left",
		edits: []edit{{"watchdog.go", "	pause := s.config.ttl / 20\n", "	pause := s.config.ttl\n"},
			{"watchdog.go", "	pause = min(pause, (s.trust-now)/2)\n", ""}},
		caught: []string{"a renewal did not follow when it was due"}},
	{name: "an error ends a lease",
		edits:  []edit{{"lease.go", "	default:\n		if l.lastErr = c.err; !c.manual {", "	case c.err != nil:\n		return l.loseLocked(now, ErrUnconfirmed, c.err)\n	default:\n		if l.lastErr = c.err; !c.manual {"}},
		caught: []string{"a loss has a reason that is not so"}},
	{name: "a late grant is kept for nobody",
		edits:  []edit{{"acquire.go", "	return a.claimLocked(c.holder())\n", "	return nil\n"}},
		caught: []string{"a late grant was not given back"}},
	{name: "the last bit of trust is handed out",
		edits:  []edit{{"acquire.go", "trust-now >= a.config.useful()/3 {", "trust-now >= 0 {"}},
		caught: []string{"a lease was handed out with less than a third of its trust"}},
	{name: "what nobody wants is written all the same",
		edits:  []edit{{"scripts.go", "	if !ok || c.withdrawn {\n", "	if false {\n"}},
		caught: []string{"a command that may take the key was written after its acquisition had ended", "a renewal was written for a lease that has ended, or that nobody has"}},
	{name: "only the monotonic clock counts",
		edits: []edit{{"clock.go", "	reading := max(monotonic, wall)\n", "	reading := monotonic\n"},
			{"clock.go", "			reading = max(monotonic, boot-base.boot)\n", "			_ = boot\n"}},
		caught: []string{"Err is nil though the key is not the lease's"}},
	{name: "the wall clock is believed",
		edits:  []edit{{"clock.go", "			reading = max(monotonic, boot-base.boot)\n", "			_ = boot\n"}},
		caught: []string{"a loss has a reason that is not so"}},
	{name: "a timer that was armed before a suspend is relied upon",
		edits:  []edit{{"alarm.go", "	due := int64(at) - t.ahead.Load()\n", "	due := int64(at)\n"}, {"alarm.go", "max(int64(at)-t.ahead.Load(), 1)", "max(int64(at), 1)"}},
		caught: []string{"a renewal did not follow when it was due", "a lease's context is not done one margin before its key can expire"}},
	{name: "a lease is accounted for twice",
		edits:  []edit{{"lease.go", "	if l.state == stateReleased && !l.resulted {", "	if !l.resulted {"}},
		caught: []string{"the events of an acquisition or a lease are not what happened"}},
	{name: "Renew believes any confirmation",
		edits:  []edit{{"lease.go", "	case verdict == yes:\n		return nil\n	case verdict == failed && c.err != errWithdrawn:", "	case verdict != no:\n		return nil\n	case verdict == failed && c.err != errWithdrawn:"}},
		caught: []string{"Renew returned nil without a confirmation sent after the call"}},
	{name: "a renewal changes the fence",
		edits:  []edit{{"lease.go", "		l.lastErr = nil\n		return", "		l.lastErr = nil\n		l.fence++\n		return"}},
		caught: []string{"a lease has another fence than was drawn for it"}},
	{name: "a grant is kept without its fence",
		edits:  []edit{{"acquire.go", "a.config.fencing && a.fence < 1:", "false:"}},
		caught: []string{"a lease has another fence than was drawn for it"}},
	{name: "what the Locker has seen counts for nothing",
		edits:  []edit{{"scripts.go", "c.locker.fences.Load()+1", "int64(1)"}},
		caught: []string{"a fence is not greater than one before", "a stale write was accepted after a newer one", "a holder's write was refused as stale"}},
	{name: "any error reply says that nothing was done",
		edits:  []edit{{"scripts.go", "		if code == c || code == \"ERR\" && (", "		if code == c || code == \"ERR\" || ("}},
		caught: []string{"an acquisition that took nothing left the key with a token of its own", "ErrNotAcquired though nobody else held the key", "Release returned what is not so", "an acquisition told another thing than its last answer"}},
	{name: "fences are counted from the one that is kept", lua: true,
		edits:  []edit{{"scripts.go", "math.max(n + 1, tonumber(ARGV[#ARGV - 3]), time)", "n + 1"}},
		caught: []string{"a fence is not greater than one before", "a stale write was accepted after a newer one", "a holder's write was refused as stale"}},
	{name: "a fence is the time", lua: true,
		edits:  []edit{{"scripts.go", "math.max(n + 1, tonumber(ARGV[#ARGV - 3]), time)", "time"}},
		caught: []string{"a fence is not greater than one before", "a stale write was accepted after a newer one", "a holder's write was refused as stale"}},
	{name: "the key is taken before its fence is drawn", lua: true,
		edits: []edit{{"scripts.go", "`local n, err = last()\n", "`redis.call('SET', KEYS[1], ARGV[#ARGV - 4], 'PX', ARGV[#ARGV])\nlocal n, err = last()\n"},
			{"scripts.go", "'PX', ARGV[#ARGV - 1])\nredis.call('SET', KEYS[1], ARGV[#ARGV - 4], 'PX', ARGV[#ARGV])\n", "'PX', ARGV[#ARGV - 1])\n"}},
		caught: []string{"an acquisition that took nothing left the key with a token of its own", "the settling script was not asked about a token that holds the key"}},
	{name: "a found grant gets a fence that was not drawn for it", lua: true,
		edits:  []edit{{"scripts.go", "n >= 1 and n or -1}", "n >= 1 and n + 1 or -1}"}},
		caught: []string{"a lease has another fence than was drawn for it"}},
	{name: "whoever comes stands before those who wait",
		edits: []edit{{"wait.go", "	} else {\n		l.tail.behind = p\n	}\n	l.tail = p\n",
			"		l.tail = p\n		return\n	}\n	p.ahead = l.head\n	if p.behind = l.head.behind; p.behind == nil {\n		l.tail = p\n	} else {\n		p.behind.ahead = p\n	}\n	l.head.behind = p\n"}},
		caught: []string{"a waiter was served before one that had come earlier"}},
	{name: "a release that is heard of is not followed by a try",
		edits:  []edit{{"listen.go", "	l.heard = true\n	if l.head == nil {\n", "	if l.heard = true; l.head == nil || !confirmed {\n"}},
		caught: []string{"a signal was not followed by a try"}},
	{name: "who subscribes does not try once more",
		edits:  []edit{{"listen.go", "	l.heard = true\n	if l.head == nil {\n", "	if l.heard = true; l.head == nil || confirmed {\n"}},
		caught: []string{"a signal was not followed by a try"}},
	{name: "a head leaves without waking the next",
		edits:  []edit{{"wait.go", "		l.inherit(a, granted)\n		l.head.ring()\n", "		l.inherit(a, granted)\n"}},
		caught: []string{"a signal was not followed by a try", "a waiter left a free key alone", "a call took longer than its bound"}},
	{name: "after a try in vain the next signal is not heard",
		edits:  []edit{{"wait.go", "	p.ready, p.refused, p.refusedAt = next, c, now\n", "	p.sent, p.refused, p.refusedAt = next, c, now\n"}},
		caught: []string{"a signal was not followed by a try", "an acquisition without a bound gave up before it had failed more than once"}},
	{name: "who has tried for a head reads no more",
		edits:  []edit{{"listen.go", "		if !r.back() && !r.standBy() {\n", "		if r.back(); true {\n"}},
		caught: []string{"a signal was not followed by a try"}},
	{name: "a head does not know what was sent for it",
		edits:  []edit{{"wait.go", "	if a.ready = d.ready; d.ready == nil {\n		a.takes(d.sent)\n	}\n", "	a.ready = d.ready\n"}},
		caught: []string{"an acquisition that took nothing left the key with a token of its own", "ErrNotAcquired though nobody else held the key", "the settling script was not asked about a token that holds the key"}},
	{name: "polls do not grow rarer",
		edits:  []edit{{"acquire.go", "min(pollFirst<<min(a.attempt-1, 16), pollMost)", "pollFirst"}},
		caught: []string{"a waiter sent more commands than its budget"}},
	{name: "only the first of those who are due together is woken",
		edits:  []edit{{"alarm.go", "range targets {", "range targets[:min(1, len(targets))] {"}},
		caught: []string{"a renewal did not follow when it was due"}},
	{name: "only the last of the renewals that are due together is sent",
		edits:  []edit{{"alarm.go", "due = append(due, c)", "due = []*command{c}"}},
		caught: []string{"a renewal did not follow when it was due"}},
	{name: "what is moved together is moved to a later moment",
		edits:  []edit{{"alarm.go", "return t - over\n", "return t - over + g.tick\n"}},
		caught: []string{"a renewal did not follow when it was due"}},
	{name: "whoever is no longer to be woken takes another's place",
		edits:  []edit{{"alarm.go", "g.targets[t.place], moved.place = moved, t.place\n", "moved.place = t.place\n"}},
		caught: []string{"a renewal did not follow when it was due", "a lease's context is not done one margin before its key can expire"}},
	{name: "nobody looks at the clock after a suspend",
		edits:  []edit{{"alarm.go", "		a.goOff()\n", ""}},
		caught: []string{"a lease's context is not done one margin before its key can expire"}},
	{name: "the answers of a pipeline are mixed up",
		edits:  []edit{{"scripts.go", "c.conclude(c.answer(asked[i], ofProcess))", "c.conclude(c.answer(asked[len(list)-1-i], ofProcess))"}},
		caught: []string{"a loss has a reason that is not so", "Redis said No to a renewal, and the lease goes on", "a renewal did not follow when it was due"}},
	{name: "a blind DEL", lua: true,
		edits:  []edit{{"scripts.go", "releaseLua = oursLua\n", "releaseLua = ``\n"}},
		caught: []string{"a release deleted another's key"}},
	{name: "a blind PEXPIRE", lua: true,
		edits:  []edit{{"scripts.go", "renewLua = oursLua + `return", "renewLua = `return"}},
		caught: []string{"a renewal created, changed or shortened a key"}},
	{name: "a renewal brings the key back", lua: true,
		edits:  []edit{{"scripts.go", "`return redis.call('PEXPIRE',KEYS[1],ARGV[2])`", "`redis.call('SET',KEYS[1],ARGV[1],'PX',ARGV[2])\nreturn redis.call('PEXPIRE',KEYS[1],ARGV[2])`"}},
		caught: []string{"a renewal created, changed or shortened a key"}},
	{name: "settling takes a key that another holds", lua: true,
		edits:  []edit{{"scripts.go", "settleLua = refuseLua + `if held then", "settleLua = refuseLua + `if held == ARGV[1] then"}},
		caught: []string{"a command took a key that another held"}},
}

// TestMutants shows that the simulation can fail: each mutant is built from the library's source with -overlay, and the
// simulation has to find it within a bounded number of seeds, by an invariant that names what is wrong.
func TestMutants(t *testing.T) {
	if !*simBuilds {
		t.Skip("builds the library anew for each mutant: go test -run TestMutants -sim.builds .")
	}
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) { t.Log(m.hunt(t)) })
	}
}

var violation = regexp.MustCompile(`seed (\d+): (.*?) \(at`)

// sources returns the files that the mutant changes.
func (m *mutant) sources(t *testing.T) map[string]string {
	sources := map[string]string{}
	for _, e := range m.edits {
		source, ok := sources[e.file]
		if !ok {
			b, err := os.ReadFile(e.file)
			require.NoError(t, err)
			source = string(b)
		}
		require.Equal(t, 1, strings.Count(source, e.old), "%s: %s has changed: %q", m.name, e.file, e.old)
		sources[e.file] = strings.Replace(source, e.old, e.new, 1)
	}
	return sources
}

func TestMutantsFitTheSource(t *testing.T) {
	for _, m := range mutants {
		m.sources(t)
	}
}

// hunt runs the simulation on the mutant and returns how it was found.
func (m *mutant) hunt(t *testing.T) string {
	dir := t.TempDir()
	overlay := map[string]map[string]string{"Replace": {}}
	sources := m.sources(t)
	for file, source := range sources {
		path, err := filepath.Abs(file)
		require.NoError(t, err)
		mutated := filepath.Join(dir, file)
		require.NoError(t, os.WriteFile(mutated, []byte(source), 0o600))
		overlay["Replace"][path] = mutated
	}
	b, err := json.Marshal(overlay)
	require.NoError(t, err)
	file := filepath.Join(dir, "overlay.json")
	require.NoError(t, os.WriteFile(file, b, 0o600))
	out, err := exec.Command("go", "test", "-vet=off", "-overlay="+file, "-run=TestSimulation$", "-v",
		fmt.Sprintf("-sim.seeds=%d", mutantSeeds), fmt.Sprintf("-sim.lua=%v", m.lua), ".").CombinedOutput()
	require.Error(t, err, "it survived")
	found := violation.FindAllSubmatch(out, -1)
	require.NotEmpty(t, found, "%s", bytes.TrimSpace(out[max(0, len(out)-4000):]))
	var by []string
	for _, f := range found {
		by = append(by, string(f[2]))
		if slices.Contains(m.caught, string(f[2])) {
			return fmt.Sprintf("found with seed %s: %s", f[1], f[2])
		}
	}
	require.Failf(t, "found by other invariants than expected", "%q", by)
	return ""
}

func TestSimulationIsTheSameWithAndWithoutTheRaceDetector(t *testing.T) {
	if !*simBuilds {
		t.Skip("builds the library twice: go test -run TheRaceDetector -sim.builds .")
	}
	history := regexp.MustCompile(`history [0-9a-f]+`)
	for _, seed := range sameWorlds[:3] {
		var histories []string
		for _, race := range []string{"-race=false", "-race=true"} {
			out, err := exec.Command("go", "test", race, "-run=TestSimulation$", "-v", fmt.Sprintf("-sim.seed=%d", seed), ".").CombinedOutput()
			require.NoError(t, err, "%s", out[max(0, len(out)-4000):])
			histories = append(histories, string(history.Find(out)))
		}
		require.NotEmpty(t, histories[0])
		require.Equal(t, histories[0], histories[1], "seed %d", seed)
	}
}
