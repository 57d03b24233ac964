// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"
)

// What clients move, the rooms that they are told, and for how long they are waited for.

// movedMemory takes note of what a client says that it has moved.
func (c *GPU) movedMemory(ev Moved) {
	mem := &c.mem
	m, cl := mem.members[ev.Client], c.clients[ev.Client]
	if m == nil || cl == nil || mem.residency == nil {
		return
	}
	o := mem.residency.clients[m.id]
	wasStalled, old := o.stalled, m.report
	// A client that is stuck says so again and again, and gets on only where it moves something.
	getsOn := !ev.Stuck || !m.reported || ev.Report.In != old.In
	m.report, m.since = ev.Report, c.now
	if m.reported {
		mem.out.Bytes += less(ev.Report.Out, old.Out)
		mem.in.Bytes += less(ev.Report.In, old.In)
	} else { // what it has copied was before a restart
		m.reported, m.askedOut, m.fillIn = true, ev.Report.Out, ev.Report.In
		if n := min(ev.Report.Arena, add(o.promised, believedArena)); n > o.arena {
			c.do(ArenaFound{m.id, n})
		}
	}
	mem.residency.moved(m.id, ev.Report.Resident, ev.Report.Fixed, ev.Report.Away, ev.Stuck)
	if ev.Stuck && ev.NoMemory {
		mem.residency.refused(m.id)
		c.strand(m)
	}
	if ev.Stuck && ev.NoArena && ev.Report.Arena >= mem.residency.arenaOf(o, 0) {
		// An arena that it was given and has not made ready yet is no reason for more.
		mem.residency.shortOfArena(m.id, func() bool {
			return mem.arenas.fits(mem.residency.arenaNeeded()+mem.arenas.needed-mem.needed) == nil
		})
	}
	if m.asked && (o.resident <= o.room || o.resident <= o.fixed) {
		c.swapDone(m, false, less(ev.Report.Out, m.askedOut), c.now.Sub(m.askedAt))
		m.asked, m.stalled = false, false
	}
	switch {
	case ev.Ready:
		copied := less(ev.Report.In, m.fillIn)
		if m.filling {
			c.swapDone(m, true, copied, c.now.Sub(m.fillSince))
			m.filling = false
		}
		mem.residency.filled()
		c.isReady(cl, ev.Epoch, copied, true)
	case ev.Epoch != 0 && ev.Report.Away == 0:
		c.isReady(cl, ev.Epoch, 0, false) // nothing was away after all
	case ev.Epoch != 0:
		c.movesOn(cl, ev.Epoch, getsOn)
	default:
		for _, g := range c.moves { // it may have waited for just that
			g.move.at = c.now
		}
	}
	if wasStalled && !ev.Stuck {
		c.thereMayBeRoom()
	}
	c.lookWhatIsAway(m)
	c.memoryChanged()
}

func (c *GPU) swapDone(m *member, in bool, bytes uint64, took time.Duration) {
	if bytes == 0 {
		return
	}
	if in {
		c.mem.in.ended(bytes, took)
	} else {
		c.mem.out.ended(bytes, took)
	}
	c.do(SwapDone{m.id, in, bytes, took})
}

// strand is for a client that the driver has refused memory. If there is no place for it
// beside what others have made unmovable since (exported, registered), it is granted
// nothing before there is one: it would keep the GPU from others for nothing.
func (c *GPU) strand(m *member) {
	bytes := c.mem.residency.stranded(m.id)
	if bytes == 0 || m.stranded {
		return
	}
	m.stranded, m.retry = true, c.now.Add(strandedRetry)
	c.mem.stranded = append(c.mem.stranded, m)
	c.do(Stranded{m.id, bytes})
	c.setStranded(c.clients[m.id], true)
}

// place says that there may be a place for a client again.
func (c *GPU) place(m *member) {
	if cl := c.clients[m.id]; c.unstrand(m) && cl != nil {
		c.setStranded(cl, false)
	}
}

// unstrand is the part of place that concerns the member. It reports whether the
// member was stranded.
func (c *GPU) unstrand(m *member) bool {
	was := m.stranded
	if was {
		m.stranded = false
		c.mem.stranded = slices.DeleteFunc(c.mem.stranded, func(o *member) bool { return o == m })
		c.mem.unsettled = true
	}
	return was
}

// strandedMemory lets those go on that have a place again, or are to try.
func strandedMemory() policy {
	return policy{
		due:    func(c *GPU) (Time, bool) { return c.mem.due, c.mem.due != 0 },
		revoke: (*GPU).placeStranded,
	}
}

func (c *GPU) placeStranded() {
	for _, m := range slices.Clone(c.mem.stranded) {
		if c.now >= m.retry || c.mem.residency.stranded(m.id) == 0 {
			c.place(m)
		}
	}
}

// grantedMemory makes room for a client before its gate opens.
func (c *GPU) grantedMemory(g *grant) {
	m := c.mem.members[g.client.id]
	if m == nil || c.mem.residency == nil {
		return
	}
	m.filling, m.fillSince, m.fillIn = g.move.on, c.now, m.report.In
	c.tellRooms()
}

