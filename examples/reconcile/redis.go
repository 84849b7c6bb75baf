package main

import (
	"os"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// redisURL returns $REDIS_URL, or starts an embedded Redis on the loopback interface and returns its address.
func redisURL() (url string, stop func(), err error) {
	if url := os.Getenv("REDIS_URL"); url != "" {
		return url, func() {}, nil
	}
	server, err := miniredis.Run()
	if err != nil {
		return "", nil, err
	}
	server.ClockTTL(true) // keys expire by themselves, as in Redis
	return "redis://" + server.Addr(), server.Close, nil
}

// connect returns a client for leases of this TTL. A connection that went silent is given up while there is still time
// to try another.
func connect(url string, ttl time.Duration) (*redis.Client, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	options.ReadTimeout = ttl / 5
	return redis.NewClient(options), nil
}
