// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// What clients move, the rooms that they are told, and for how long they are waited for.

// Moved takes note of what a client says that it has moved.
func (mem *Memory) Moved(ev Moved) {
	m := mem.members[ev.Client]
	if m == nil || mem.rooms == nil || !mem.turns.Known(m.id) {
		return
	}
	o := mem.rooms.clients[m.id]
	wasStalled, old := o.stalled, m.report
	// A client that is stuck says so again and again, and gets on only where it moves something.
	getsOn := !ev.Stuck || !m.reported || ev.Report.In != old.In
	m.report, m.since = ev.Report, mem.now
	m.goesOnAfterStop(ev)
	if m.reported {
		mem.out.Bytes += less(ev.Report.Out, old.Out)
		mem.in.Bytes += less(ev.Report.In, old.In)
		if ev.Report.Resident < old.Resident {
			m.stalls = 0
		}
	} else { // what it has copied was before a restart
		m.reported, m.askedOut, m.fillIn = true, ev.Report.Out, ev.Report.In
		if n := min(ev.Report.Arena, add(o.promised, believedArena)); n > o.arena {
			mem.do(ArenaFound{m.id, n})
		}
	}
	mem.rooms.moved(m.id, ev.Report.Resident, ev.Report.Fixed, ev.Report.Away, ev.Seen, ev.Stuck)
	mem.noteRefusal(m, ev.Stuck && ev.NoMemory, ev.Report.In != old.In)
	if ev.Stuck && ev.NoArena && ev.Report.Arena >= mem.rooms.arenaOf(o) {
		// An arena that it was given and has not made ready yet is no reason for more.
		mem.rooms.shortOfArena(m.id, func() bool {
			return mem.arenas.fits(mem.rooms.arenaNeeded()+mem.arenas.needed-mem.needed) == nil
		})
	}
	if m.asked && o.knows(ev.Seen) && (o.resident <= o.room || o.resident <= o.fixed) {
		mem.swapDone(m, false, less(ev.Report.Out, m.askedOut), mem.now.Sub(m.askedAt))
		m.asked, m.stalled, m.stalls = false, false, 0
	}
	switch {
	case ev.Ready:
		copied := less(ev.Report.In, m.fillIn)
		if m.filling {
			mem.swapDone(m, true, copied, mem.now.Sub(m.fillSince))
			mem.endFill(m)
		}
		if len(mem.refusals) == 0 {
			mem.rooms.filled()
		}
		mem.turns.Ready(m.id, ev.Epoch, copied, true)
	case ev.Epoch != 0 && ev.Report.Away == 0:
		mem.endFill(m)
		mem.turns.Ready(m.id, ev.Epoch, 0, false) // nothing was away after all
	case ev.Epoch != 0:
		mem.turns.MovesOn(m.id, ev.Epoch, getsOn)
	default:
		mem.turns.MovedOut()
	}
	if wasStalled && !ev.Stuck {
		mem.turns.MayBeRoom()
	}
	mem.lookWhatIsAway(m)
	mem.changed()
}

// goesOnAfterStop forgets that a client did not move while it was silent, as a stopped process is, when it goes on.
func (m *member) goesOnAfterStop(ev Moved) {
	switch {
	case ev.Epoch == 0:
		m.cannot = ev.Stuck
	case !m.cannot && (ev.Ready || !ev.Stuck):
		m.stalls = 0
	}
}

func (mem *Memory) swapDone(m *member, in bool, bytes uint64, took time.Duration) {
	if bytes == 0 {
		return
	}
	if in {
		mem.in.ended(bytes, took)
	} else {
		mem.out.ended(bytes, took)
	}
	mem.do(SwapDone{m.id, in, bytes, took})
}

// strand is for a client that the driver has refused memory. If there is no place for it
// beside what others have made unmovable since (exported, registered), it is granted
// nothing before there is one: it would keep the GPU from others for nothing.
func (mem *Memory) strand(m *member) {
	bytes := mem.rooms.stranded(m.id)
	if bytes == 0 || m.stranded {
		return
	}
	m.retry = mem.now.Add(strandedRetry)
	mem.do(Stranded{m.id, bytes})
	mem.putAside(m)
}

// putAside has a client be granted nothing before place.
func (mem *Memory) putAside(m *member) {
	m.stranded = true
	mem.stranded = append(mem.stranded, m)
	mem.turns.SetStranded(m.id, true)
}

// PutBehind has clients be granted nothing that need room which others keep until work of theirs has ended that
// was cut: with a grant they would keep the GPU from that work, for nothing.
func (mem *Memory) PutBehind() {
	if mem.rooms == nil || mem.rooms.sum.unfinished == 0 || mem.rooms.over() == 0 {
		return
	}
	for _, o := range mem.rooms.everybody() {
		if m := mem.members[o.id]; !m.stranded && mem.turns.Known(m.id) && mem.rooms.behind(o) {
			m.behind = true
			mem.putAside(m)
		}
	}
}

