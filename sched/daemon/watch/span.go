// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// recent is the time over which it is said what processes get that are held.
const recent = 5 * time.Second

// span says for which part of the latest seconds a process was on.
type span struct {
	since base.Time
	had   time.Duration // since then
	part  float64       // before since; -1: not known
}

// add takes note of the latest d.
func (s *span) add(now base.Time, d time.Duration, on bool) {
	if on {
		s.had += d
	}
	if now.Sub(s.since) >= 2*recent { // it takes no turns
		s.end(now)
	}
}

// turn is for the begin of a turn: a span of whole turns has not one more or less than another.
func (s *span) turn(now base.Time) {
	if now.Sub(s.since) >= recent {
		s.end(now)
	}
}

func (s *span) end(now base.Time) {
	s.part = float64(s.had) / float64(now.Sub(s.since))
	s.since, s.had = now, 0
}
