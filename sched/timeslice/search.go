// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"cmp"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// How long the longest time slice is. The driver's own costs tenants that keep the GPU
// busy 8 %, one of 50 ms 0.1 % (two matrix products on an H200: 2 ms 92.4 %, 10 ms 98.0 %,
// 50 ms 99.9 %, 1 s 99.8 %). But a program that works in short bursts waits for a slice of
// the others before each: beside a matrix product with slices of 2 ms a language model got
// 43 % of what it gets alone, and with 20 ms 16 %. No number says which kind a program is;
// a program that waits for its GPU after each kernel looks busy all the time. So longer
// slices are tried, and kept if clients get more by them and nobody gets much less. Three
// language models get no more by them, and a measurement of 2 s is exact to some 5 %: the
// comparison is made twice.
const (
	// DriverSlice is the driver's own time slice (580 on an H200: 2048 µs).
	DriverSlice = 2048 * time.Microsecond
	// LeastSlice is the shortest that a tenant has because its part is small. Changing from one
	// process to another takes 0.14 ms: shorter slices waste the GPU.
	LeastSlice = time.Millisecond
	// MaxSlice is the longest that is given: a longer one gains nothing.
	MaxSlice = 50 * time.Millisecond

	// A client that has less than this part of what it has with the driver's slices is
	// harmed: what a window measures is not much more exact.
	harmed = 0.90
	// SwitchTime is what the GPU loses each time it goes on to another process (H200, from
	// the row above).
	SwitchTime = 165 * time.Microsecond
	// Clients that never fill a slice gain nothing by longer ones. So those who search
	// want at least half of what saturating clients gain, and who has found a length keeps
	// it for a quarter.
	gainToGrow, gainToKeep = 0.5, 0.25
	// Changed is by which factor a client's speed has changed if it does something else now.
	Changed = 1.5

	// After harm longer slices are tried again, after a time that doubles.
	minRetry, maxRetry = 30 * time.Second, 8 * time.Minute
	// Programs change. Once in a while all have the driver's slices for a window, to be
	// compared with: 2 s of 120 s at 8 % are 0.13 %. If one seems to do something else, that comes
	// earlier: rebaseSoon after the one before, and after twice that time each time after.
	rebaseEvery, rebaseSoon, rebaseLater = 120 * time.Second, 4 * time.Second, 32 * time.Second
	// One that has less than this is harmed so much that no long slice will do.
	ruined = 0.8
)

// Search is the search for the length of the longest time slice. It is asked once a
// window.
type Search struct {
	cohort  bool
	longest time.Duration // 0: all have the driver's own, or nearly
	basing  bool          // this window measures what the others are compared with
	growing bool
	sure    bool          // the longest has been compared twice
	trial   time.Duration // the length after basing
	base    Speeds
	gained  float64       // what clients have of base, of windows with this length
	last    Speeds        // of the window before
	worked  time.Duration // the windows so far in which clients shared the GPU: pauses make no program another one
	basedAt time.Duration // as worked
	changed bool          // a client seems to do something else since
	soon    time.Duration // then they are compared again after so long
	nextTry time.Duration // of a length that did harm, as worked; 0: none did
	retry   time.Duration // how long it takes to the next
}

// Longest is the length of the longest slice; 0: all have the driver's own, or nearly.
func (s *Search) Longest() time.Duration { return s.longest }

// Speeds are calls per second of clients, in the order of their ids. They are not changed.
type Speeds []Speed

// Speed is that of one client.
type Speed struct {
	Client base.ClientID
	Calls  float64
}

// beside calls f with the speed of each client, and with that in others; 0: it has none there.
func (s Speeds) beside(others Speeds, f func(now, was float64)) {
	for _, a := range s {
		for len(others) > 0 && others[0].Client < a.Client {
			others = others[1:]
		}
		if len(others) > 0 && others[0].Client == a.Client {
			f(a.Calls, others[0].Calls)
		} else {
			f(a.Calls, 0)
		}
	}
}

// NewSearch begins with the length after the driver's own, or with the one after that: in a
// cohort the first one gains too little to be seen.
func NewSearch(cohort bool) Search {
	s := Search{basing: true, trial: longer(0), cohort: cohort}
	if cohort {
		s.trial = longer(s.trial)
	}
	return s
}

func longer(d time.Duration) time.Duration { return min(2*max(d, DriverSlice), MaxSlice) }

func shorter(d time.Duration) time.Duration {
	if d <= 2*DriverSlice {
		return 0
	}
	return d / 2
}

// Settled says that the search has found a length, for now.
func (s *Search) Settled() bool { return !s.basing && !s.growing }

