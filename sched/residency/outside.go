// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"maps"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// What others than clients seem to have of the GPU's memory: a desktop, a process without the shim, what the driver
// has for itself. It is known by what the driver refuses a client that moves in. The client's shim says so once, so the
// refusal is remembered until the client has all its memory, or its grant has ended. A client that has got nothing for a
// grace period is taken for refused, too: it may have said so before a restart. Where nobody without a grant has anything
// to leave, clients take turns.

const (
	// outsideFor is for how long others than clients are believed to have memory of a GPU, where all fits that is
	// promised: a program may have tried how much it gets.
	outsideFor = 10 * time.Second
	// fillsFor is for how long clients take turns at most for one that moves in, beside a second for each GiB that it
	// has moved: one that says for ever that it moves in keeps nobody from the GPU.
	fillsFor = 30 * time.Second
	// wordRests is after how long clients take turns again by the word of one tenant alone.
	wordRests = 90 * time.Second
)

// noteRefusal is for a client that says whether the driver has refused it memory, and whether it got some. While nobody
// has to make room, an allocation that the driver refuses is refused as without nvshare; else it is away, and moves in.
func (mem *Memory) noteRefusal(m *member, refused, got bool) {
	m.lacks = refused
	switch {
	case refused && (m.filling || !mem.still):
		if !m.filling && mem.rooms.clients[m.id].active {
			mem.beginFill(m)
		}
		mem.mayLack(m)
		if mem.rooms.clients[m.id].active { // else its word is no reason to go on with what was found
			mem.outsideUntil = mem.now.Add(outsideFor)
		}
		mem.rooms.refused(m.id)
		mem.strand(m)
	case got:
		m.refusedAt = mem.now
	}
}

// mayLack is for a client that has been refused memory, or may have been before a restart.
func (mem *Memory) mayLack(m *member) {
	m.refusedAt = mem.now
	if m.filling && !slices.Contains(mem.refusals, m) {
		mem.refusals = append(mem.refusals, m)
	}
}

// beginFill is for a client that moves in. If it said last that it was refused memory, it says nothing of that anew.
func (mem *Memory) beginFill(m *member) {
	m.filling, m.fillSince, m.fillIn = true, mem.now, m.report.In
	if m.lacks {
		mem.mayLack(m)
	}
}

// endFill is for a client that does not move in any more.
func (mem *Memory) endFill(m *member) {
	m.filling, m.crowds = false, false
	mem.refusals = slices.DeleteFunc(mem.refusals, func(o *member) bool { return o == m })
}

// Overfull says whether clients cannot all have their memory on the GPU: by what is promised, or because others than
// clients seem to have some. That is one client's word, which counts where it could not have its memory otherwise.
func (mem *Memory) Overfull() bool { return mem.rooms != nil && (mem.rooms.crosses(0) || mem.crowded) }

// LookOutside finds out whether clients have to take turns so that one gets its memory. Settle does so too: what it finds
// counts in the next Step, after the grace period at the latest.
func (mem *Memory) LookOutside() {
	if mem.rooms == nil {
		return
	}
	mem.rooms.outside = min(mem.rooms.outside, less(mem.rooms.physical, mem.rooms.sum.resident))
	mem.refusals = slices.DeleteFunc(mem.refusals, func(m *member) bool {
		if mem.now < m.refusedAt.Add(mem.grace) {
			return false
		}
		m.refusedAt, mem.unsettled = mem.now, true
		mem.rooms.refused(m.id)
		if !mem.rooms.hasRoom(m.id) && mem.now < m.believedUntil() {
			return false
		}
		m.crowds = false
		return true
	})
	mem.letTry()
	if len(mem.refusals) != 0 && mem.rooms.exhausted() {
		for _, m := range mem.refusals {
			if m.crowds = m.crowds || mem.believes(m.account); m.crowds {
				mem.said[m.account] = mem.now
				mem.crowd()
			}
		}
	}
	fills := func(m *member) bool { return m.crowds && mem.now < m.believedUntil() }
	if mem.crowded && mem.now >= mem.crowdedUntil && !slices.ContainsFunc(mem.refusals, fills) {
		for _, m := range mem.refusals {
			m.crowds = false
		}
		mem.crowded, mem.restsUntil = false, mem.now.Add(mem.now.Sub(mem.crowdedUntil)+outsideFor)
	}
	if at, ok := mem.outsideEnds(); ok && mem.now >= at {
		mem.rooms.outside, mem.resized, mem.unsettled = 0, true, true
	}
}

