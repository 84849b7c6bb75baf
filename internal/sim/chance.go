package sim

import "time"

// chance is a sequence of decisions that depends on nothing but what it was made from. Whoever decides makes one of its
// own from the seed and its place in the world, and never draws from one that others draw from: in which order they
// would is up to the scheduler.
type chance uint64

// from makes a chance of the seed and a place.
func from(parts ...uint64) *chance {
	c := chance(0x6a09e667f3bcc908)
	for _, p := range parts {
		c ^= chance(p)
		c = chance(c.next())
	}
	return &c
}

// next is splitmix64.
func (c *chance) next() uint64 {
	*c += 0x9e3779b97f4a7c15
	z := uint64(*c)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// unit is uniform in [0, 1).
func (c *chance) unit() float64 { return float64(c.next()>>11) / (1 << 53) }

// hits is true with probability p.
func (c *chance) hits(p float64) bool { return c.unit() < p }

// below is uniform in [0, n).
func (c *chance) below(n int) int { return int(c.next() % uint64(n)) }

// between is uniform in [low, high), down to the nanosecond, so that no two things happen at the same instant.
func (c *chance) between(low, high time.Duration) time.Duration {
	return low + time.Duration(c.next()%uint64(max(1, high-low)))
}

// name turns a name into a part of a place.
func name(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}
