package redislease

import (
	"fmt"
	"strings"
)

// What a fence proves, and what it does not.
//
// A lease ends in time for whoever asks, but a write may have been sent before, and a failover may have lost the key.
// So each lease can carry a number that only grows, and the place where a write lands refuses a number smaller than the
// greatest it has seen: a former holder's write that comes after the next holder's first is refused, whatever delayed it.
// One that comes before is not, nor need it be: nobody has built on what it changes. The check and the write have to be
// one statement or one transaction; anything else leaves a gap between the two.
//
//	                  fence 41               paused
//	one replica    ───┤ acquires ├──────────────────────────────────────┤ writes with 41: refused
//	another                              ┤ acquires ├── writes with 42
//	                                       fence 42     accepted
//
// The number is drawn where the key is taken, in one script (fenceLua), so that numbers grow in the order of the grants.
// Each step of that script that fails leaves no lock: the key is taken by the last one. The number is written before: if
// the key cannot be taken then, one number is skipped.
//
// The reply may be lost. Whoever finds his token in the key later finds the number beside it, since nobody draws another
// while the key is held. If it is gone all the same (evicted, deleted by hand) the grant is given back, because its
// number is not known, and a made-up one would not be older than whatever it meets.

// noFence is what a lease without a fence has. It is below every fence, so that a check fails closed.
const noFence = -1

// fenceKey is where the latest fence of a key is kept. It begins with the key, so that a user who may touch app:* may
// touch it, and is in the same slot of a cluster.
func fenceKey(key string) string {
	if strings.Contains(key, "{") {
		return key + ":fence"
	}
	return key + ":fence{" + key + "}"
}

// fenceable returns an error for a key that has no such companion: one with braces that are no hash tag.
func fenceable(key string) error {
	before, after, opened := strings.Cut(key, "{")
	tag, _, closed := strings.Cut(after, "}")
	if closed && tag != "" || !opened && !strings.Contains(before, "}") {
		return nil
	}
	return fmt.Errorf("a lease of %q can have no fence: its braces are no hash tag, so that no key for the fence is in its slot", key)
}

// remember takes note of a fence, below which none of this Locker's is to fall. What no clock says before the year 2112
// was put there by hand, and concerns its own key alone.
func (k *Locker) remember(fence int64) {
	for seen := k.fences.Load(); fence > seen && fence < 1<<52; seen = k.fences.Load() {
		if k.fences.CompareAndSwap(seen, fence) {
			return
		}
	}
}