// releasedMemory is for a client whose grant has ended, after moving for so long.
func (c *GPU) releasedMemory(cl *client, moved time.Duration) {
	if c.mem.residency == nil {
		return
	}
	c.memoryActive(cl)
	if m := c.mem.members[cl.id]; m != nil && m.filling { // it did not get all in
		c.mem.in.Took += moved
		m.filling = false
	}
}

// memoryActive brings into line who has a grant.
func (c *GPU) memoryActive(cl *client) {
	if c.mem.residency != nil {
		c.mem.residency.setActive(cl.id, cl.grant != nil)
		c.mem.unsettled = true
	}
}

// tellRooms tells clients the rooms that have changed, and answers those that have
// waited for room.
func (c *GPU) tellRooms() {
	mem := &c.mem
	for _, room := range mem.residency.plan() {
		m := mem.members[room.Client]
		switch {
		case room.Less && !m.asked:
			m.asked, m.askedAt, m.since, m.askedOut = true, c.now, c.now, m.report.Out
		case !room.Less:
			m.asked, m.stalled = false, false
		}
		if mem.tellAgain == m {
			mem.tellAgain = nil
		}
		if cl := c.clients[room.Client]; cl != nil && cl.connected {
			c.do(room)
		}
	}
	mem.awaiting = slices.DeleteFunc(mem.awaiting, func(m *member) bool {
		if mem.residency.lacks(m.id) != 0 && c.now < m.until {
			return false
		}
		if cl := c.clients[m.id]; cl != nil && cl.connected {
			c.do(*m.answer)
		}
		m.answer = nil
		return true
	})
}

// settleMemory has rooms follow who has a grant and what clients have, passes over
// those that do not move, and says how much arena is needed. It runs at the end of
// each Step.
func (c *GPU) settleMemory() {
	mem := &c.mem
	if mem.residency == nil || !mem.unsettled && (mem.due == 0 || c.now < mem.due) {
		return
	}
	for {
		mem.unsettled = false
		c.tellRooms()
		if mem.due = c.memoryDue(); mem.due == 0 || mem.due > c.now {
			break
		}
		c.passOverStalled()
	}
	if m := mem.tellAgain; m != nil {
		mem.tellAgain = nil
		c.do(Room{m.id, mem.residency.clients[m.id].room, true})
	}
	if mem.resized {
		mem.resized = false
		c.wantArenas()
	}
}

// stallsAt is when a client that is to move out is passed over, or reported if it was
// passed over already.
func (c *GPU) stallsAt(m *member, o *occupant) Time {
	if o.stalled && !o.unknown {
		return m.since.Add(max(c.grace, c.mem.StallAfter))
	}
	return m.since.Add(c.mem.StallAfter)
}

// memoryDue is when something is to be done about memory; 0: never.
func (c *GPU) memoryDue() Time {
	var e earliest
	for _, m := range c.mem.awaiting {
		e.either(m.until, true)
	}
	for _, m := range c.mem.stranded {
		e.either(m.retry, true)
	}
	for _, o := range c.mem.residency.late() {
		if m := c.mem.members[o.id]; !m.stalled {
			e.either(c.stallsAt(m, o), true)
		}
	}
	return e.at
}

// passOverStalled passes over clients that do not move out, and reports them later.
func (c *GPU) passOverStalled() {
	for _, o := range c.mem.residency.late() {
		m := c.mem.members[o.id]
		switch {
		case m.stalled || c.now < c.stallsAt(m, o):
		case c.mem.residency.stall(o.id):
		default:
			m.stalled = true
			c.do(SwapStalled{o.id, less(o.resident, o.room)})
		}
	}
}

// wantArenas says what host memory clients need.
func (c *GPU) wantArenas() {
	mem := &c.mem
	r := mem.residency
	mem.arenas.needed -= mem.needed
	mem.needed = r.arenaNeeded()
	mem.arenas.needed += mem.needed
	// Where all that is reserved just fits, there is need for some soon, if it goes on
	// to grow.
	more, n := uint64(0), r.promised()
	if len(r.clients) > 1 && n > r.capacity/5*4 && n <= r.capacity {
		more = n / 4
	}
	if more == 0 && n <= r.capacity && mem.wanting == 0 && r.suspended == 0 {
		return // nobody needs any, and everybody knows
	}
	for _, o := range r.everybody() {
		m := mem.members[o.id]
		want := ArenaWanted{o.id, r.arenaOf(o, 0), 0}
		if want.Soon = want.Bytes; more != 0 {
			want.Soon = r.arenaOf(o, more)
		}
		if want != m.wanted && (m.wanted != ArenaWanted{} || want.Soon != 0) {
			mem.wants(m, want)
			c.do(want)
		}
	}
}

// wants notes what arena a client needs, as the caller is told.
func (m *memory) wants(c *member, want ArenaWanted) {
	if c.wanted.Soon != 0 {
		m.wanting--
	}
	if want.Soon != 0 {
		m.wanting++
	}
	c.wanted = want
}

func (c *GPU) arenaChanged(ev ArenaChanged) {
	if r := c.mem.residency; r != nil && r.clients[ev.Client] != nil {
		r.setArena(ev.Client, ev.Bytes)
		c.mem.unsettled, c.mem.resized = true, true
	}
}
