package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/redislease/redislease"
)

// A report is written under a lease. It remembers the greatest fence that has written it.
type report struct {
	sync.Mutex // check and write are one step; in a database they are one statement or one transaction
	fence      int64
	text       string
}

var errStale = errors.New("a later holder was here")

func (r *report) write(fence int64, text string) error {
	r.Lock()
	defer r.Unlock()
	if fence < 1 {
		return errors.New("the lease was taken without WithFencing")
	}
	if fence < r.fence {
		return errStale
	}
	r.fence, r.text = fence, text
	return nil
}

// Two holders, one after the other. The first has not heard yet that its lease is over, and nothing on its side could
// stop what it has sent already; the place where the write lands can.
func ExampleWithFencing() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client, redislease.WithFencing())
	if err != nil {
		log.Fatal(err)
	}
	var report report

	ctx := context.Background()
	first, err := locker.TryAcquire(ctx, "report")
	if err != nil {
		log.Fatal(err)
	}
	defer first.Release()
	fmt.Println("the first:", report.write(first.Fence(), "half of it"))

	server.Del("report") // an operator's mistake, or a failover to a replica that has not seen the key
	second, err := locker.TryAcquire(ctx, "report")
	if err != nil {
		log.Fatal(err)
	}
	defer second.Release()
	fmt.Println("the second:", report.write(second.Fence(), "all of it"))

	fmt.Println("the first believes in its lease:", first.Err() == nil)
	fmt.Println("the first, late:", report.write(first.Fence(), "the other half"))
	fmt.Println("the second has the greater fence:", second.Fence() > first.Fence())
	fmt.Println("the report:", report.text)
	// Output:
	// the first: <nil>
	// the second: <nil>
	// the first believes in its lease: true
	// the first, late: a later holder was here
	// the second has the greater fence: true
	// the report: all of it
}

// setGuarded sets a value unless a greater fence has set it before. Both keys are set by one script, so they have to be
// in one slot of a cluster, which the hash tag sees to; and a failover that loses one loses both.
//
// The fence is compared as a number, exact below 2^53, and stored as the text that came: Lua's tostring rounds it. It is
// stored first, so that if the second SET is refused (out of memory) nothing older is let through.
var setGuarded = redis.NewScript(`
-- KEYS: the value, the greatest fence that has set it. ARGV: the fence, the new value.
-- Returns 1, or 0 if a greater fence was here; then nothing has changed.
local fence = tonumber(ARGV[1])
if not fence or fence < 1 then
	return redis.error_reply("ERR the lease was taken without WithFencing")
end
local seen = redis.call("GET", KEYS[2])
if seen and fence < tonumber(seen) then
	return 0
end
redis.call("SET", KEYS[2], ARGV[1])
redis.call("SET", KEYS[1], ARGV[2])
return 1
`)

// What is written is in Redis, too: one script compares the fence and sets the value.
func ExampleLease_Fence() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client, redislease.WithPrefix("lock:"), redislease.WithFencing())
	if err != nil {
		log.Fatal(err)
	}

	ctx := context.Background()
	setRate := func(lease *redislease.Lease, rate string) error {
		keys := []string{"{rate:eur}", "{rate:eur}:fence"}
		switch set, err := setGuarded.Run(ctx, client, keys, lease.Fence(), rate).Bool(); {
		case err != nil:
			return err // perhaps set: the same fence may set it again
		case !set:
			return errStale
		}
		return nil
	}

	first, err := locker.TryAcquire(ctx, "rate:eur")
	if err != nil {
		log.Fatal(err)
	}
	defer first.Release()
	fmt.Println("the first:", setRate(first, "1.08"))

	server.Del("lock:rate:eur")
	second, err := locker.TryAcquire(ctx, "rate:eur")
	if err != nil {
		log.Fatal(err)
	}
	defer second.Release()
	fmt.Println("the second:", setRate(second, "1.09"))
	fmt.Println("the first, late:", setRate(first, "1.07"))
	fmt.Println("the second, again:", setRate(second, "1.10"))

	rate, err := client.Get(ctx, "{rate:eur}").Result()
	fmt.Println(rate, err)
	fence, err := client.Get(ctx, "{rate:eur}:fence").Int64()
	fmt.Println("its fence is that of the second:", fence == second.Fence(), err)
	// Output:
	// the first: <nil>
	// the second: <nil>
	// the first, late: a later holder was here
	// the second, again: <nil>
	// 1.10 <nil>
	// its fence is that of the second: true <nil>
}
