// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// Keep says how a client's memory on the GPU is kept.
type Keep uint8

const (
	Swapped  Keep = iota // the client moves it out when others need the room
	Resident             // it never moves; room is made before the client allocates, and the client need not report
	Managed              // the driver moves it by page faults; it counts for nothing here
)

func (k Keep) String() string { return base.Name(k, "keep", "swapped", "resident", "managed") }

// rooms decides how much of one GPU's memory each client may have on it at a time, its room, where
// more is promised than there is. It is told what is promised, who has a grant and what clients say
// they have; plan answers with the rooms that change, and fits says what can be promised.
//
// It rests on this: no client grows on the GPU beyond its room, and one whose room was lowered does not
// grow beyond that once it has sent a report that knows of it. So all together have at most the capacity at
// any moment, unless memory was reserved by force. A client without a grant grows only while still holds.
//
// A client with a grant gets room for all that it is promised. What is lacking is taken from clients
// without a grant, first from the one that is expected to have the GPU last (later). Room is given as
// it becomes free, so that one client moves in while another one moves out. Nothing leaves ahead of the
// grant that lacks the room: that would shorten a switch by some 5 % (tests/gpu/README.md, Swapping).
//
// While all that is promised fits onto the GPU as it is (physical), nobody has to make room: still. More than
// that is promised beside a headroom, which the driver needs to move memory. A client whose drain was cut while nothing
// had to move is asked for no room before it has finished that work (cut), and who needs that room is granted nothing
// before (behind).
//
// Sums are kept: an event costs O(log n) while all fits and nobody lacks room, else O(n), see looked.
type rooms struct {
	// later says whether a client is expected to use the GPU later than another
	// one. nil: the client that was granted before the other one is.
	later func(a, b base.ClientID) bool
	// moveUnit is what clients may move at a time: so much more than is lacking
	// may be out. 0: leastMoveUnit.
	moveUnit uint64
	// arenaUnit is what arenas are multiples of. 0: 1.
	arenaUnit uint64

	capacity uint64 // what clients may have at a time where more is promised than physical
	physical uint64 // what they may have where not
	outside  uint64 // of that, what others than clients seem to have; see outside.go
	clients  map[base.ClientID]*occupant
	all      []*occupant // clients, by id
	order    []*occupant // clients, by byGrant
	changed  []*occupant // those that may have another room than they know
	sum      sums        // of all clients
	seq      uint64
	looked   uint64 // occupants that were looked at, in passes over all

	suspended int    // clients
	planned   []Room // reused by each plan
}

const (
	leastMoveUnit = 64 << 20
	// maxCapacity, 1 PiB, keeps the sums of 8,192 clients from overflowing.
	maxCapacity = 1 << 50
	// slackPart is which part of the GPU a client may have beyond what it was promised
	// and keep others from by that: what it has freed, and the driver rounds up.
	slackPart = 1024
)

// recount brings what is kept of all clients up to date with a client that has changed.
func (r *rooms) recount(o *occupant) {
	r.sum.add(o.counted, -1)
	o.counted = o.sums()
	r.sum.add(o.counted, +1)
	if o.room != o.told && !o.listed {
		o.listed = true
		r.changed = append(r.changed, o)
	}
}

// everybody returns all clients, by id, for a pass over them.
func (r *rooms) everybody() []*occupant {
	r.looked += uint64(len(r.all))
	return r.all
}

// inOrder returns all clients by byGrant, for a pass over them.
func (r *rooms) inOrder() []*occupant {
	r.looked += uint64(len(r.order))
	return r.order
}

// reorder makes a change that may give a client another place in the order.
func (r *rooms) reorder(o *occupant, change func()) {
	r.order = delist(r.order, o, byGrant)
	change()
	r.order = enlist(r.order, o, byGrant)
}

// newRooms returns one without clients, of a GPU on which they may have so
// much in all.
func newRooms(capacity uint64) *rooms {
	capacity = min(capacity, maxCapacity)
	return &rooms{capacity: capacity, physical: capacity, clients: map[base.ClientID]*occupant{}}
}

// attach makes a client known, or changes how its memory is kept and who is
// granted together with it ("": nobody). A client that was here before these
// rooms, back, has room for anything and makes the others wait until it
// reports.
func (r *rooms) attach(id base.ClientID, keep Keep, group string, back bool) {
	o := r.clients[id]
	if o == nil {
		r.seq++
		o = &occupant{id: id, most: r.physical, slack: r.capacity / slackPart, reported: true, turn: r.seq}
		if back {
			o.unknown, o.reported, o.room, o.told = true, false, r.physical, r.physical
		}
		r.clients[id] = o
		r.all, r.order = enlist(r.all, o, byID), enlist(r.order, o, byGrant)
	}
	was := o.keep
	r.reorder(o, func() { o.keep, o.group = keep, group })
	switch {
	case keep != Swapped:
		r.wake(o)
	case was == Resident:
		o.fixed = min(o.pins, o.resident) // all was: see settle
	}
	r.settle(o)
}

