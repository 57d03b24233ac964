// SPDX-License-Identifier: Apache-2.0

package sched

// What a Reserve is answered, and when.

// fits says why a client cannot be promised so much; nil: it can.
func (c *GPU) fits(m *member, total uint64) error {
	mem := &c.mem
	arena, err := mem.residency.fits(m.id, total, mem.believed(m))
	if err != nil {
		return err
	}
	return mem.arenas.fits(arena + mem.arenas.needed - mem.needed)
}

// AsksHost says whether what an event does may depend on how much host memory there
// is: then Arenas.Observe comes before its Step.
func (c *GPU) AsksHost(ev Event) bool {
	mem := &c.mem
	if mem.residency == nil {
		return false
	}
	switch ev := ev.(type) {
	case Reserve:
		m := mem.members[ev.Client]
		return m != nil && ev.Total > m.promised && add(mem.residency.promised(), ev.Total-m.promised) > mem.residency.capacity
	case Moved:
		return ev.NoArena
	case Attach, SetTenantMemory, SetShare:
		return mem.residency.promised() < mem.ledger.total() // something was forced and had no place
	}
	return false
}

// reserveMemory answers a Reserve, at once or when there is room.
func (c *GPU) reserveMemory(ev Reserve) {
	mem := &c.mem
	m, cl := mem.members[ev.Client], c.clients[ev.Client]
	if m == nil || cl == nil || !cl.connected {
		return
	}
	before := mem.ledger.reservedBy(m.account, m.id)
	total, why := c.placeable(m, ev, before.Total)
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
			if mem.Ceiling != 0 && (after.Limit == 0 || after.Limit > mem.Ceiling) && mem.residency == nil {
				answer.Refused = OverCeiling
			}
		}
		if mem.residency != nil {
			c.promise(m, !ev.Force)
		}
	}
	if after.Used != before.Used {
		c.do(LimitsChanged{m.account})
	}
	c.memoryChanged()
	answer.Stands = c.Standing(m.account, m.id)
	if mem.residency != nil {
		if answer.Refused == NotRefused && ev.Force {
			mem.residency.force(m.id)
		}
		c.tellRooms() // the room is there when the answer comes
		if answer.Refused == NotRefused && c.awaitsRoom(m, &answer) {
			return
		}
	}
	c.do(answer)
}

// placeable returns how much of a reservation there is a place for, on the GPU or in
// host memory: all, the least that is of use, or none, with an error.
func (c *GPU) placeable(m *member, ev Reserve, has uint64) (total uint64, why error) {
	if c.mem.residency == nil || ev.Force || ev.Total <= has {
		return ev.Total, nil
	}
	if why = c.fits(m, ev.Total); why == nil {
		return ev.Total, nil
	}
	if ev.Least < ev.Total && c.fits(m, ev.Least) == nil {
		return ev.Least, nil
	}
	return 0, why
}

// awaitsRoom keeps the answer of a client whose memory never moves until others have
// made room, and reports whether it does.
func (c *GPU) awaitsRoom(m *member, answer *Reserved) bool {
	mem := &c.mem
	if m.answer != nil || mem.residency.clients[m.id].keep != Resident || mem.residency.lacks(m.id) == 0 {
		return false
	}
	m.answer, m.until = answer, c.now.Add(maxRoomWait)
	mem.awaiting = append(mem.awaiting, m)
	return true
}

// KeepFits says why the memory of a tenant's clients cannot be kept in a way; nil: it
// can.
func (c *GPU) KeepFits(tenant string, keep Keep) error {
	r := c.mem.residency
	if r == nil || keep != Resident {
		return nil
	}
	var kept []*occupant
	for _, m := range c.membersOf(tenant) {
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
