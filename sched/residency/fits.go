// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// What can be promised of a GPU's memory, and how much host memory that needs.

// Unplaceable says why a reservation can never be placed on the GPU.
type Unplaceable struct {
	Fixed    uint64 // cannot be moved
	Largest  uint64 // what else has to be on the GPU at a time
	Capacity uint64
	Headroom uint64 // left free beside that
}

func (e *Unplaceable) Error() string {
	s := fmt.Sprintf("%d MiB that cannot be moved and the %d MiB of the largest tenant do not fit the %d MiB of the GPU",
		e.Fixed>>20, e.Largest>>20, e.Capacity>>20)
	if e.Headroom != 0 {
		s += fmt.Sprintf(" that are left beside %d MiB for the driver (--swap-headroom)", e.Headroom>>20)
	}
	return s
}

// fits returns how much arena all clients need together if bytes are promised to
// a client: or an *Unplaceable. What clients were given already, which they keep,
// counts where it is more.
func (r *rooms) fits(id base.ClientID, bytes, most uint64) (arena uint64, err error) {
	if o := r.clients[id]; o != nil && o.keep != Managed {
		if bytes > r.physical {
			return 0, &Unplaceable{Largest: bytes, Capacity: r.physical}
		}
		promised, was := o.promised, o.most
		defer func() {
			o.promised, o.most = promised, was
			r.recount(o)
		}()
		o.promised, o.most = bytes, min(most, r.physical)
		r.recount(o)
	}
	if err := r.placeable(); err != nil {
		return 0, err
	}
	return r.arenaNeeded(), nil
}

// placeable returns an *Unplaceable if what is promised has no place on the GPU. Where more is promised than the GPU
// has, nobody has of the headroom: who has some is not asked to take turns with others, who may never give it back.
func (r *rooms) placeable() error {
	if r.promised() <= r.physical {
		return nil
	}
	largest := uint64(0)
	var groups map[string]uint64
	for _, o := range r.everybody() {
		n := o.counted.movable
		if o.group != "" {
			if groups == nil {
				groups = map[string]uint64{}
			}
			groups[o.group] += n
			n = groups[o.group]
		}
		largest = max(largest, n)
	}
	if r.sum.fixed+largest > r.capacity {
		return &Unplaceable{r.sum.fixed, largest, r.capacity, r.physical - r.capacity}
	}
	return nil
}

// arenaNeeded is how much host memory all clients need or have together.
func (r *rooms) arenaNeeded() (sum uint64) {
	if r.over() == 0 && r.suspended == 0 {
		return r.sum.arena
	}
	for _, o := range r.everybody() {
		sum += max(r.arenaOf(o), o.arena)
	}
	return sum
}

// arenaOf returns how much host memory a client needs, rounded up to a multiple of
// arenaUnit, so that what is promised can be moved.
func (r *rooms) arenaOf(o *occupant) uint64 {
	away := r.over()
	if o.keep != Swapped || away == 0 && !o.suspended {
		return 0
	}
	n := o.counted.movable
	if !o.allOut && !o.suspended {
		n = min(n, add(away, max(r.moveUnit, leastMoveUnit)))
	}
	unit := max(r.arenaUnit, 1)
	return (n + unit - 1) / unit * unit
}

// shortOfArena notes that the arena which a client was given does not do: the client
// moves more at a time. From now on its arena is to hold all that it may ever have to
// move, if that fits: what others were promised comes first.
func (r *rooms) shortOfArena(id base.ClientID, fits func() bool) {
	if o := r.clients[id]; o != nil && !o.allOut {
		o.allOut = true
		o.allOut = fits()
	}
}

// stranded returns how much of what a client needs has no place on the GPU because
// others' memory that cannot be moved is there: they made it so after it was promised.
func (r *rooms) stranded(id base.ClientID) uint64 {
	o := r.clients[id]
	if o == nil || o.keep != Swapped {
		return 0
	}
	return less(add(o.need(), r.sum.fixed-o.counted.fixed), r.whole())
}

