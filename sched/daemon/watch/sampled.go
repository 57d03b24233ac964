// SPDX-License-Identifier: Apache-2.0

package watch

import "math"

// The driver says every fifth of a second how busy the GPU was, and names one process for all of that: the one
// that had the GPU when it looked (580.159.04, H100). Turns and rounds of slices take a tenth or a fifth of a second
// as well, so that it may name the same one for seconds. So a sample says nothing about how processes share a
// GPU: it says how busy the GPU was, and, of a process that was off all the time, that it was not.

const (
	shownSamples = 50

	// A process that was off, or was alone and on for a part of the time, and had cheatPart more than that in a sample
	// puts its channels on by itself. After cheatAt of what it had too much it is named, after freezeAt its
	// container is stopped. One that others share the GPU with is suspect first, and is kept off then until that is proof.
	cheatPart                  = 0.2
	againAt, cheatAt, freezeAt = 0.5, 2, 4
	suspectAt                  = 8

	// A process is idle that is not named for idlePart of the GPU in samples of which idleAt would have named it by
	// chance, if the GPU had no work in its turns. Beside others, whom an idle one costs nothing, idleSure show it.
	idlePart         = 0.01
	idleAt, idleSure = 6, 60

	// A process keeps the GPU busy that uses busyPart of its turns, as the mean of about useSamples says. Of one that
	// was on for less than onLeastPart of the time nothing can be said. It need not be named in these samples: two have turns
	// within each of them.
	busyPart    = 0.98
	useSamples  = 8
	onLeastPart = 0.01
	turnPart    = 0.1 // least part of the time in which it was on, of a sample that says something
	changedPart = 0.1
)

// sampled is what samples have said of one process.
type sampled struct {
	shown, shownN float64 // which part of the GPU it had lately, of so many samples
	excess        float64 // what it had too much, in samples
	suspect       float64 // what it seems to have had too much, beside others
	unseen        float64 // how many of the samples since it was named would have named it by chance
	busy, n       float64 // the GPU's use in these samples, and their number
	turns         turns
	full          float64 // how much of the GPU's time all used lately who shared it by slices
	fullN         float64
}

// turns is what samples have said of a process that took turns.
type turns struct {
	n        float64 // samples
	on       float64 // for which part of the time it had turns lately, or those with whom it took turns
	used     float64 // and for which part of the time these used the GPU
	latestOn float64 // on, of the sample before
}

// newSampled is for a process of which nothing has been said.
func newSampled() sampled { return sampled{turns: turns{on: 1, used: 1}} }

// add takes note of a sample: which part of the GPU's time the process had, and all had; fair is the part of that
// time that it was to have.
func (s *sampled) add(part, all, fair float64) {
	s.shownN = min(s.shownN+1, shownSamples)
	s.shown += (part - s.shown) / s.shownN
	if part >= idlePart {
		s.named()
		return
	}
	s.unseen, s.busy, s.n = s.unseen+fair, s.busy+all, s.n+1
}

// named forgets for how long it was not named.
func (s *sampled) named() { s.unseen, s.busy, s.n = 0, 0, 0 }

// inTurns takes note of a sample while processes took turns: all of them used a part of the GPU's time, and one was
// on for anyOn of that time. Else one went off and another one on, which is no gap in anybody's work. A sample is of
// another moment than that time, so that only the means of many can be compared, and none where that time has just changed.
func (s *sampled) inTurns(all, anyOn float64) {
	s.full, s.fullN = 0, 0
	t := &s.turns
	changed := math.Abs(anyOn-t.latestOn) > changedPart
	if t.latestOn = anyOn; changed {
		return
	}
	t.n = min(t.n+1, useSamples)
	t.used += (all - t.used) / t.n
	t.on += (min(anyOn, 1) - t.on) / t.n
}

// inSlices takes note of a sample while all shared the GPU by slices.
func (s *sampled) inSlices(all float64) {
	s.fullN = min(s.fullN+1, useSamples)
	s.full += (all - s.full) / s.fullN
}

// isFull says whether the GPU was busy all the time while it was shared by slices.
func (s *sampled) isFull() bool { return s.fullN >= useSamples && s.full >= busyPart }

// isKnown says whether it was seen in enough turns.
func (s *sampled) isKnown() bool { return s.turns.n >= useSamples }

// forgetTurns has it be seen in turns anew.
func (s *sampled) forgetTurns() { s.turns = newSampled().turns }

// use is which part of these turns used the GPU.
func (s *sampled) use() float64 { return min(s.turns.used/max(s.turns.on, onLeastPart), 1) }

// saturates says whether it is known to have kept the GPU busy in its turns.
func (s *sampled) saturates() bool { return s.isKnown() && s.use() >= busyPart }

// hasGaps says whether it is known to have left the GPU idle in its turns.
func (s *sampled) hasGaps() bool { return s.isKnown() && s.use() < busyPart }

// idle says whether the process has no work; in turns the GPU has none then either.
func (s *sampled) idle(turns bool) bool {
	return turns && s.unseen >= idleAt && s.busy < s.n-s.unseen/2 || s.unseen >= idleSure
}

// had takes note of a sample that is proof: the process could have the GPU for a part of the time only.
func (s *sampled) had(part, on float64) { s.excess = tooMuch(s.excess, part, on, freezeAt) }

// seemed takes note of a sample that is none.
func (s *sampled) seemed(part, on float64) { s.suspect = tooMuch(s.suspect, part, on, suspectAt) }

// tooMuch adds to a sum of what a process had too much, in samples.
func tooMuch(sum, part, on, most float64) float64 {
	return min(max(sum+part-on-cheatPart, 0), most)
}