// promise makes bytes what a client has reserved, and most what is believed of
// what it says that it has.
func (r *rooms) promise(id base.ClientID, bytes, most uint64) {
	o := r.clients[id]
	if o == nil {
		return
	}
	if bytes < o.promised { // what it gives back it has freed already, or never had: the driver refused it
		freed := less(o.promised-bytes, less(o.promised, o.resident+o.away))
		gone := min(freed, o.away)
		o.away -= gone
		o.resident = max(less(o.resident, freed-gone), min(o.pins, o.resident))
		o.fixed = min(o.fixed, o.resident) // all, while its memory has to stay
	}
	o.promised, o.most = bytes, min(most, r.physical)
	r.settle(o)
	r.grow(o)
}

// grow gives room to a client without a grant where nobody has to make any: what it allocates is on the
// GPU at once, or the driver refuses it at once. What it does with that is known when it has reported.
func (r *rooms) grow(o *occupant) {
	if o.keep != Swapped || o.active || o.suspended || o.room >= o.need() || !r.still() {
		return
	}
	if n := less(o.need(), max(o.may, o.room)); n <= less(r.usable(), r.sum.may) {
		o.given = max(o.given, min(o.need(), add(o.given, n)))
		o.room, o.may, o.reported = o.need(), max(o.may, o.need()), false
		r.recount(o)
	}
}

// bound is what clients may have on the GPU at a time.
func (r *rooms) bound() uint64 {
	if r.promised() <= r.physical {
		return r.physical
	}
	return r.capacity
}

// whole is what there is for clients, the headroom included, as far as is known; usable is what of it they may have.
func (r *rooms) whole() uint64  { return less(r.physical, r.outside) }
func (r *rooms) usable() uint64 { return min(r.bound(), r.whole()) }

// crosses says whether more is promised than the GPU has, if that is more by so much.
func (r *rooms) crosses(more uint64) bool { return add(r.promised(), more) > r.physical }

// over is how much of what is promised has no place on the GPU, as far as is known.
func (r *rooms) over() uint64 { return less(r.promised(), r.usable()) }

// still says whether nobody has to make room for others: all memory has its place on the GPU.
func (r *rooms) still() bool {
	return r.sum.unknown == 0 && r.sum.leaving == r.sum.parting && max(r.promised(), add(r.sum.may, r.sum.lacks)) <= r.usable()
}

// behind says whether a client cannot have all its memory on the GPU before others have finished work that was cut.
func (r *rooms) behind(o *occupant) bool {
	if r.sum.unfinished == 0 || o.keep != Swapped || o.cut || o.room >= o.need() {
		return false
	}
	fixed := r.sum.fixed - o.counted.fixed
	n := add(o.need(), fixed)
	return n <= r.whole() && add(n, r.sum.unfinished-o.counted.unfinished) > r.usable()
}

// force says that what a client has reserved is on the GPU already.
func (r *rooms) force(id base.ClientID) {
	if o := r.clients[id]; o != nil && o.keep == Resident && !o.unknown {
		o.room = max(o.room, o.need())
		o.may = max(o.may, o.room)
		r.settle(o)
	}
}

// settle brings what may be resident into line with what is promised.
func (r *rooms) settle(o *occupant) {
	switch {
	case o.keep == Managed:
		o.resident, o.fixed, o.away, o.room, o.may = 0, 0, 0, 0, 0
	case !o.unknown:
		o.resident = min(o.resident, max(o.need(), o.fixed))
		o.room = min(o.room, max(o.need(), o.resident))
		o.may = min(o.may, max(o.need(), o.resident))
		o.may = max(o.may, o.room, o.resident)
		if o.keep == Resident {
			o.resident, o.fixed = max(o.resident, o.room), max(o.resident, o.room)
		}
	}
	o.given = min(o.given, o.may)
	r.recount(o)
}

// moved takes note of a client's report. Seen: which room it knew then; 0: it does not say, and does not grow
// without a grant. Stuck: the client says itself that it cannot move.
func (r *rooms) moved(id base.ClientID, resident, fixed, away uint64, seen uint32, stuck bool) {
	o := r.clients[id]
	if o == nil || o.keep == Managed {
		return
	}
	o.resident = min(resident, o.most)
	o.fixed, o.pins = min(fixed, o.resident), fixed
	o.away = min(away, o.most-o.resident)
	o.extra = less(o.resident+o.away, o.promised)
	if o.unknown {
		o.unknown = false
		o.room = o.resident // and need, if it has a grant: see plan
	}
	o.grows = o.grows || seen != 0
	if o.knows(seen) {
		o.may = max(o.room, o.resident)
		o.given = min(o.given, o.may)
		o.reported = !o.active
	} // else it may have grown up to its earlier room since
	o.stalled = stuck && !o.active // what it cannot get in says nothing of what it can move out
	r.settle(o)
	r.leave(o)
}