// Arenas is the host memory of a node that holds what is away from its GPUs. The
// GPUs of the node share it. Some of what is away may be in files instead.
type Arenas struct {
	limit, reserve uint64
	needed         uint64 // by the clients of all GPUs
	host           Host
	lacked         uint64 // see Lacked
}

// Host is what the node has of host memory, bytes.
type Host struct {
	Used      uint64 // in arenas that clients have, or that are being made for them
	Filed     uint64 // of Used, what is in files and takes no host memory
	Return    uint64 // of Filed, the most that a process has: room is kept for it to come back
	Ready     uint64 // in arenas that were made in advance; clients can have them
	Free      uint64 // left, Ready included
	FreeKnown bool
	Failed    error // why the latest arena could not be made; nil: it could
}

// NewArenas returns arenas without bounds.
func NewArenas() Arenas { return Arenas{limit: ^uint64(0)} }

// Bound sets what arenas may take of the host's memory, and what they leave of it.
func (a *Arenas) Bound(limit, reserve uint64) { a.limit, a.reserve = limit, reserve }

// Observe tells what the node has now.
func (a *Arenas) Observe(h Host) { a.host = h }

// Fits says why more arena than the clients need now cannot be had; nil: it can.
func (a *Arenas) Fits(more uint64) error {
	_, err := a.check(a.needed + more)
	return err
}

// fits is check, for Lacked.
func (a *Arenas) fits(total uint64) error {
	lacks, err := a.check(total)
	a.lacked = max(a.lacked, lacks)
	return err
}

// Lacked returns how much host memory was lacking at most, where clients were refused since
// the latest call: with so much more each of them alone would not have been.
func (a *Arenas) Lacked() uint64 {
	n := a.lacked
	a.lacked = 0
	return n
}

// Refused says whether Lacked has anything to say.
func (a *Arenas) Refused() bool { return a.lacked != 0 }

// Left is how much more host memory clients may be promised, as far as that is known.
func (a *Arenas) Left() uint64 {
	h := &a.host
	needed := max(a.needed, h.Used)
	left := less(add(a.limit, h.Filed), add(needed, h.Return))
	if h.FreeKnown {
		left = min(left, less(less(h.Free, a.reserve), add(needed-h.Used, h.Return)))
	}
	return left
}

// Returns says why there is no host memory for n bytes that are in files to come back to
// it; nil: there is. The room that is kept is for that.
func (a *Arenas) Returns(n uint64) error {
	h := &a.host
	if in := less(max(a.needed, h.Used), less(h.Filed, n)); in > a.limit {
		return fmt.Errorf("it waits for %d MiB of host memory: what is away would take %d MiB then, and may take %d (--swap-memory)", n>>20, in>>20, a.limit>>20)
	}
	if h.FreeKnown && n > less(h.Free, a.reserve) {
		return fmt.Errorf("it waits for %d MiB of host memory, and %d MiB are left", n>>20, h.Free>>20)
	}
	return nil
}

// check says why clients cannot need so much in all, and how much is lacking.
func (a *Arenas) check(total uint64) (lacks uint64, err error) {
	h := &a.host
	if total <= h.Used {
		return 0, nil // it is there
	}
	if have, want := add(a.limit, h.Filed), add(total, h.Return); want > have {
		kept := ""
		if h.Filed != 0 {
			kept = fmt.Sprintf("; room for %d MiB is kept for what is in files to come back", h.Return>>20)
		}
		return want - have, fmt.Errorf("what is away then may take %d MiB of host memory, and there are %d MiB (--swap-memory), of which clients have %d%s",
			less(total, h.Filed)>>20, a.limit>>20, less(h.Used, h.Filed)>>20, kept)
	}
	more := total - h.Used
	if h.Failed != nil && more > h.Ready {
		return more - h.Ready, fmt.Errorf("host memory for what is away cannot be had: %w", h.Failed)
	}
	if room := less(h.Free, add(a.reserve, h.Return)); h.FreeKnown && more > room {
		return more - room, fmt.Errorf("what is away then may take %d MiB more of host memory, and %d MiB are left", more>>20, h.Free>>20)
	}
	return 0, nil
}

// Who makes room for whom.

