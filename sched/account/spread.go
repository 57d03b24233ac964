// SPDX-License-Identifier: Apache-2.0

package account

import (
	"math/bits"
	"time"
)

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

// merge counts what another spread has counted.
func (s *Spread) merge(o *Spread) {
	for i, n := range o.counts {
		s.counts[i] += n
	}
	s.total += o.total
}
