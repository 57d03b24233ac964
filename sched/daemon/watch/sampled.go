// SPDX-License-Identifier: Apache-2.0

package watch

import "math"

// The driver says every fifth of a second how busy the GPU was, and names one process for all of that: the one
// that had the GPU when it looked (580.159.04, H100). So a single sample says nothing about how processes
// share the GPU, and each conclusion here is drawn from as many as make it sure.

const (
	// nearFair: a part of the GPU that is as near to what a process is to have, is that. So is one that as
	// many standard errors of the mean do not tell from it.
	nearFair, sureErrors = 0.15, 3
	sampleError          = 0.5 // the standard deviation of one sample, at most
	keptSamples          = 300
	shownSamples         = 50
	changedFair          = 0.1 // by which part of itself what it is to have changes, so that the mean begins anew

	// A process that had more of the GPU than the time in which its channels were on, by more than cheatPart a
	// sample, puts them on by itself. Of one that does not, the excess reaches cheatAt in a day at most, and
	// freezeAt in years (Bernoulli samples of one half).
	cheatPart                  = 0.2
	againAt, cheatAt, freezeAt = 2, 8, 12

	// A process that is named for less than idlePart of the GPU has no work, once that many samples in which
	// it had the GPU would have named it: by chance that happens once in 400 times.
	idlePart = 0.01
	idleAt   = 6
)

// sampled is what samples have said of one process.
type sampled struct {
	fair   float64 // the part of the GPU that it is to have
	n, sum float64 // of the samples since that changed
	shown  float64 // which part it had lately
	shownN float64 // over so many samples
	excess float64 // what it had too much, in samples
	unseen float64 // how often it would have been named since it was
}

// add takes note of a sample: the part of the GPU's time of which it had some; on is the part of that
// time in which it could have the GPU, and fair what it was to have.
func (s *sampled) add(part, on, fair float64) {
	if math.Abs(fair-s.fair) > changedFair*s.fair {
		s.fair, s.n, s.sum = fair, 0, 0
	}
	s.n, s.sum = s.n+1, s.sum+part
	if s.n > keptSamples {
		s.n, s.sum = s.n/2, s.sum/2
	}
	s.shownN = min(s.shownN+1, shownSamples)
	s.shown += (part - s.shown) / s.shownN
	s.excess = min(max(s.excess+part-on-cheatPart, 0), freezeAt)
	s.awaitName(part, fair)
}

// awaitName is add for a sample that names nobody: either the GPU had no work, or there is no sample yet.
func (s *sampled) awaitName(part, fair float64) {
	if s.unseen += fair; part >= idlePart {
		s.unseen = 0
	}
}

// part returns which part of the GPU the process has.
func (s *sampled) part(fair float64) float64 {
	if s.n == 0 {
		return fair
	}
	mean := s.sum / s.n
	if math.Abs(mean-fair) < max(nearFair*fair, sureErrors*sampleError/math.Sqrt(s.n)) {
		return fair
	}
	return mean
}

func (s *sampled) idle() bool { return s.unseen >= idleAt }
