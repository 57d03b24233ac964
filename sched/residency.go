// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Keep says how a client's memory on the GPU is kept.
type Keep uint8

const (
	Swapped   Keep = iota // it is moved out when others need the room
	Resident              // never moved; room is made for it before it allocates. It need not report
	Unmovable             // the client cannot move it
	Managed               // the driver moves it by page faults; it counts for nothing here
)

func (k Keep) String() string {
	names := [...]string{"swapped", "resident", "unmovable", "managed"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("keep(%d)", uint8(k))
}

// Residency decides how much of one GPU's memory each client may have on it at
// a time, its room, where the clients together are promised more than there is.
// Sizes are bytes. The caller tells it what is promised, who has a grant and what
// clients say they have, and carries out what Plan answers.
//
// What it rests on: a client without a grant does not grow on the GPU, one with a
// grant not beyond its room, and a report (Moved) that comes after the room was
// lowered was sent by a client that does not grow. Then what all clients have at
// any moment is at most the capacity, unless it was reserved by force
// (memory that existed before anybody could refuse it), or is overdrawn for that.
//
// Who has a grant gets room for all it is promised. What that lacks is taken from
// those without one, first from who is expected to have one last (Later), and only as
// much as is lacking; never from who has a grant. Room is given as it becomes free, so that one moves
// in while the other moves out.
//
// Like a Core it has no clock, does no I/O, and is not safe for use by several
// goroutines at once. Plan and Fits cost O(n log n) in clients.
type Residency struct {
	// Later says whether a client is expected to use the GPU later than another one.
	// nil: who was granted before the other is.
	Later func(a, b ClientID) bool
	// MoveUnit is what clients may move at a time, bytes: so much more than is lacking may
	// be out. 0: 64 MiB.
	MoveUnit uint64

	capacity uint64
	outside  uint64 // of it, what others than clients seem to have; see Refused
	clients  map[ClientID]*occupant
	seq      uint64
	rooms    []Room // reused by each Plan
	order    []*occupant
}

const leastMoveUnit = 64 << 20

// Room is what a client may have on the GPU from now on.
type Room struct {
	Client ClientID
	Bytes  uint64
	Less   bool // it has to move out, and to report
}

// occupant is what Residency knows of one client.
type occupant struct {
	id     ClientID
	keep   Keep
	group  string // those that are granted together; "": itself
	active bool   // has a grant, of whatever state
	seq    uint64 // of its latest grant

	promised uint64 // reserved
	most     uint64 // that its word is taken for
	extra    uint64 // allocated beyond promised, as of the latest report

	resident, fixed, away uint64 // as it says

	room     uint64
	told     uint64 // room, as the client knows it
	may      uint64 // upper bound of what it has
	given    uint64 // of may, what it got from what was free
	reported bool   // since it had a grant last
	unknown  bool   // it was here before this Residency, and has not reported
	stalled  bool   // it does not move out as it should
	allOut   bool   // its arena is to hold all that it may have to move
}

// need is how much it must have on the GPU to run.
func (o *occupant) need() uint64 {
	if o.keep == Managed {
		return 0
	}
	return min(add(o.promised, o.extra), o.most)
}

// pinned is the part of need that cannot be taken from it.
func (o *occupant) pinned() uint64 {
	if o.keep == Swapped {
		return min(o.fixed, o.need())
	}
	return o.need()
}

func add(a, b uint64) uint64 {
	if a+b < a {
		return ^uint64(0)
	}
	return a + b
}

func less(a, b uint64) uint64 { return a - min(a, b) }

// NewResidency returns one without clients, of a GPU on which they may have so
// much in all.
func NewResidency(capacity uint64) *Residency {
	return &Residency{capacity: capacity, clients: map[ClientID]*occupant{}}
}

// Capacity returns what NewResidency was told.
func (r *Residency) Capacity() uint64 { return r.capacity }

// Attach makes a client known, or changes how its memory is kept and who is
// granted together with it ("": nobody). A client that was here before this
// Residency, back, has room for anything and makes the others wait until it
// reports.
func (r *Residency) Attach(id ClientID, keep Keep, group string, back bool) {
	o := r.clients[id]
	if o == nil {
		r.seq++
		o = &occupant{id: id, most: r.capacity, reported: true, seq: r.seq}
		if back {
			o.unknown, o.reported, o.room, o.told = true, false, r.capacity, r.capacity
		}
		r.clients[id] = o
	}
	o.keep, o.group = keep, group
	o.settle()
}

// Promise makes bytes what a client has reserved, and most what is believed of
// what it says that it has.
func (r *Residency) Promise(id ClientID, bytes, most uint64) {
	o := r.clients[id]
	if o == nil {
		return
	}
	if bytes < o.promised { // what it gives back it has freed already
		freed := o.promised - bytes
		gone := min(freed, o.away)
		o.away -= gone
		o.resident = max(less(o.resident, freed-gone), o.fixed)
	}
	o.promised, o.most = bytes, min(most, r.capacity)
	o.settle()
}

// Refused says that the driver had no memory for a client although it had room:
// others than clients have some of the GPU, as much as clients have not.
func (r *Residency) Refused(id ClientID) {
	if o := r.clients[id]; o != nil && o.resident < o.room {
		r.outside = max(r.outside, less(r.capacity, r.onGPU()))
	}
}

// Ready says that a client got all its memory. What others seemed to have may be
// less, so that is tried again, little by little.
func (r *Residency) Ready() {
	r.outside = min(r.outside-(r.outside+7)/8, less(r.capacity, r.onGPU()))
}

// onGPU is what clients have there, as they say.
func (r *Residency) onGPU() (sum uint64) {
	for _, o := range r.clients {
		sum = add(sum, o.resident)
	}
	return sum
}

// usable is what clients can have on the GPU, as far as is known.
func (r *Residency) usable() uint64 { return less(r.capacity, r.outside) }

// Force says that what a client has reserved is on the GPU already.
func (r *Residency) Force(id ClientID) {
	if o := r.clients[id]; o != nil && o.keep == Resident && !o.unknown {
		o.room = max(o.room, o.need())
		o.may = max(o.may, o.room)
		o.settle()
	}
}

// settle brings what may be resident into line with what is promised.
func (o *occupant) settle() {
	switch {
	case o.keep == Managed:
		o.resident, o.fixed, o.away, o.room, o.may = 0, 0, 0, 0, 0
	case o.keep == Unmovable:
		o.resident, o.fixed, o.away, o.room, o.may = o.need(), o.need(), 0, o.need(), o.need()
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
}

// Moved takes note of a client's report. Stuck: it says itself that it cannot
// move.
func (r *Residency) Moved(id ClientID, resident, fixed, away uint64, stuck bool) {
	o := r.clients[id]
	if o == nil || o.keep == Unmovable || o.keep == Managed {
		return
	}
	o.resident = min(resident, o.most)
	o.fixed = min(fixed, o.resident)
	o.away = min(away, o.most-o.resident)
	o.extra = less(o.resident+o.away, o.promised)
	if o.unknown {
		o.unknown = false
		o.room = o.resident // and need, if it has a grant: see Plan
	}
	o.may = max(o.room, o.resident)
	o.given = min(o.given, o.may)
	o.reported = !o.active
	o.stalled = stuck && !o.active // what it cannot get in says nothing of what it can move out
	o.settle()
}

// Stall says that a client has not moved out for too long: others are tried
// before it. A report takes it back. It returns whether that changes anything.
func (r *Residency) Stall(id ClientID) bool {
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
	return true
}

// SetActive says whether a client has a grant: holds, drains, is lost or fenced.
func (r *Residency) SetActive(id ClientID, active bool) {
	o := r.clients[id]
	if o == nil || o.active == active {
		return
	}
	o.active = active
	if active {
		r.seq++
		o.seq = r.seq
		o.reported, o.stalled = false, false
	}
}

// Drop forgets a client: it is dead.
func (r *Residency) Drop(id ClientID) { delete(r.clients, id) }

// wants says whether room is to be made for what a client lacks.
func (o *occupant) wants() bool {
	return o.room < o.need() && (o.keep == Resident || o.keep == Swapped && o.active)
}

// victim says whether room can be taken from a client.
func (o *occupant) victim() bool { return o.keep == Swapped && !o.active && !o.unknown }

// used is an upper bound of what is on the GPU.
func (r *Residency) used() (sum uint64) {
	for _, o := range r.clients {
		sum = add(sum, o.may)
	}
	return sum
}

// inOrder returns all clients: those whose memory stays first, then who was
// granted before the others.
func (r *Residency) inOrder() []*occupant {
	r.order = r.order[:0]
	for _, o := range r.clients {
		r.order = append(r.order, o)
	}
	slices.SortFunc(r.order, func(a, b *occupant) int {
		if (a.keep == Resident) != (b.keep == Resident) {
			if a.keep == Resident {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.seq, b.seq)
	})
	return r.order
}

// Plan returns the rooms that change now. The slice is reused by the next Plan.
func (r *Residency) Plan() []Room {
	r.rooms = r.rooms[:0]
	order := r.inOrder()
	if !slices.ContainsFunc(order, func(o *occupant) bool { return o.unknown }) { // else nobody knows what is free
		r.place(order)
	}
	for _, o := range order {
		if o.room != o.told && o.keep != Managed && o.keep != Unmovable {
			r.rooms = append(r.rooms, Room{o.id, o.room, o.room < o.told && o.may > o.room})
			o.told = o.room
		}
	}
	return r.rooms
}

// place gives room to those who want it, and takes it from others.
func (r *Residency) place(order []*occupant) {
	if !slices.ContainsFunc(order, (*occupant).wants) && r.used() <= r.usable() {
		return
	}
	r.raise(order)
	var lacks, coming uint64
	for _, o := range order {
		if o.wants() {
			lacks = add(lacks, less(o.need(), max(o.room, o.may)))
		} else if o.victim() && !o.stalled {
			coming = add(coming, less(o.may, o.room))
		}
	}
	lacks = less(add(lacks, less(r.used(), r.usable())), coming) // what was forced has to go first
	for _, o := range r.victims(order, lacks) {
		if lacks == 0 {
			break
		}
		take := min(o.room-o.fixed, lacks)
		lacks -= take
		o.room -= take
		if o.reported {
			o.may = max(o.room, o.resident) // what it does not use is free at once
			o.given = min(o.given, o.may)
		}
	}
	r.raise(order)
	if lacks > 0 && coming == 0 {
		r.overdraw(order)
	}
}

// victims returns those from whom something can be taken, in the order in which it is
// to be.
func (r *Residency) victims(order []*occupant, lacks uint64) (all []*occupant) {
	if lacks == 0 {
		return nil
	}
	for _, o := range order {
		if o.victim() && !o.stalled && o.room > o.fixed {
			all = append(all, o)
		}
	}
	if r.Later != nil {
		slices.SortStableFunc(all, func(a, b *occupant) int {
			switch {
			case r.Later(a.id, b.id):
				return -1
			case r.Later(b.id, a.id):
				return 1
			}
			return 0
		})
	}
	return all
}

// raise gives free room to those who want it.
func (r *Residency) raise(order []*occupant) {
	free := less(r.usable(), r.used())
	for _, o := range order {
		if !o.wants() {
			continue
		}
		room := min(o.need(), add(max(o.may, o.room), free))
		if room <= o.room {
			continue
		}
		free -= less(room, o.may)
		o.given = max(o.given, min(room, add(o.given, less(room, o.may))))
		o.room, o.may = room, max(o.may, room)
	}
}

// overdraw gives a client that has a grant, and for which nobody can be moved out
// any more, the room that it needs: what was reserved by force does not fit, and
// the driver has the last word.
func (r *Residency) overdraw(order []*occupant) {
	var who *occupant
	for _, o := range order {
		switch {
		case o.wants() && o.active:
			who = o
		case o.active, o.victim() && (o.stalled || o.may > o.fixed):
			return // there is somebody to wait for
		}
	}
	if who != nil {
		who.room, who.may = who.need(), max(who.may, who.need())
	}
}

// Unplaceable says why a reservation can never be placed on the GPU.
type Unplaceable struct {
	Fixed    uint64 // cannot be moved
	Largest  uint64 // what else has to be on the GPU at a time
	Capacity uint64
}

func (e *Unplaceable) Error() string {
	return fmt.Sprintf("%d MiB that cannot be moved and the %d MiB of the largest tenant do not fit the %d MiB of the GPU",
		e.Fixed>>20, e.Largest>>20, e.Capacity>>20)
}

// Fits returns how much arena is needed in all, with each client's rounded up to a
// multiple of unit, if bytes are promised to a client: or an *Unplaceable. What
// clients were given already, which they keep, counts where it is more; given may
// be nil.
func (r *Residency) Fits(id ClientID, bytes, most, unit uint64, given func(ClientID) uint64) (arena uint64, err error) {
	if o := r.clients[id]; o != nil && o.keep != Managed {
		if bytes > r.capacity {
			return 0, &Unplaceable{Largest: bytes, Capacity: r.capacity}
		}
		promised, extra, was := o.promised, o.extra, o.most
		defer func() { o.promised, o.extra, o.most = promised, extra, was }()
		o.promised, o.most = bytes, min(most, r.capacity)
	}
	fixed, movable := r.sums()
	largest := uint64(0)
	groups := map[string]uint64{}
	for _, o := range r.clients {
		n := o.need() - o.pinned()
		if o.group != "" {
			groups[o.group] = add(groups[o.group], n)
			n = groups[o.group]
		}
		largest = max(largest, n)
	}
	if add(fixed, largest) > r.capacity {
		return 0, &Unplaceable{fixed, largest, r.capacity}
	}
	away := less(add(fixed, movable), r.capacity)
	for _, o := range r.clients {
		n := r.arena(o, away, unit)
		if given != nil {
			n = max(n, given(o.id))
		}
		arena = add(arena, n)
	}
	return arena, nil
}

// sums returns what cannot be moved of all that is promised, and what can.
func (r *Residency) sums() (fixed, movable uint64) {
	for _, o := range r.clients {
		fixed = add(fixed, o.pinned())
		movable = add(movable, o.need()-o.pinned())
	}
	return fixed, movable
}

// arena is how much host memory a client needs if so much of all is away.
func (r *Residency) arena(o *occupant, away, unit uint64) uint64 {
	if o.keep != Swapped || away == 0 {
		return 0
	}
	n := o.need() - o.pinned()
	if !o.allOut {
		n = min(n, add(away, max(r.MoveUnit, leastMoveUnit)))
	}
	return add(n, unit-1) / unit * unit
}

// ShortOfArena notes that what a client was given for what Arena says does not do: it
// moves more at a time. From now on Arena is all that it may ever have to move, if that
// fits: what others were promised comes first.
func (r *Residency) ShortOfArena(id ClientID, fits func() bool) {
	if o := r.clients[id]; o != nil && !o.allOut {
		o.allOut = true
		o.allOut = fits()
	}
}

// Arena returns how much host memory a client needs, so that what is promised now, or
// if so much more is, can be moved.
func (r *Residency) Arena(id ClientID, unit, more uint64) uint64 {
	o := r.clients[id]
	if o == nil {
		return 0
	}
	fixed, movable := r.sums()
	return r.arena(o, less(add(add(fixed, movable), more), r.capacity), unit)
}

// Promised returns what all clients need together.
func (r *Residency) Promised() uint64 {
	fixed, movable := r.sums()
	return add(fixed, movable)
}

// Stranded returns how much of what a client needs has no place on the GPU because it
// is taken by others' that cannot be moved: they made it so after it was promised.
func (r *Residency) Stranded(id ClientID) uint64 {
	o := r.clients[id]
	if o == nil || o.keep != Swapped {
		return 0
	}
	fixed, _ := r.sums()
	return less(add(o.need(), less(fixed, o.pinned())), r.capacity)
}

// Away says whether a client has to move before it can go on under a grant.
func (r *Residency) Away(id ClientID) bool {
	o := r.clients[id]
	return o != nil && o.away > 0
}

// Victims returns those that are to move out and have not, for somebody who waits.
func (r *Residency) Victims() (ids []ClientID) {
	if r.Lacking() == 0 && r.used() <= r.usable() {
		return nil
	}
	for _, o := range r.inOrder() {
		if o.unknown || o.victim() && o.may > o.room {
			ids = append(ids, o.id)
		}
	}
	return ids
}

// Lacking returns how much room those with a grant lack.
func (r *Residency) Lacking() (sum uint64) {
	for _, o := range r.clients {
		if o.wants() {
			sum = add(sum, o.need()-o.room)
		}
	}
	return sum
}

// Occupancy is what a client has of the GPU's memory, as it says.
type Occupancy struct {
	Client                          ClientID
	Keep                            Keep
	Promised, Resident, Fixed, Away uint64
	Room                            uint64
	Stalled                         bool // it does not move out as it should
	Lacks                           uint64
}

// Occupancy returns where a client stands; false: it is not known.
func (r *Residency) Occupancy(id ClientID) (Occupancy, bool) {
	o := r.clients[id]
	if o == nil {
		return Occupancy{}, false
	}
	oc := Occupancy{Client: id, Keep: o.keep, Promised: o.promised, Resident: o.resident, Fixed: o.fixed, Away: o.away, Room: o.room, Stalled: o.stalled}
	if o.wants() {
		oc.Lacks = o.need() - o.room
	}
	return oc, true
}

// IDs returns all clients, in order.
func (r *Residency) IDs() []ClientID { return slices.Sorted(maps.Keys(r.clients)) }

// Check returns an error that names a broken invariant, which is a bug in this
// package, or nil. It costs O(clients) and changes nothing.
func (r *Residency) Check() error {
	given := uint64(0)
	for id, o := range r.clients {
		switch {
		case o.id != id:
			return fmt.Errorf("client %d is recorded as %d", o.id, id)
		case o.fixed > o.resident:
			return fmt.Errorf("client %d: %d bytes are fixed, %d resident", id, o.fixed, o.resident)
		case !o.unknown && (o.may < o.room || o.may < o.resident):
			return fmt.Errorf("client %d: room %d, resident %d, at most %d", id, o.room, o.resident, o.may)
		case o.given > o.may:
			return fmt.Errorf("client %d: was given %d, has at most %d", id, o.given, o.may)
		}
		given = add(given, o.given)
	}
	if given > r.capacity {
		return fmt.Errorf("%d bytes of the GPU were given, it has %d", given, r.capacity)
	}
	return nil
}
