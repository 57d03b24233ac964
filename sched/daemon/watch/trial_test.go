// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// One that had gaps while it began has longer slices once it keeps the GPU busy; one that has gaps for ever has few trials, and
// one beside which the GPU is idle at times none.
func TestTrials(t *testing.T) {
	const look = 500 * time.Millisecond
	for _, c := range []struct {
		what                       string
		inFirstTurns, turns, share float64 // of the GPU's time: what is used in its turns at first, and later; and by all in slices
		most                       int     // trials in an hour
		saturates                  bool
	}{
		{"it begins slowly", 0.5, 0.99, 0.99, 1, true},
		{"it has gaps that others fill", 0.5, 0.8, 0.99, 12, false},
		{"they have gaps together", 0.5, 0.8, 0.9, 0, false},
	} {
		s, trials, now := newSampled(), 0, base.Time(time.Hour)
		x := newTrial(now)
		for range 3 {
			s.inTurns(c.inFirstTurns, 1)
		}
		for range int(time.Hour / look) {
			now = now.Add(look)
			if x.on() {
				s.inTurns(c.turns, 0.99)
			} else {
				s.inSlices(c.share)
			}
			if x.look(now, &s, true) && x.on() {
				trials++
			}
		}
		if s.saturates() != c.saturates || trials > c.most || c.most > 0 && trials == 0 {
			t.Errorf("%s: saturates is %v after %d trials, %d at most", c.what, s.saturates(), trials, c.most)
		}
	}
	// A process of which nothing is said in a trial.
	s, now := newSampled(), base.Time(time.Hour)
	x := newTrial(now)
	for range useSamples {
		s.inSlices(1)
	}
	if x.look(now, &s, true) || !x.look(now.Add(trialFirst), &s, true) || !x.look(now.Add(trialFirst+trialMost), &s, true) || x.on() {
		t.Error("a trial begins too early, or does not end")
	}
}