// Behind returns those that PutBehind put aside, in no order.
func (mem *Memory) Behind() (ids []base.ClientID) {
	for _, m := range mem.stranded {
		if m.behind {
			ids = append(ids, m.id)
		}
	}
	return ids
}

// place says that there may be a place for a client again.
func (mem *Memory) place(m *member) {
	if mem.unstrand(m) && mem.turns.Known(m.id) {
		mem.turns.SetStranded(m.id, false)
	}
}

// unstrand is the part of place that concerns the member. It reports whether the
// member was stranded.
func (mem *Memory) unstrand(m *member) bool {
	was := m.stranded
	if was {
		m.stranded, m.behind = false, false
		mem.stranded = slices.DeleteFunc(mem.stranded, func(o *member) bool { return o == m })
		mem.unsettled = true
	}
	return was
}

// Due returns when Settle or PlaceStranded has something to do; false: never.
func (mem *Memory) Due() (base.Time, bool) { return mem.due, mem.due != 0 }

// PlaceStranded lets those go on that have a place again, or are to try.
func (mem *Memory) PlaceStranded() {
	for _, m := range slices.Clone(mem.stranded) {
		switch {
		case m.behind && mem.rooms.behind(mem.rooms.clients[m.id]):
		case m.behind || mem.now >= m.retry || mem.rooms.stranded(m.id) == 0:
			mem.place(m)
		}
	}
}

// Granted makes room for a client before its gate opens. Moves: it moves in first.
func (mem *Memory) Granted(id base.ClientID, moves bool) {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return
	}
	mem.endFill(m)
	if moves {
		mem.beginFill(m)
	}
	mem.tellRooms()
}

// Released is for a client whose grant has ended, after moving for so long.
func (mem *Memory) Released(id base.ClientID, moved time.Duration) {
	if mem.rooms == nil {
		return
	}
	mem.SetActive(id, false)
	if m := mem.members[id]; m != nil && m.filling { // it did not get all in
		mem.in.Took += moved
		mem.endFill(m)
	}
}

// SetActive says whether a client has a grant, of whatever state.
func (mem *Memory) SetActive(id base.ClientID, active bool) {
	if mem.rooms != nil {
		mem.rooms.setActive(id, active)
		mem.unsettled = true
	}
}

const (
	// stillAfter is for how long all memory has to fit before clients are told so: programs free and
	// allocate all the time.
	stillAfter = time.Second
	// mostCut is for how long a client may have its work cut again and again. After that it is asked for room as
	// if it was not: one that says so for ever keeps nobody from the GPU's memory.
	mostCut = time.Minute
)

// SetCut says whether a client's grant ends with work left, which is off the GPU. It comes before Released.
func (mem *Memory) SetCut(id base.ClientID, cut bool) {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return
	}
	m.mayCut = cut
	switch {
	case !cut || mem.still:
		m.cutSince = 0
	case m.cutSince == 0:
		m.cutSince = mem.now
	}
	cut = cut && (m.cutSince == 0 || mem.now < m.cutSince.Add(mostCut))
	if mem.rooms.setCut(id, cut); cut {
		mem.place(m) // that work can go on
	}
	mem.unsettled = true
}

// tellStill says whether nobody has to make room. That somebody has to comes before all that
// follows from it. Nobody is waited for: whose drain is cut meanwhile says so when it releases.
func (mem *Memory) tellStill(on bool) {
	if !on {
		mem.stillFrom = 0
	}
	if mem.still == on {
		return
	}
	mem.still = on
	mem.do(Still{on})
	for id, m := range mem.members {
		m.stalls = 0
		if m.cutSince = 0; !on && mem.rooms.clients[id].cut {
			m.cutSince = mem.now
		}
	}
}

// withWork returns those, in order, whose work was cut and that somebody may wait for, now or later: also one that
// has nothing to move yet, for its time passes too.
func (mem *Memory) withWork() (all []*member) {
	if mem.still {
		return nil
	}
	for _, o := range mem.rooms.everybody() {
		if m := mem.members[o.id]; o.cut && m.cutSince != 0 {
			all = append(all, m)
		}
	}
	return all
}

// endCuts has those make room as any other whose work was cut for too long: some cannot go on, as a rank of a gang
// that does not come.
func (mem *Memory) endCuts() {
	for _, m := range mem.withWork() {
		if mem.now >= m.cutSince.Add(mostCut) {
			mem.rooms.setCut(m.id, false)
			mem.unsettled = true
		}
	}
}

// settleStill tells clients that nobody has to make room, once that has been so for long enough.
func (mem *Memory) settleStill() {
	switch {
	case mem.still:
	case !mem.rooms.still():
		mem.stillFrom = 0
	case mem.stillFrom == 0:
		mem.stillFrom = mem.now.Add(stillAfter)
	case mem.now >= mem.stillFrom:
		mem.tellStill(true)
	}
}