// Window takes note of how fast active clients were in a window of a length, calls per second, and chooses
// the slices for the next window.
func (s *Search) Window(length time.Duration, rates Speeds) {
	defer func() { s.last = rates }()
	if len(rates) < 2 {
		return // slices mean nothing
	}
	s.worked += length
	known := true
	rates.beside(s.base, func(_, was float64) { known = known && was > 0 })
	if !known && !s.basing {
		*s = NewSearch(s.cohort) // somebody new: from the beginning
		return
	}
	if s.basing {
		s.noteBase(rates)
		s.basedAt, s.changed = s.worked, false
		s.basing, s.growing, s.longest = false, s.trial > 0 && !s.sure, s.trial
		return
	}
	gained, least, other := s.compare(rates)
	harm := least < harmed
	other = other && !harm // what it was compared with is of another time: of a program's start, say
	s.changed = s.changed || other || differ(rates, s.last)
	if s.changed && !harm && s.longest > 0 && s.worked-s.basedAt >= max(s.soon, rebaseSoon) {
		s.soon = min(2*max(s.soon, rebaseSoon), rebaseLater)
		s.baseAnew(s.longest)
		return
	}
	if other {
		return // nor is it now
	}
	s.gained = 0.75*cmp.Or(s.gained, gained) + 0.25*gained
	toGrow, toKeep := gainToGrow*gainOf(s.longest), gainToKeep*gainOf(s.longest)
	if s.cohort { // its turns end in the middle of slices
		toGrow, toKeep = toGrow/2, toKeep/2
	}
	switch {
	case s.longest > 0 && least < ruined:
		s.back(0)
	case s.longest > 0 && harm:
		s.back(shorter(s.longest))
	case s.growing && gained < 1+toGrow, s.longest > 0 && s.gained < 1+toKeep:
		s.back(0)
	case s.growing && s.longest < MaxSlice:
		s.longest, s.gained = longer(s.longest), 0
	case s.growing:
		s.sure = true
		s.rebase(s.longest)
	case s.longest == MaxSlice && s.nextTry != 0:
		s.nextTry, s.retry = 0, 0
	case s.nextTry != 0 && s.worked >= s.nextTry:
		s.sure = false
		s.baseAnew(longer(s.longest))
	case s.longest > 0 && s.worked-s.basedAt > rebaseEvery:
		s.soon = 0
		s.baseAnew(s.longest)
	}
}

// back gives a length up, and plans when to try longer slices again.
func (s *Search) back(to time.Duration) {
	s.longest, s.gained = to, 0
	s.growing, s.sure = false, true
	s.retry = min(max(2*s.retry, minRetry), maxRetry)
	s.nextTry = s.worked + s.retry
}

// rebase measures what clients have with the driver's slices, and then tries a length.
func (s *Search) rebase(trial time.Duration) {
	s.basing, s.trial, s.longest, s.gained = true, trial, 0, 0
}

// baseAnew is rebase after programs may have changed.
func (s *Search) baseAnew(trial time.Duration) {
	s.base = nil
	s.rebase(trial)
}

// noteBase takes note of what clients have with the driver's slices: of the second time
// the mean with the first, unless one does something else by then.
func (s *Search) noteBase(rates Speeds) {
	base, other := make(Speeds, 0, len(rates)), differ(rates, s.base)
	rates.beside(s.base, func(now, was float64) {
		if was > 0 && !other {
			now = (now + was) / 2
		}
		base = append(base, Speed{rates[len(base)].Client, now})
	})
	s.base, s.sure = base, s.sure && !other
}

// gainOf returns what clients that keep the GPU busy gain by slices of this length, as a
// part of what they have with the driver's own.
func gainOf(d time.Duration) float64 {
	used := func(d time.Duration) float64 { return d.Seconds() / (d + SwitchTime).Seconds() }
	return used(d)/used(DriverSlice) - 1
}

// compare returns the mean of what clients have of base, the least, and whether one has so much more
// that this is not for its slices.
func (s *Search) compare(rates Speeds) (mean, least float64, other bool) {
	least = 1
	rates.beside(s.base, func(now, was float64) {
		part := now / was
		least = min(least, part)
		other = other || part > Changed
		mean += part / float64(len(rates))
	})
	return mean, least, other
}

// differ says whether a client is much faster or slower than it was.
func differ(rates, before Speeds) (differ bool) {
	rates.beside(before, func(now, was float64) {
		differ = differ || was != 0 && (now > Changed*was || was > Changed*now)
	})
	return differ
}

// Wish is what one process is to have of the time slices.
type Wish struct {
	Part  float64 // of the GPU, in any unit; 0: it does not share
	Fixed bool    // its slice stays the driver's own, and those of others are in proportion to it
}

// Lengths returns the slices of processes in the proportion of their parts; 0: the driver's own. The
// longest is as the search says, and bound at most.
func (s *Search) Lengths(wishes []Wish, bound time.Duration) []time.Duration {
	out := make([]time.Duration, len(wishes))
	least, most, fixed := 0.0, 0.0, 0.0
	for _, w := range wishes {
		if w.Part == 0 {
			continue
		}
		if w.Fixed {
			fixed = max(fixed, w.Part)
		}
		if least == 0 || w.Part < least {
			least = w.Part
		}
		most = max(most, w.Part)
	}
	longest := min(s.longest, bound)
	if longest == 0 || fixed > 0 {
		if most-least < most/50 { // nothing to be said against the driver's own
			return out
		}
		longest = DriverSlice
	}
	// The smallest part has LeastSlice, unless the others would have more than MaxSlice. Where
	// that needs slices longer than the driver's, those that are tried are longer as well.
	unit := max(DriverSlice, time.Duration(float64(LeastSlice)*most/max(least, 1)))
	longest = min(time.Duration(float64(longest)*unit.Seconds()/DriverSlice.Seconds()), MaxSlice)
	if fixed > 0 {
		most, longest = fixed, DriverSlice
	}
	for i, w := range wishes {
		if w.Part > 0 && !w.Fixed {
			out[i] = base.Clamp(time.Duration(float64(longest)*w.Part/most).Round(10*time.Microsecond), LeastSlice, MaxSlice)
		}
	}
	return out
}
