package redislease

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// sleeper returns a target of k's that waits on its signal.
func sleeper(k *Locker) *target {
	return &target{locker: k, config: k.config, base: k.clock.now(&k.anchor), signal: make(chan struct{}, 1)}
}

func lockerOfNothing(t testing.TB) *Locker {
	k := &Locker{config: resolved(t, func(*config) {}), clock: systemClock}
	k.alarms.locker = k
	return k
}

// alarmsOf returns how many alarms are set, and for how many targets.
func alarmsOf(k *Locker) (alarms, targets int) {
	for i := range k.alarms.shards {
		s := &k.alarms.shards[i]
		s.mu.Lock()
		for _, g := range s.at {
			alarms, targets = alarms+1, targets+len(g.targets)
		}
		s.mu.Unlock()
	}
	return alarms, targets
}

func TestThoseWhoAreWokenAtTheSameMomentShareATimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := lockerOfNothing(t)
		var timers int
		k.clock.afterFunc = func(d time.Duration, f func()) *time.Timer { timers++; return time.AfterFunc(d, f) }
		var all []*target
		for range 100 {
			s := sleeper(k)
			s.wakeAt(s.about(s.now(), time.Second)) // within 99 ms, which is a tick of the default interval
			all = append(all, s)
			time.Sleep(990 * time.Microsecond)
		}
		alarms, targets := alarmsOf(k)
		require.Equal(t, 100, targets)
		require.Equal(t, 1, alarms)
		require.Equal(t, 2, timers, "and one that looks at the clock")
		for i, s := range all {
			if i%2 == 0 {
				s.wakeNoMore()
			}
		}
		time.Sleep(901 * time.Millisecond)
		synctest.Wait()
		for i, s := range all {
			require.Len(t, s.signal, i%2)
		}
		alarms, _ = alarmsOf(k)
		require.Zero(t, alarms)
		time.Sleep(time.Minute)
		require.LessOrEqual(t, timers, 3, "it looks once more at the most")
	})
}

func TestNobodyIsWokenLateWhateverTheOthersDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := lockerOfNothing(t)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				s := sleeper(k)
				for range 200 {
					began := s.now()
					at := began + rand.N(20*time.Second)
					if rand.N(2) == 0 {
						at = s.about(began, at)
					}
					s.wakeAt(at)
					switch rand.N(4) {
					case 0:
						time.Sleep(rand.N(at - began + 1))
						s.wakeNoMore()
						select {
						case <-s.signal:
						default:
						}
						continue
					case 1:
						time.Sleep(rand.N(at - began + 1))
						at = s.now() + rand.N(20*time.Second)
						s.wakeOnlyAt(at)
					}
					for {
						<-s.signal
						if s.now() >= at {
							break
						}
						s.wakeAt(at) // a signal from before
					}
					if s.now() != at {
						t.Errorf("woken %v late", s.now()-at)
					}
				}
				s.wakeNoMore()
			})
		}
		wg.Wait()
		_, targets := alarmsOf(k)
		require.Zero(t, targets)
		time.Sleep(clockLook)
		synctest.Wait()
		alarms, _ := alarmsOf(k)
		require.Zero(t, alarms)
	})
}

func TestWhoStoodStillWhenItSetAnAlarmMakesNobodyLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := lockerOfNothing(t)
		first, second := sleeper(k), sleeper(k)
		at := second.now() + 10*time.Second
		time.Sleep(4 * time.Second) // what was read has become old
		first.wakeAt(at)
		second.wakeAt(at)
		<-second.signal
		require.Equal(t, at, second.now())
	})
}

func TestNoSuspendFallsBetweenTwoLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := lockerOfNothing(t)
		var mu sync.Mutex
		var asleep time.Duration // so far
		var reads int
		var suspendAfter int
		start := time.Now()
		at := map[time.Time]time.Duration{} // a base's share of it
		k.clock.since = func(base *instant) (monotonic, wall time.Duration, now time.Time) {
			mu.Lock()
			defer mu.Unlock()
			reads++
			d := time.Since(base.time)
			wall = d + asleep - at[base.time]
			now = start.Add(time.Since(start) + time.Duration(reads)) // each is told apart
			at[now] = asleep
			if reads == suspendAfter {
				asleep += time.Hour
			}
			return d, wall, now
		}
		for gap := range 20 {
			s := sleeper(k)
			s.wakeAt(s.now() + 100*time.Second)
			time.Sleep(3500 * time.Millisecond)
			mu.Lock()
			suspendAfter = reads + 1 + gap
			mu.Unlock()
			reading := time.Now()
			<-s.signal
			require.Less(t, time.Since(reading), 30*time.Second, gap)
			s.wakeNoMore()
			time.Sleep(5 * time.Minute)
		}
	})
}

func TestAlarmsAreSetAndUnsetFromAllSides(t *testing.T) {
	k := lockerOfNothing(t)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			s := sleeper(k)
			for range 2000 {
				now := s.now()
				s.wakeAt(now + rand.N(time.Millisecond).Truncate(50*time.Microsecond))
				switch rand.N(3) {
				case 0:
					s.wakeNoMore()
				case 1:
					<-s.signal
				default:
					runtime.Gosched()
				}
			}
			s.wakeNoMore()
		})
	}
	wg.Wait()
	_, targets := alarmsOf(k)
	require.Zero(t, targets)
}

func TestATickIsASmallPartOfTheInterval(t *testing.T) {
	for interval, want := range map[time.Duration]time.Duration{
		0: 1, 1: 1, 63: 1, 64: 1, 319: 1, 320: 5, 640: 10,
		time.Millisecond:        10 * time.Microsecond,
		100 * time.Millisecond:  time.Millisecond,
		time.Second:             10 * time.Millisecond,
		10 * time.Second:        100 * time.Millisecond,
		time.Minute:             500 * time.Millisecond,
		20 * time.Minute:        10 * time.Second,
		math.MaxInt64:           100_000_000 * time.Second,
		math.MaxInt64 / 4 * 3:   100_000_000 * time.Second,
		math.MaxInt64 / 64 / 10: 100_000 * time.Second,
	} {
		require.Equal(t, want, tick(interval/alarmTicks), interval)
	}
}

func TestTheGridIsTheSameForAllReadings(t *testing.T) {
	for range 10_000 {
		g := grid{tick(rand.N(time.Minute)), rand.N(2*time.Hour) - time.Hour}
		at := rand.N(time.Hour)
		f := g.floor(at)
		require.LessOrEqual(t, f, at)
		require.Less(t, at-f, g.tick)
		require.Zero(t, (f+g.offset)%g.tick)
		other := grid{g.tick, rand.N(time.Hour)}
		require.Equal(t, f+g.offset, other.floor(at+g.offset-other.offset)+other.offset, "by another lease's clock")
	}
	require.Equal(t, forever, grid{time.Second, time.Hour}.floor(forever))
	require.Equal(t, forever-time.Hour, grid{1, 0}.floor(forever-time.Hour))
}
