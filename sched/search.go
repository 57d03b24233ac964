// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"maps"
	"slices"
	"time"
)

// How long the longest time slice is. The driver's own costs tenants that keep the GPU
// busy 8 %, one of 50 ms 0.1 % (two matrix products on an H200: 2 ms 92.4 %, 10 ms 98.0 %,
// 50 ms 99.9 %, 1 s 99.8 %). But a program that works in short bursts waits for a slice of
// the others before each: beside a matrix product with slices of 2 ms a language model got
// 43 % of what it gets alone, and with 20 ms 16 %. No number says which kind a program is;
// a program that waits for its GPU after each kernel looks busy all the time. So longer
// slices are tried, and kept if nobody gets less than with the driver's own.
const (
	// DriverSlice is the driver's own time slice (580 on an H200: 2048 µs).
	DriverSlice = 2048 * time.Microsecond
	// MaxSlice is the longest that is given: a longer one gains nothing.
	MaxSlice = 50 * time.Millisecond

	// A client that has less than this part of what it has with the driver's slices is
	// harmed, and so are all together below the second: what a window measures is not
	// more exact.
	harmed     = 0.90
	harmedMean = 0.97
	// changed is by which factor a client's speed has changed if it does something else now.
	changed = 1.5

	// After harm longer slices are tried again, after a time that doubles.
	minRetry, maxRetry = 30 * time.Second, 8 * time.Minute
	// Programs change. Once in a while all have the driver's slices for a window, to be
	// compared with: 2 s of 120 s at 8 % are 0.13 %. If one seems to do something else,
	// that may come earlier.
	rebaseEvery, rebaseSoon = 120 * time.Second, 20 * time.Second
)

// search is the search for the length of the longest time slice. It is asked once a
// window.
type search struct {
	longest time.Duration // 0: all have the driver's own, or nearly
	basing  bool          // this window measures what the others are compared with
	growing bool
	trial   time.Duration // the length after basing
	base    map[ClientID]float64
	last    map[ClientID]float64 // of the window before
	basedAt Time
	nextTry Time          // of a length that did harm; 0: none did
	retry   time.Duration // how long it takes to the next
}

func newSearch() search { return search{basing: true, trial: longer(0)} }

func longer(d time.Duration) time.Duration { return min(2*max(d, DriverSlice), MaxSlice) }

func shorter(d time.Duration) time.Duration {
	if d <= 2*DriverSlice {
		return 0
	}
	return d / 2
}

// settled says that the search has found a length, for now.
func (s *search) settled() bool { return !s.basing && !s.growing }

// window takes note of how fast active clients were, calls per second, and chooses the
// length for the next window.
func (s *search) window(now Time, rates map[ClientID]float64) {
	defer func() { s.last = maps.Clone(rates) }()
	if len(rates) < 2 {
		return // slices mean nothing
	}
	for id := range rates {
		if _, known := s.base[id]; !known && !s.basing {
			*s = newSearch() // somebody new: from the beginning
			return
		}
	}
	switch {
	case s.basing:
		s.base, s.basedAt = maps.Clone(rates), now
		s.basing, s.growing, s.longest = false, s.trial > 0, s.trial
	case s.longest > 0 && s.harms(rates):
		s.longest = shorter(s.longest)
		s.growing = false
		s.retry = min(max(2*s.retry, minRetry), maxRetry)
		s.nextTry = now.Add(s.retry)
	case s.growing && s.longest < MaxSlice:
		s.longest = longer(s.longest)
	case s.growing:
		s.growing, s.nextTry, s.retry = false, 0, 0
	case s.nextTry != 0 && now >= s.nextTry:
		s.rebase(longer(s.longest))
	case s.longest > 0 && (now.Sub(s.basedAt) > rebaseEvery || now.Sub(s.basedAt) > rebaseSoon && s.differs(rates)):
		s.rebase(s.longest)
	}
}

func (s *search) rebase(trial time.Duration) {
	s.basing, s.trial, s.longest = true, trial, 0
}

func (s *search) harms(rates map[ClientID]float64) bool {
	sum := 0.0
	for _, id := range slices.Sorted(maps.Keys(rates)) { // sums of floats depend on the order
		part := rates[id] / s.base[id]
		if part < harmed {
			return true
		}
		sum += min(part, 2)
	}
	return sum/float64(len(rates)) < harmedMean
}

func (s *search) differs(rates map[ClientID]float64) bool {
	for id, r := range rates {
		if was := s.last[id]; was != 0 && (r > changed*was || was > changed*r) {
			return true
		}
	}
	return false
}
