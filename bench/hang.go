package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// Scenario hang: Redis hangs under leases that are held. Who is told before another could have the key?
const hang = "d"

type hangPlan struct {
	leases int
	ttl    time.Duration
	parts  []float64 // for how many TTLs Redis hangs
	rounds int
}

const (
	columnHeld    = "leases"
	columnTold    = "told in time"
	columnTooLong = "believed too long max ms"
	columnEarly   = "told early max ms"
)

func (h *harness) hang(p hangPlan) *table {
	t := &table{scenario: hang, columns: []string{columnHeld, columnTold, columnTooLong, columnEarly, columnLost}}
	for _, part := range p.parts {
		cell := fmt.Sprintf("Redis hangs for %v TTLs of %v under %d leases", part, p.ttl, p.leases)
		d := time.Duration(part * float64(p.ttl))
		h.inTurn(t, cell, p.rounds, func(a adapter) (map[string]float64, error) { return h.hangOf(a, p.leases, p.ttl, d) })
	}
	return t
}

// hangOf has a fresh process hold n leases while Redis hangs.
func (h *harness) hangOf(a adapter, n int, ttl, d time.Duration) (map[string]float64, error) {
	p, _, err := h.holder(a, n, ttl)
	if err != nil {
		return nil, err
	}
	defer p.end()
	time.Sleep(ttl + ttl/2) // with some renewals
	if err := p.tell(request{Do: doTold, For: d + ttl}); err != nil {
		return nil, err
	}
	until, err := h.server.hang(n, d)
	if err != nil {
		return nil, err
	}
	heard, err := p.hear()
	if err != nil {
		return nil, err
	}
	return judged(heard, until, d >= ttl), nil
}

// judged compares when holders were told of the end of their leases with when the keys could expire. Who was not told until
// the watch ended is told then, for all that one knows.
func judged(heard reply, until []time.Time, expire bool) map[string]float64 {
	told := heard.Told
	var inTime, lost, tooLong, early float64
	for i, at := range told {
		if !at.IsZero() {
			lost++
		}
		if !expire {
			continue
		}
		if at.IsZero() {
			at = heard.At
		}
		switch by := at.Sub(until[i]); {
		case by <= 0:
			inTime++
			early = max(early, millis(-by))
		default:
			tooLong = max(tooLong, millis(by))
		}
	}
	if !expire {
		return map[string]float64{columnHeld: float64(len(told)), columnLost: lost}
	}
	return map[string]float64{columnHeld: float64(len(told)), columnTold: inTime / float64(len(told)), columnTooLong: tooLong, columnEarly: early}
}

// hangScript notes how long each key would live, and keeps Redis busy from then on: nothing comes between.
const hangScript = `local left = {}
local function now() local t = redis.call('TIME') return tonumber(t[1]) + tonumber(t[2]) / 1000000 end
local begun = now()
for i, key in ipairs(KEYS) do left[i] = redis.call('PTTL', key) end
while now() - begun < tonumber(ARGV[1]) do end
return left`

// hang has the server hang for d, and returns when the keys of n leases could expire, if they were not renewed before.
func (s *server) hang(n int, d time.Duration) ([]time.Time, error) {
	patient := redis.NewClient(&redis.Options{Addr: s.addr, ReadTimeout: -1, MaxRetries: -1})
	defer func() { _ = patient.Close() }()
	ctx := context.Background()
	if err := patient.ConfigSet(ctx, "lua-time-limit", "600000").Err(); err != nil { // or Redis would answer that it is busy
		return nil, err
	}
	keys, err := patient.Keys(ctx, "*"+livePrefix+"*").Result() // some libraries put something before
	if err != nil {
		return nil, err
	}
	if len(keys) != n {
		return nil, fmt.Errorf("%d of %d leases were held when Redis was to hang", len(keys), n)
	}
	begun := time.Now()
	left, err := patient.Eval(ctx, hangScript, keys, strconv.FormatFloat(d.Seconds(), 'f', 3, 64)).Int64Slice()
	if err != nil {
		return nil, err
	}
	until := make([]time.Time, n)
	for i, ms := range left {
		lease, ok := liveIndex(keys[i])
		if !ok || ms < 0 {
			return nil, fmt.Errorf("%s was not held when Redis was to hang", keys[i])
		}
		until[lease] = begun.Add(time.Duration(ms) * time.Millisecond)
	}
	return until, nil
}
