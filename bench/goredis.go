package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"strconv"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// connect opens the client that all adapters on go-redis use, with its defaults.
func connect(s settings) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: s.addr})
}

// errLost is what hand-written adapters return for a lease that is not theirs any more.
var errLost = errors.New("the lease is lost")

// wasOne turns the answer of a script that returns 1 for success into an error.
func wasOne(cmd *redis.Cmd) error {
	n, err := cmd.Int64()
	if err == nil && n != 1 {
		return errLost
	}
	return err
}

// load has Redis keep scripts, and returns what to call them by.
func load(rdb *redis.Client, scripts ...string) (hashes []string, err error) {
	for _, script := range scripts {
		hash, err := rdb.ScriptLoad(context.Background(), script).Result()
		if err != nil {
			return nil, err
		}
		hashes = append(hashes, hash)
	}
	return hashes, nil
}

// tokens makes tokens as cheaply as can be: a process draws random bits once, and counts.
type tokens struct {
	process string
	n       atomic.Uint64
}

// processLength is that of tokens.process.
const processLength = 16

func newTokens() *tokens {
	var b [processLength / 2]byte
	_, _ = rand.Read(b[:]) // never fails
	return &tokens{process: hex.EncodeToString(b[:])}
}

func (t *tokens) next() string {
	var b [40]byte
	return string(strconv.AppendUint(append(append(b[:0], t.process...), ':'), t.n.Add(1), 36))
}
