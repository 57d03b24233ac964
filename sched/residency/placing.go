// SPDX-License-Identifier: Apache-2.0

package residency

import "slices"

// Who makes room for whom.

// plan returns the rooms that change now. The slice is reused by the next plan.
func (r *rooms) plan() []Room {
	if r.sum.unknown == 0 && (r.sum.wanting > 0 || r.sum.may > r.usable()) {
		r.place(r.inOrder()) // while one is unknown nobody knows what is free
	}
	r.planned = r.planned[:0]
	slices.SortFunc(r.changed, byGrant)
	for _, o := range r.changed {
		o.listed = false
		if o.room == o.told || o.keep == Managed {
			continue
		}
		r.planned = append(r.planned, Room{Client: o.id, Bytes: o.room, Less: o.room < o.told && o.may > o.room})
		o.told = o.room
	}
	r.changed = r.changed[:0]
	return r.planned
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
			coming = add(coming, less(o.may, o.room))
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
		if o.victim() && !o.stalled && o.room > o.fixed {
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
		case o.active, o.victim() && (o.stalled || o.may > o.fixed):
			return // there is somebody to wait for
		}
	}
	if who != nil {
		who.room, who.may = who.need(), max(who.may, who.need())
		r.recount(who)
	}
}

// late returns those that are to move out and have not, for somebody who waits.
func (r *rooms) late() (all []*occupant) {
	if r.sum.wanting == 0 && r.sum.may <= r.usable() {
		return nil
	}
	for _, o := range r.inOrder() {
		if o.unknown || o.victim() && o.may > o.room {
			all = append(all, o)
		}
	}
	return all
}
