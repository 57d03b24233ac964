// SPDX-License-Identifier: Apache-2.0

package account

import (
	"math/bits"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

const (
	// recentSeconds is the window of TenantSnapshot.Got and Waited.
	recentSeconds = 5
	// peakTens is the window of TenantSnapshot.RecentWait and Waits, in steps of ten seconds.
	peakTens = 6
	// ringSteps are those of either window, and the one that is not over.
	ringSteps = max(recentSeconds, peakTens) + 1

	second = base.Time(time.Second)
	ten    = 10 * second
)

// ring has a T for each of the latest steps of time. It is a value: a copy is one of its own.
type ring[T any] struct {
	steps [ringSteps]T
	at    int64 // the latest step in it
}

// advance begins those steps that are later than the latest.
func (r *ring[T]) advance(to int64) {
	for s := max(r.at+1, to-ringSteps+1); s <= to; s++ {
		*r.of(s) = *new(T)
	}
	r.at = max(r.at, to)
}

func (r *ring[T]) of(step int64) *T { return &r.steps[step%ringSteps] }

// recent is how much of the latest seconds something took.
type recent struct{ ring[time.Duration] }

// spread notes in which seconds something took that long.
func (r *recent) spread(from, to base.Time, took time.Duration) {
	last := int64(to / second)
	r.advance(last)
	for s := max(int64(from/second), last-recentSeconds); s <= last; s++ {
		lo, hi := max(from, base.Time(s)*second), min(to, base.Time(s+1)*second)
		*r.of(s) += time.Duration(base.Scale(int64(took), int64(hi-lo), int64(to-from)))
	}
}

// permille returns which part of the latest recentSeconds is noted, up to 1000.
func (r *recent) permille(now base.Time) int {
	r.spread(now, now+1, 0)
	into := time.Duration(now % second)
	var sum time.Duration
	first := int64(now/second) - recentSeconds
	for s := max(first, 0); s <= int64(now/second); s++ {
		took := *r.of(s)
		if s == first { // the part of it that is within
			took = time.Duration(base.Scale(int64(took), int64(time.Second-into), int64(time.Second)))
		}
		sum += took
	}
	return int(min(sum/(recentSeconds*time.Second/1000), 1000))
}

// Peak is the greatest of what was noted in the latest minute.
type Peak struct{ tens ring[time.Duration] }

// Note notes one.
func (p *Peak) Note(now base.Time, d time.Duration) {
	p.tens.advance(int64(now / ten))
	top := p.tens.of(int64(now / ten))
	*top = max(*top, d)
}

// Most returns the greatest duration; p is a copy.
func (p Peak) Most(now base.Time) time.Duration {
	p.Note(now, 0)
	return slices.Max(p.tens.steps[:])
}

// Lately counts the durations of the latest minute.
type Lately struct{ tens ring[Spread] }

// Note counts one.
func (l *Lately) Note(now base.Time, d time.Duration) {
	l.tens.advance(int64(now / ten))
	l.tens.of(l.tens.at).Add(d)
}

// Sum counts the durations of the latest minute; l may be nil.
func (l *Lately) Sum(now base.Time) (all Spread) {
	if l == nil {
		return all
	}
	for s := max(int64(now/ten), l.tens.at) - peakTens; s <= l.tens.at; s++ {
		if s >= 0 {
			all.merge(l.tens.of(s))
		}
	}
	return all
}

const (
	// fine is how many steps there are from one power of two of microseconds to the
	// next: a percentile is at most an eighth too large.
	fine = 8
	// octaves reach up to nine minutes; what took longer counts as that.
	octaves = 27
)

// Spread counts durations by steps that grow with them, so that percentiles are as exact
// for microseconds as for seconds, in the same few bytes however many there are.
type Spread struct {
	counts [fine * octaves]uint64
	total  uint64
}

// Add counts one.
func (s *Spread) Add(d time.Duration) {
	s.counts[step(d)]++
	s.total++
}

// step returns the step of a duration: of those below eight microseconds each has one of
// its own, and then each eighth of a power of two.
func step(d time.Duration) int {
	us := uint64(max(d, 0)+time.Microsecond-1) / uint64(time.Microsecond)
	if us < fine {
		return int(us)
	}
	octave := bits.Len64(us) - 3 // us >> (octave-1) is from 8 to 15
	return min(fine*octave+int(us>>(octave-1))-fine, fine*octaves-1)
}

// bound returns the longest duration of a step.
func bound(step int) time.Duration {
	if step < fine {
		return time.Duration(step) * time.Microsecond
	}
	octave := step / fine
	return (time.Duration(step%fine+fine+1)<<(octave-1) - 1) * time.Microsecond
}

// Percentile returns which duration that part of them took at most; 0: there are none.
func (s *Spread) Percentile(part int) time.Duration {
	var up uint64
	for i, n := range s.counts {
		if up += n; n > 0 && 100*up >= uint64(part)*s.total {
			return bound(i)
		}
	}
	return 0
}

// Count returns how many durations were counted.
func (s *Spread) Count() uint64 { return s.total }

func (s *Spread) merge(o *Spread) {
	for i, n := range o.counts {
		s.counts[i] += n
	}
	s.total += o.total
}
