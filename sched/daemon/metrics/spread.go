// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"math/bits"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// fine is how many steps there are from one power of two of microseconds to the
	// next: a percentile is at most an eighth too large.
	fine = 8
	// octaves reach up to nine minutes; what took longer counts as that.
	octaves = 27
)

// spread counts durations by steps that grow with them, so that percentiles are as exact
// for microseconds as for seconds, in the same few bytes however many there are.
type spread struct {
	counts [fine * octaves]uint64
	total  uint64
}

func (s *spread) add(d time.Duration) {
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

// percentile returns which duration that part of them took at most; 0: there are none.
func (s *spread) percentile(part int) time.Duration {
	var up uint64
	for i, n := range s.counts {
		if up += n; n > 0 && 100*up >= uint64(part)*s.total {
			return bound(i)
		}
	}
	return 0
}

func (s *spread) status() *api.Spread {
	return &api.Spread{Count: s.total, P50Ns: int64(s.percentile(50)), P99Ns: int64(s.percentile(99))}
}

// Fill tells what turns took.
func (s *Turns) Fill(g *api.GPU) {
	g.Drains, g.HandOvers, g.Waits = s.drain.exact.status(), s.handOver.exact.status(), s.wait.exact.status()
}
