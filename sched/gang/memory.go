// SPDX-License-Identifier: Apache-2.0

package gang

import "github.com/nvshare/nvshare/sched/base"

// What turns of gangs have to do with memory that moves.

// Works says whether a member has a grant that keeps others out, on any GPU. Members give theirs back when they have
// nothing to do, if memory moves: the turn goes on for the others.
func (s *Slot) Works() bool { return s.gang.any(Members.Live) }

// Moves says whether memory moves on any GPU of the gang.
func (s *Slot) Moves() bool { return s.gang.any(Members.Moves) }

// Settle notes that a member does not move its memory in any more; all: none of them does here. What members move
// after that is theirs to pay for: the turn does not begin anew.
func (s *Slot) Settle(all bool) {
	if !s.settled {
		s.settled, s.gang.settledAt = all, s.gang.gangs.now()
	}
	s.gang.tell()
}

// HasSettled says whether the members here had their memory since the turn began.
func (s *Slot) HasSettled() bool { return s.settled }

// SettledAt returns when the latest member had its memory on its GPU, or the turn began here: all ranks can work from then on.
func (s *Slot) SettledAt() base.Time { return max(s.gang.settledAt, s.playedAt) }

// Binds returns before which time the turn does not end on any GPU, because of moving memory on one of them.
func (s *Slot) Binds() (until base.Time) {
	for _, o := range s.gang.slots {
		if o.hold == Playing {
			until = max(until, o.m.Binds())
		}
	}
	return until
}