// letTry lets clients try to have what others than clients seem to have, where the driver has refused them nothing: it
// is others of whom that is known, whose word may not be true.
func (mem *Memory) letTry() {
	if mem.rooms.outside == 0 || mem.rooms.sum.lacks == 0 || mem.rooms.yields() {
		return
	}
	for _, o := range mem.rooms.everybody() {
		if o.active && o.counted.lacks != 0 && !mem.members[o.id].lacks {
			mem.rooms.outside, mem.resized, mem.unsettled = less(mem.rooms.outside, o.counted.lacks), true, true
		}
	}
}

// believedUntil is until when clients take turns for one that moves in.
func (m *member) believedUntil() base.Time {
	seconds := min(less(m.report.In, m.fillIn), m.promised) >> 30
	return m.fillSince.Add(fillsFor + time.Duration(seconds)*time.Second)
}

// crowd has clients take turns for a while.
func (mem *Memory) crowd() {
	if !mem.crowded {
		mem.crowded, mem.crowdedUntil, mem.unsettled = true, mem.now.Add(outsideFor), true
	}
}

// believes says whether clients take turns by a tenant's word. Others pay if it is not true, so that of one tenant alone
// counts only now and then, and those of several count again after as long as turns lasted. Where all tenants say so, as
// one that has the GPU alone, nobody else pays.
func (mem *Memory) believes(account string) bool {
	maps.DeleteFunc(mem.said, func(_ string, at base.Time) bool { return mem.now >= at.Add(wordRests) })
	_, said := mem.said[account]
	alone := said && len(mem.said) == 1
	if !alone && (mem.crowded && mem.now < mem.crowdedUntil || !mem.crowded && mem.now >= mem.restsUntil) {
		return true
	}
	mem.looked += uint64(len(mem.members))
	for _, m := range mem.members {
		if _, said := mem.said[m.account]; !said && m.account != account {
			return false
		}
	}
	return true
}

// outsideEnds returns when it is tried again whether others than clients have memory; false: that is not due.
func (mem *Memory) outsideEnds() (base.Time, bool) {
	return mem.outsideUntil, mem.rooms.outside != 0 && len(mem.refusals) == 0 && !mem.rooms.crosses(0)
}

// outsideDue returns when LookOutside has something to do.
func (mem *Memory) outsideDue() (base.Time, bool) {
	var e base.Earliest
	for _, m := range mem.refusals {
		e.Either(m.refusedAt.Add(mem.grace), mem.rooms.hasRoom(m.id) || mem.rooms.mayHave(m.id) && (!m.crowds || mem.rooms.yields()))
		e.Either(m.believedUntil(), mem.crowded && m.crowds && mem.now < m.believedUntil())
	}
	e.Either(mem.crowdedUntil, mem.crowded && mem.now < mem.crowdedUntil)
	e.Either(mem.outsideEnds())
	return e.At, e.OK
}

// refused says that the driver had no memory for a client with a grant although the client had
// room: others than clients have some of the GPU, as much as clients have not. Without a grant its word
// is no reason for others to make room.
func (r *rooms) refused(id base.ClientID) {
	if r.mayHave(id) {
		r.outside = max(r.outside, less(r.physical, r.sum.resident))
	}
}

// mayHave says whether a client is known to have less than it may have, and somebody could make room for it.
func (r *rooms) mayHave(id base.ClientID) bool {
	o := r.clients[id]
	return o != nil && o.active && !o.unknown && o.resident < o.room && r.sum.movable > o.counted.movable
}

// hasRoom says whether a client has all that it may have: if that is not all its memory, the driver is not to blame.
func (r *rooms) hasRoom(id base.ClientID) bool {
	o := r.clients[id]
	return o == nil || o.resident >= o.room
}

// filled says that a client got all its memory. What others seemed to have may be
// less, so that is tried again, little by little.
func (r *rooms) filled() {
	r.outside = min(r.outside-(r.outside+7)/8, less(r.physical, r.sum.resident))
}

// exhausted says whether room is lacking because of others than clients, and nobody without a grant has any to give.
func (r *rooms) exhausted() bool {
	return r.outside != 0 && (r.sum.wanting != 0 || r.sum.may > r.usable()) && !r.yields()
}

// yields says whether anybody has room to give, or gives some.
func (r *rooms) yields() bool {
	return slices.ContainsFunc(r.everybody(), func(o *occupant) bool { return o.victim() && !o.stalled && max(o.room, o.may) > o.fixed })
}