// tellRooms tells clients the rooms that have changed, and answers those that have
// waited for room.
func (mem *Memory) tellRooms() {
	if !mem.rooms.still() {
		mem.tellStill(false)
	}
	for _, room := range mem.rooms.plan() {
		m := mem.members[room.Client]
		switch {
		case room.Less && !m.asked:
			m.asked, m.askedAt, m.since, m.askedOut = true, mem.now, mem.now, m.report.Out
		case !room.Less:
			m.asked, m.stalled = false, false
		}
		if mem.tellAgain == m {
			mem.tellAgain = nil
		}
		if mem.turns.Connected(room.Client) {
			mem.do(room)
		}
	}
	mem.awaiting = slices.DeleteFunc(mem.awaiting, func(m *member) bool {
		if mem.rooms.lacks(m.id) != 0 && mem.now < m.until {
			return false
		}
		if mem.turns.Connected(m.id) {
			mem.do(*m.answer)
		}
		m.answer = nil
		return true
	})
}

// Settle has rooms follow who has a grant and what clients have, passes over
// those that do not move, and says how much arena is needed. It runs at the end of
// each Step.
func (mem *Memory) Settle() {
	if mem.rooms == nil || !mem.unsettled && (mem.due == 0 || mem.now < mem.due) {
		return
	}
	for again := true; again; { // it ends, whatever is due: each turn passes somebody over
		mem.unsettled = false
		mem.tellRooms()
		mem.LookOutside()
		mem.settleStill()
		mem.due = mem.nextDue()
		again = mem.due != 0 && mem.due <= mem.now && mem.passOverStalled()
	}
	if m := mem.tellAgain; m != nil {
		mem.tellAgain = nil
		o := mem.rooms.clients[m.id]
		mem.do(Room{m.id, o.room, true, o.tell()})
	}
	if mem.resized {
		mem.resized = false
		mem.wantArenas()
	}
}

// stallsAt is when a client that is to move out is passed over, or reported if it was
// passed over already.
func (mem *Memory) stallsAt(m *member, o *occupant) base.Time {
	if o.stalled && !o.unknown {
		return m.since.Add(max(mem.grace, mem.cfg.StallAfter))
	}
	return m.since.Add(mem.cfg.StallAfter)
}

// nextDue is when something is to be done about memory; 0: never.
func (mem *Memory) nextDue() base.Time {
	var e base.Earliest
	for _, m := range mem.awaiting {
		e.Either(m.until, true)
	}
	for _, m := range mem.stranded {
		e.Either(m.retry, !m.behind)
	}
	e.Either(mem.stillFrom, !mem.still && mem.stillFrom != 0)
	e.Either(mem.outsideDue())
	for _, m := range mem.withWork() {
		e.Either(m.cutSince.Add(mostCut), true)
	}
	for _, o := range mem.rooms.late() {
		if m := mem.members[o.id]; !m.stalled {
			e.Either(mem.stallsAt(m, o), true)
		}
	}
	return e.At
}

// passOverStalled passes over clients that do not move out, and reports them later. It reports whether there was one.
func (mem *Memory) passOverStalled() (some bool) {
	for _, o := range mem.rooms.late() {
		m := mem.members[o.id]
		if m.stalled || mem.now < mem.stallsAt(m, o) {
			continue
		}
		if some = true; !mem.rooms.stall(o.id) {
			m.stalled = true
			m.stalls++
			mem.do(SwapStalled{o.id, less(o.resident, o.room)})
		}
	}
	return some
}

// wantArenas says what host memory clients need.
func (mem *Memory) wantArenas() {
	r := mem.rooms
	mem.arenas.needed -= mem.needed
	mem.needed = r.arenaNeeded()
	mem.arenas.needed += mem.needed
	if r.over() == 0 && mem.wanting == 0 && r.suspended == 0 {
		return // nobody needs any, and everybody knows
	}
	for _, o := range r.everybody() {
		m := mem.members[o.id]
		want := ArenaWanted{o.id, r.arenaOf(o)}
		if want.Bytes != m.wanted.Bytes {
			mem.wants(m, want)
			mem.do(want)
		}
	}
}

// wants notes what arena a client needs, as the caller is told.
func (mem *Memory) wants(m *member, want ArenaWanted) {
	if m.wanted.Bytes != 0 {
		mem.wanting--
	}
	if want.Bytes != 0 {
		mem.wanting++
	}
	m.wanted = want
}

// ArenaChanged takes note of how much host memory a client has.
func (mem *Memory) ArenaChanged(ev ArenaChanged) {
	if r := mem.rooms; r != nil && r.clients[ev.Client] != nil {
		r.setArena(ev.Client, ev.Bytes)
		mem.unsettled, mem.resized = true, true
	}
}
