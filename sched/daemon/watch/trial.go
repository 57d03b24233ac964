// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// While processes share a GPU by slices nobody can tell which of them keep it busy: the driver's samples say that the GPU is.
// So one of which that is not known has turns for a while, a trial, if the GPU is busy all the time. Without it a
// process would keep the driver's own slices for ever that had gaps in its first turns, while it began.
//
// A trial ends after trialMost. The next one comes after trialFirst, and each further one twice as late, or trialRarest: to a
// process with gaps each is a loss.
const (
	trialMost, trialFirst, trialRarest = 10 * time.Second, 10 * time.Second, 10 * time.Minute
)

type trial struct {
	until base.Time     // it has turns until then; 0: there is none
	next  base.Time     // none before that
	pause time.Duration // between the next two
}

func newTrial(now base.Time) trial { return trial{next: now.Add(trialFirst), pause: trialFirst} }

func (t *trial) on() bool { return t.until != 0 }

// look begins a trial, if there may be one, or ends it, and returns whether it did.
func (t *trial) look(now base.Time, s *sampled, may bool) bool {
	switch {
	case t.on() && (s.isKnown() || now >= t.until || !may):
		t.until, t.next, t.pause = 0, now.Add(t.pause), min(2*t.pause, trialRarest)
		return true
	case !t.on() && may && s.isFull() && !s.saturates() && now >= t.next:
		t.until = now.Add(trialMost)
		s.forgetTurns()
		return true
	}
	return false
}
