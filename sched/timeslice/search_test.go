// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// sliceWindow is how long a window is that the search is asked after.
const sliceWindow = 2 * time.Second

// windows feeds the search with what clients get at a length, until it has settled.
func windows(t *testing.T, s *Search, rates func(longest time.Duration) Speeds) (tried []time.Duration) {
	for range 40 {
		s.Window(sliceWindow, rates(s.Longest()))
		if s.Settled() {
			return tried
		}
		tried = append(tried, s.Longest())
	}
	t.Fatalf("the search does not end: %v", tried)
	return nil
}

func TestSearch(t *testing.T) {
	busy := func(d time.Duration) Speeds {
		if d == 0 {
			return Speeds{{1, 92}, {2, 920}}
		}
		return Speeds{{1, 100}, {2, 1000}}
	}
	s := NewSearch(false)
	windows(t, &s, busy)
	if s.Longest() != MaxSlice {
		t.Errorf("two that keep the GPU busy have %v", s.Longest())
	}
	// One waits for a slice of the other before each burst.
	bursts := func(d time.Duration) Speeds {
		return Speeds{{1, 100}, {3, 1 / (0.001 + max(d, DriverSlice).Seconds())}}
	}
	tried := windows(t, &s, bursts)
	if s.Longest() != 0 || len(tried) > 3 {
		t.Errorf("with one that works in bursts the length is %v, after %v", s.Longest(), tried)
	}
	retries := 0
	for range 10 * time.Minute / sliceWindow {
		before := s.Longest()
		s.Window(sliceWindow, bursts(s.Longest()))
		if before == 0 && s.Longest() > 0 {
			retries++
		}
	}
	if retries == 0 || retries > 6 {
		t.Errorf("longer slices were tried again %d times in 10 minutes", retries)
	}
	// It has ended; nobody waits any more. The search finds that by itself.
	for n := (maxRetry + time.Minute) / sliceWindow; n > 0 && s.Longest() < MaxSlice; n-- {
		s.Window(sliceWindow, busy(s.Longest()))
	}
	if s.Longest() != MaxSlice {
		t.Errorf("after the one with bursts has ended the length is %v", s.Longest())
	}
	// A program that does something else now is found out soon.
	for range 15 {
		s.Window(sliceWindow, busy(s.Longest()))
	}
	other := func(d time.Duration) Speeds {
		return Speeds{{1, 100}, {2, 5 / (0.001 + max(d, DriverSlice).Seconds())}}
	}
	for range 20 {
		s.Window(sliceWindow, other(s.Longest()))
	}
	if s.Longest() > 2*DriverSlice {
		t.Errorf("after one has begun to work in bursts the length is %v", s.Longest())
	}
}

// Programs that never fill a slice have the driver's own, although measurements of their
// speed scatter: longer ones bring them nothing.
func TestSearchAmongNoise(t *testing.T) {
	const seeds, clients = 200, 3
	long, windows := 0, 0
	for seed := range uint64(seeds) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := NewSearch(false)
		for range 10 * time.Minute / sliceWindow {
			rates := Speeds{}
			for id := range base.ClientID(clients) {
				rates = append(rates, Speed{id, 1000 * (1 + 0.05*r.NormFloat64())})
			}
			windows++
			if s.Longest() > 0 {
				long++
			}
			s.Window(sliceWindow, rates)
		}
	}
	if part := float64(long) / float64(windows); part > 0.1 {
		t.Errorf("longer slices for %.0f %% of the time", 100*part)
	} else {
		t.Logf("longer slices for %.1f %% of the time", 100*part)
	}
}

// What programs do while they start is nothing to compare with.
func TestSearchDuringTheStart(t *testing.T) {
	for _, starts := range []int{1, 2, 3} { // windows
		s, long := NewSearch(true), 0
		for window := range 60 {
			d := s.Longest()
			burst := 1 / (0.001 + max(d, DriverSlice).Seconds())
			if window < starts {
				burst /= 20
			}
			if s.Window(sliceWindow, Speeds{{1, 100 * (1 + gainOf(max(d, DriverSlice)))}, {2, burst}}); window > starts+4 && s.Longest() > 2*DriverSlice {
				long++
			}
		}
		if long > 6 {
			t.Errorf("of a start of %d windows: long slices harm a program for %d of 55 windows", starts, long)
		}
	}
}