// knows says whether a report was made after the client saw the room that its page says.
func (o *occupant) knows(seen uint32) bool { return seen == 0 || seen == o.seq }

// stall says that a client has not moved out for too long: others are tried
// before it. Its next report takes that back. It returns whether that changes
// anything.
func (r *rooms) stall(id base.ClientID) bool {
	o := r.clients[id]
	if o == nil || o.stalled && !o.unknown {
		return false
	}
	if o.unknown { // it never says; what it was promised is the best guess
		o.unknown = false
		o.resident = o.need()
		o.room, o.may = o.resident, o.resident
	}
	o.stalled = true
	r.recount(o)
	return true
}

// setActive says whether a client has a grant: holds, drains, is lost or fenced.
func (r *rooms) setActive(id base.ClientID, active bool) {
	o := r.clients[id]
	if o == nil || o.active == active {
		return
	}
	o.active = active
	if active {
		r.seq++
		r.reorder(o, func() { o.turn = r.seq })
		if !o.cut { // else the grant is for what is left of its work
			r.wake(o)
		}
		o.reported, o.stalled, o.cut = false, false, false
	}
	r.recount(o)
	r.leave(o)
}

// setCut says whether the grant of a client ends with work left, which is off the GPU. It comes before
// that end: nothing is to be taken from the client then.
func (r *rooms) setCut(id base.ClientID, cut bool) {
	if o := r.clients[id]; o != nil && o.cut != cut {
		o.cut = cut
		r.recount(o)
		r.leave(o)
	}
}

// drop forgets a client: it is dead.
func (r *rooms) drop(id base.ClientID) {
	if o := r.clients[id]; o != nil {
		r.wake(o)
		r.sum.add(o.counted, -1)
		r.all, r.order = delist(r.all, o, byID), delist(r.order, o, byGrant)
		o.told = o.room // nobody is to be told
		delete(r.clients, id)
	}
}

// setArena says how much host memory a client has, or will have.
func (r *rooms) setArena(id base.ClientID, bytes uint64) {
	if o := r.clients[id]; o != nil {
		o.arena = bytes
		r.recount(o)
	}
}

// promised returns what all clients need together.
func (r *rooms) promised() uint64 { return r.sum.fixed + r.sum.movable }

// away says whether a client has to move before it can go on under a grant.
func (r *rooms) away(id base.ClientID) bool {
	o := r.clients[id]
	return o != nil && o.away > 0
}

// lacks returns how much room a client lacks that is to be made for it.
func (r *rooms) lacks(id base.ClientID) uint64 {
	if o := r.clients[id]; o != nil {
		return o.counted.lacks
	}
	return 0
}

// check returns an error that names a broken invariant, which is a bug in this
// package, or nil. It costs O(clients) and changes nothing.
func (r *rooms) check() error {
	given, suspended := uint64(0), 0
	var sum sums
	for id, o := range r.clients {
		sum.add(o.sums(), +1)
		switch {
		case o.id != id:
			return fmt.Errorf("client %d is recorded as %d", o.id, id)
		case o.fixed > o.resident:
			return fmt.Errorf("client %d: %d bytes are fixed, %d resident", id, o.fixed, o.resident)
		case !o.unknown && (o.may < o.room || o.may < o.resident):
			return fmt.Errorf("client %d: room %d, resident %d, at most %d", id, o.room, o.resident, o.may)
		case o.room != o.told && o.keep != Managed && !o.listed:
			return fmt.Errorf("client %d: room %d, was sent %d, and nothing is to be sent", id, o.room, o.told)
		case o.given > o.may:
			return fmt.Errorf("client %d: was given %d, has at most %d", id, o.given, o.may)
		}
		given = add(given, o.given)
		if o.suspended {
			suspended++
		}
	}
	switch {
	case suspended != r.suspended:
		return fmt.Errorf("%d clients are suspended, counted %d", suspended, r.suspended)
	case len(r.all) != len(r.clients) || !slices.IsSortedFunc(r.all, byID):
		return fmt.Errorf("%d of %d clients are listed by their ids", len(r.all), len(r.clients))
	case len(r.order) != len(r.clients) || !slices.IsSortedFunc(r.order, byGrant):
		return fmt.Errorf("%d of %d clients are listed by their grants", len(r.order), len(r.clients))
	case sum != r.sum:
		return fmt.Errorf("all clients have %+v, counted %+v", sum, r.sum)
	case given > r.physical:
		return fmt.Errorf("%d bytes of the GPU were given, it has %d", given, r.physical)
	}
	return nil
}
