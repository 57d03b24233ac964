// SPDX-License-Identifier: Apache-2.0

package residency

import "github.com/nvshare/nvshare/sched/base"

// What a Reserve is answered, and when.

// fits says why a client cannot be promised so much; nil: it can.
func (mem *Memory) fits(m *member, total uint64) error {
	arena, err := mem.rooms.fits(m.id, total, mem.believed(m))
	if err != nil {
		return err
	}
	return mem.arenas.fits(arena + mem.arenas.needed - mem.needed)
}

// AsksHost says whether what an event does may depend on how much host memory there
// is: then Arenas.Observe comes before it.
func (v View) AsksHost(ev base.Event) bool {
	mem := v.mem
	if mem.rooms == nil {
		return false
	}
	switch ev := ev.(type) {
	case Reserve:
		m := mem.members[ev.Client]
		return m != nil && ev.Total > m.promised && add(mem.rooms.promised(), ev.Total-m.promised) > mem.rooms.capacity
	case Moved:
		return ev.NoArena
	case SetTenantMemory:
		return v.Unplaced()
	}
	return false
}

// Unplaced says whether something was forced and had no place.
func (v View) Unplaced() bool {
	return v.mem.rooms != nil && v.mem.rooms.promised() < v.mem.ledger.total()
}

// Reserve answers a Reserve, at once or when there is room.
func (mem *Memory) Reserve(ev Reserve) {
	m := mem.members[ev.Client]
	if m == nil || !mem.turns.Connected(m.id) {
		return
	}
	before := mem.ledger.reservedBy(m.account, m.id)
	total, why := mem.placeable(m, ev, before.Total)
	answer := Reserved{Client: m.id, Serial: ev.Serial, Asked: ev.Total, Why: why}
	after := before
	if why != nil {
		mem.refused++
		answer.Refused = NoPlace
	} else {
		var ok bool
		after, ok = mem.ledger.reserve(m.account, m.id, total, min(ev.Least, total), ev.Force)
		if !ok {
			answer.Refused, answer.Asked = OverLimit, ev.Least
			if mem.cfg.Ceiling != 0 && (after.Limit == 0 || after.Limit > mem.cfg.Ceiling) && mem.rooms == nil {
				answer.Refused = OverCeiling
			}
		}
		if mem.rooms != nil {
			mem.promise(m, !ev.Force)
		}
	}
	if after.Used != before.Used {
		mem.do(LimitsChanged{m.account})
	}
	mem.changed()
	answer.Stands = View{mem}.Standing(m.account, m.id)
	if mem.rooms != nil {
		if answer.Refused == NotRefused && ev.Force {
			mem.rooms.force(m.id)
		}
		mem.tellRooms() // the room is there when the answer comes
		if answer.Refused == NotRefused && mem.awaitsRoom(m, &answer) {
			return
		}
	}
	mem.do(answer)
}

// placeable returns how much of a reservation there is a place for, on the GPU or in
// host memory: all, the least that is of use, or none, with an error.
func (mem *Memory) placeable(m *member, ev Reserve, has uint64) (total uint64, why error) {
	if mem.rooms == nil || ev.Force || ev.Total <= has {
		return ev.Total, nil
	}
	if why = mem.fits(m, ev.Total); why == nil {
		return ev.Total, nil
	}
	if ev.Least < ev.Total && mem.fits(m, ev.Least) == nil {
		return ev.Least, nil
	}
	return 0, why
}

// awaitsRoom keeps the answer of a client whose memory never moves until others have
// made room, and reports whether it does.
func (mem *Memory) awaitsRoom(m *member, answer *Reserved) bool {
	if m.answer != nil || mem.rooms.clients[m.id].keep != Resident || mem.rooms.lacks(m.id) == 0 {
		return false
	}
	m.answer, m.until = answer, mem.now.Add(maxRoomWait)
	mem.awaiting = append(mem.awaiting, m)
	return true
}

// KeepFits says why the memory of a tenant's clients cannot be kept in a way; nil: it
// can.
func (v View) KeepFits(tenant string, keep Keep) error {
	r := v.mem.rooms
	if r == nil || keep != Resident {
		return nil
	}
	var kept []*occupant
	for _, m := range v.mem.membersOf(tenant) {
		if o := r.clients[m.id]; o.keep == Swapped {
			o.keep = Resident
			r.recount(o)
			kept = append(kept, o)
		}
	}
	err := r.placeable()
	for _, o := range kept {
		o.keep = Swapped
		r.recount(o)
	}
	return err
}