// plan returns the rooms that change now. The slice is reused by the next plan.
func (r *rooms) plan() []Room {
	switch {
	case r.sum.unknown != 0: // nobody knows what is free
	case r.sum.wanting > 0 || r.sum.may > r.usable():
		r.place(r.inOrder())
	case r.sum.leaving > 0 && r.over() == 0:
		r.stay(r.everybody())
	}
	r.planned = r.planned[:0]
	slices.SortFunc(r.changed, byGrant)
	for _, o := range r.changed {
		o.listed = false
		if o.room == o.told || o.keep == Managed {
			continue
		}
		r.planned = append(r.planned, Room{o.id, o.room, o.room < o.told && o.may > o.room, o.tell()})
	}
	r.changed = r.changed[:0]
	return r.planned
}

// RoomSeqMax is what MOVED has bits for. 0 stands for a client that does not say.
const RoomSeqMax = 1<<12 - 1

// tell is for a room that the client's page is to say from now on, and returns its number.
func (o *occupant) tell() uint32 {
	o.told, o.seq = o.room, o.seq%RoomSeqMax+1
	return o.seq
}

// stay leaves clients what they have or may have, where all fits: memory of the driver, which was had while somebody
// left, or what was asked of them for a grant that has ended.
func (r *rooms) stay(all []*occupant) {
	for _, o := range all {
		if room := min(o.may, o.need()); o.keep == Swapped && !o.suspended && o.room < room {
			o.room = room
			r.recount(o)
		}
	}
}

// place gives room to those who want it, and takes it from others.
func (r *rooms) place(order []*occupant) {
	r.looked += 2 * uint64(len(order)) // it goes over them three times
	r.raise(order)
	var lacks, coming uint64
	for _, o := range order {
		if o.wants() {
			lacks = add(lacks, less(o.need(), max(o.room, o.may)))
		} else if o.victim() && !o.stalled {
			coming = add(coming, less(o.may, max(o.room, o.fixed)))
		}
	}
	lacks = less(add(lacks, less(r.sum.may, r.usable())), coming) // what was forced has to go first
	for _, o := range r.victimsOf(order, lacks) {
		if lacks == 0 {
			break
		}
		take := min(o.room-o.fixed, lacks)
		lacks -= take
		r.take(o, take)
	}
	r.raise(order)
	if lacks > 0 && coming == 0 {
		r.overdraw(order)
	}
}

// victimsOf returns those from whom something can be taken, in the order in which
// it is to be taken.
func (r *rooms) victimsOf(order []*occupant, lacks uint64) (all []*occupant) {
	if lacks == 0 {
		return nil
	}
	for _, o := range order {
		if o.yields() {
			all = append(all, o)
		}
	}
	r.looked += uint64(len(all))
	if r.later != nil {
		slices.SortStableFunc(all, func(a, b *occupant) int {
			switch {
			case r.later(a.id, b.id):
				return -1
			case r.later(b.id, a.id):
				return 1
			}
			return 0
		})
	}
	return all
}

// raise gives free room to those who want it.
func (r *rooms) raise(order []*occupant) {
	free := less(r.usable(), r.sum.may)
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
		r.recount(o)
	}
}

// overdraw gives a client that has a grant, and for which nobody can be moved out
// any more, the room that it needs: what was reserved by force does not fit, and
// the driver has the last word.
func (r *rooms) overdraw(order []*occupant) {
	var who *occupant
	for _, o := range order {
		switch {
		case o.wants() && o.active && (who == nil || o.group != "" && o.group == who.group):
			who = o
		case o.active, o.cut, o.victim() && (o.stalled || o.may > o.fixed):
			return // there is somebody to wait for
		}
	}
	if who != nil {
		who.room, who.may = who.need(), max(who.may, who.need())
		r.recount(who)
	}
}

// late returns those that are to move out and have not, for somebody who waits, or because they are suspended.
func (r *rooms) late() (all []*occupant) {
	waits := r.sum.wanting > 0 || r.sum.may > r.usable()
	if !waits && r.sum.leaving == 0 {
		return nil
	}
	for _, o := range r.inOrder() {
		if waits && o.unknown || o.victim() && o.may > max(o.room, o.fixed) {
			all = append(all, o)
		}
	}
	return all
}
