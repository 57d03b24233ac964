// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"cmp"
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// occupant is what rooms knows of one client.
type occupant struct {
	id     base.ClientID
	keep   Keep
	group  string // those that are granted together; "": itself
	active bool   // has a grant, of whatever state
	turn   uint64 // of its latest grant

	promised uint64 // reserved
	most     uint64 // that its word is taken for
	slack    uint64 // see sure
	extra    uint64 // allocated beyond promised, as of the latest report

	resident, fixed, away uint64 // as it says; fixed is all while its memory has to stay
	pins                  uint64 // fixed, as it says

	room     uint64
	told     uint64 // room, as its page says
	seq      uint32 // of told; in a report: the client knows of that
	grows    bool   // its reports say which room it knows: it may grow without a grant
	may      uint64 // upper bound of what it has on the GPU
	given    uint64 // of may, what it got from what was free
	reported bool   // since it had a grant last
	unknown  bool   // it was here before these rooms, and has not reported
	stalled  bool   // it does not move out as it should
	cut      bool   // it was taken off the GPU with work left: nothing of it moves before it goes on

	suspended bool // all its memory is to leave, until it has a grant that is not for the end of its work

	arena  uint64 // host memory that it has, or that is being made for it
	allOut bool   // its arena is to hold all that it may have to move

	counted sums // its part of rooms.sum
	listed  bool // in rooms.changed
}

// sums are sums over clients, or what one client adds to them.
type sums struct {
	resident, may  uint64
	fixed, movable uint64 // of what they need: what cannot be moved, and what can
	lacks          uint64 // room that is to be made
	wanting        int    // clients that lack room
	leaving        int    // clients that are to move out
	parting        int    // of them, those that are suspended and have nothing to end: nobody needs what they leave
	finishing      int    // of them, those that are to end their work first
	unknown        int    // clients that were here before and have not reported
	unfinished     uint64 // what clients whose work was cut may have beside what is fixed
	arena          uint64 // host memory that they have
}

// sure is how much a client keeps others from, at most. What it says that it has beyond
// that is moved for it in its turns, and is no reason to refuse others anything.
func (o *occupant) sure() uint64 { return add(o.promised, o.slack) }

// need is how much a client must have on the GPU to run.
func (o *occupant) need() uint64 {
	need := min(add(o.promised, o.extra), o.most)
	switch o.keep {
	case Managed:
		return 0
	case Resident: // what is there never goes
		return min(need, o.sure())
	}
	return need
}

// pinned is the part of need that cannot be taken from it.
func (o *occupant) pinned() uint64 {
	if o.keep == Swapped {
		return min(o.fixed, o.need())
	}
	return o.need()
}

// wants says whether room is to be made for what a client lacks.
func (o *occupant) wants() bool {
	return o.room < o.need() && (o.keep == Resident || o.keep == Swapped && o.active)
}

// victim says whether room can be taken from a client.
func (o *occupant) victim() bool { return o.keep == Swapped && !o.active && !o.unknown && !o.cut }

// yields says whether a client has something that others can have.
func (o *occupant) yields() bool { return o.victim() && !o.stalled && o.room > o.fixed }

// leaves says whether a client has more on the GPU, or may have, than it is to have, or than it is to
// have after its grant. One that does not answer stays.
func (o *occupant) leaves() bool {
	return o.keep == Swapped && (!o.stalled && !o.active && o.may > max(o.room, o.fixed) || o.finishes())
}

func (o *occupant) sums() sums {
	sure := min(o.need(), o.sure())
	s := sums{resident: o.resident, may: o.may, fixed: min(o.pinned(), sure), arena: o.arena}
	s.movable = sure - s.fixed
	if o.wants() {
		s.lacks, s.wanting = o.need()-o.room, 1
	}
	if o.unknown {
		s.unknown = 1
	}
	if o.leaves() {
		s.leaving = 1
	}
	switch {
	case o.finishes():
		s.finishing = 1
	case o.suspended:
		s.parting = s.leaving
	}
	if o.cut && !o.active && o.keep == Swapped {
		s.unfinished = less(o.may, s.fixed)
	}
	return s
}

func byID(a, b *occupant) int { return cmp.Compare(a.id, b.id) }

// byGrant puts those first whose memory stays, then the client that was granted
// before the others.
func byGrant(a, b *occupant) int {
	if (a.keep == Resident) != (b.keep == Resident) {
		if a.keep == Resident {
			return -1
		}
		return 1
	}
	return cmp.Compare(a.turn, b.turn)
}

func enlist(list []*occupant, o *occupant, by func(a, b *occupant) int) []*occupant {
	at, _ := slices.BinarySearchFunc(list, o, by)
	return slices.Insert(list, at, o)
}

func delist(list []*occupant, o *occupant, by func(a, b *occupant) int) []*occupant {
	at, _ := slices.BinarySearchFunc(list, o, by)
	return slices.Delete(list, at, at+1)
}

func (s *sums) add(t sums, sign int) {
	by := uint64(sign)
	s.resident += by * t.resident
	s.may += by * t.may
	s.fixed += by * t.fixed
	s.movable += by * t.movable
	s.lacks += by * t.lacks
	s.wanting += sign * t.wanting
	s.leaving += sign * t.leaving
	s.parting += sign * t.parting
	s.finishing += sign * t.finishing
	s.unknown += sign * t.unknown
	s.unfinished += by * t.unfinished
	s.arena += by * t.arena
}

func add(a, b uint64) uint64 {
	if a+b < a {
		return ^uint64(0)
	}
	return a + b
}

func less(a, b uint64) uint64 { return a - min(a, b) }
