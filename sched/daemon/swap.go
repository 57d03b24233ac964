// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/wire"
)

// Where more memory is promised than a GPU has, clients move theirs out and in, and
// the scheduler says how much of it may be on the GPU: its room. Package sched
// decides (Residency); this carries it out, between steps of the core:
//
//   - who has a grant gets room, before the gate opens or with the answer to RESERVE;
//   - who has to make room is told (page, then ROOM), and says what it has moved
//     (MOVED); what came free goes to who waits for it, piece by piece;
//   - who does not move is passed over after stallAfter, and reported after the
//     grace period.

// stallAfter is how long a client may take for a piece before others are asked to
// make room in its place.
const stallAfter = time.Second

// DefaultHeadroom is a thirty-second of the GPU's memory: on one of 141 GiB enough for
// the contexts of eight processes.
const DefaultHeadroom = -1

// swap is what a GPU has where memory is swapped.
type swap struct {
	arenas    *arena.GPU
	residency *sched.Residency
	members   map[sched.ClientID]*clientMemory
	unsettled bool // who has a grant, or what clients have, has changed
	settling  bool
	promised  uint64     // as the core was told
	due       sched.Time // of lookAtVictims; 0: never
	out, in   direction
	refused   uint64
}

// direction is what was moved one way.
type direction struct {
	bytes, times, rate uint64
	took               time.Duration
}

// took notes that a move has ended.
func (m *direction) ended(bytes uint64, took time.Duration) {
	m.times++
	m.took += took
	if took > 0 {
		m.rate = uint64(float64(bytes) / took.Seconds())
	}
}

// clientMemory is what one client of the GPU has, over its connections. It ends
// with the process, or its program.
type clientMemory struct {
	client   *client
	moved    wire.Moved // the latest report
	told     bool       // there was one
	away     bool       // as the core knows
	promised uint64     // reserved, as far as there is a place for it
	since    sched.Time // of the latest report, or of being asked

	asked    sched.Time  // to make room; 0: it has done so
	askedOut uint64      // moved.Out then
	stalled  bool        // and it was reported
	answer   *wire.Frame // to RESERVE, which waits for room
	until    sched.Time  // but no longer

	stranded sched.Time // there is no place for it, and it is tried again then; 0: not so

	granted   sched.Time // and is on its way in; 0: not
	grantedIn uint64

	arena *arena.Client
}

// prepare has host memory made for the clients of a GPU.
func (s *swap) prepare() {
	if s != nil {
		s.arenas.Prepare()
	}
}

// openSwap is addGPU's part.
func (d *Daemon) openSwap(g *gpu, physical uint64) {
	if d.opts.SwapMemory == 0 {
		return
	}
	if physical == 0 { // with room for nothing, everything would be refused
		d.log.Warnf("GPU %d: nothing is swapped, because NVML does not tell how much memory it has: --gpu-memory does", g.Index)
		return
	}
	headroom := uint64(d.opts.SwapHeadroom)
	if d.opts.SwapHeadroom == DefaultHeadroom {
		headroom = physical / 32
	}
	capacity := min(physical-min(physical, headroom), g.MemoryBytes)
	g.swap = &swap{residency: sched.NewResidency(capacity), members: map[sched.ClientID]*clientMemory{}}
	node := arena.NUMANode(d.sysfs, g.PCIBusID)
	g.swap.arenas = d.arena.AddGPU(node)
	g.swap.residency.Later = g.core.Later
	g.swap.residency.MoveUnit = min(physical/64, 128<<20) // as the shim has it (PIECES)
	near := ""
	if node != arena.NoNode {
		near = fmt.Sprintf(", of NUMA node %d first", node)
	}
	d.log.Infof("GPU %d: memory is swapped: %d MiB for clients at a time, %d MiB of host memory for all GPUs%s", g.Index, capacity>>20, d.opts.SwapMemory>>20, near)
}

// unsettle has settleMemory look again.
func (g *gpu) unsettle() {
	if g.swap != nil {
		g.swap.unsettled = true
	}
}

// keepOf says how a client's memory is kept on a GPU, and what its page says.
func (d *Daemon) keepOf(g *gpu, cl *client) (keep sched.Keep, onPage uint32) {
	switch d.shares.Tenants[cl.Account].on(g.UUID).MemoryMode {
	case api.MemoryMode_MEMORY_MODE_MANAGED:
		if g.swap == nil {
			return sched.Managed, wire.SlotManaged
		}
		if o, known := g.swap.residency.Occupancy(cl.id); known && o.Keep != sched.Managed && o.Promised != 0 {
			return sched.Resident, wire.SlotManaged // what it has allocated so far is not
		}
		return sched.Managed, wire.SlotManaged
	case api.MemoryMode_MEMORY_MODE_RESIDENT:
		return sched.Resident, wire.SlotResident
	}
	if !cl.canMove {
		return sched.Resident, 0
	}
	return sched.Swapped, 0
}

// attachMemory tells the client's page how its memory is kept, before ATTACHED. It
// returns what the core is to be told, which forgets clients without a connection.
func (d *Daemon) attachMemory(g *gpu, att *attachment, again bool) (away bool) {
	cl := att.client
	keep, onPage := d.keepOf(g, cl)
	cl.page.SetMemoryMode(att.channel, onPage)
	if g.swap == nil {
		return false
	}
	m := g.swap.members[cl.id]
	if m == nil {
		m = &clientMemory{client: cl, since: now()}
		d.addArena(g, m)
		g.swap.members[cl.id] = m
		g.swap.residency.Attach(cl.id, keep, d.groupOf(g, cl), again && keep == sched.Swapped)
		d.promiseMemory(g, cl, false)
	} else {
		m.answer, m.stranded = nil, 0 // it asks again, and the core has forgotten it
		g.swap.residency.Attach(cl.id, keep, d.groupOf(g, cl), false)
	}
	g.swap.unsettled = true
	if o, ok := g.swap.residency.Occupancy(cl.id); ok && (keep == sched.Swapped || keep == sched.Resident) {
		cl.page.SetRoom(att.channel, max(o.Room, 1)) // 0 means something else
	}
	m.away = g.swap.residency.Away(cl.id)
	return m.away
}

// attachedMemory repeats, after ATTACHED, what an earlier connection may have lost.
func (d *Daemon) attachedMemory(g *gpu, att *attachment) {
	if g.swap == nil {
		return
	}
	if m := g.swap.members[att.client.id]; m != nil {
		if m.asked != 0 {
			d.tellRoom(att, att.client.page.Room(att.channel))
		}
		m.arena.Flush()
	}
	g.swap.prepare()
}

func (d *Daemon) groupOf(g *gpu, cl *client) string { return d.shareOf(g, cl.Account).Gang }

// keepMemory has a change of a tenant's shares hold for its processes.
func (d *Daemon) keepMemory(g *gpu, account string) {
	a := d.counts[account]
	if a == nil {
		return
	}
	for cl := range a.clients {
		att := cl.attached[g]
		if att == nil || cl.page == nil {
			continue
		}
		keep, onPage := d.keepOf(g, cl)
		cl.page.SetMemoryMode(att.channel, onPage)
		if g.swap != nil && g.swap.members[cl.id] != nil {
			g.swap.residency.Attach(cl.id, keep, d.groupOf(g, cl), false)
			d.promiseMemory(g, cl, false)
		}
	}
	d.settleMemory(g)
	g.swap.prepare()
}

// dropMemory forgets what a client has: it is dead, or another program now.
func (d *Daemon) dropMemory(cl *client) {
	for _, g := range d.order {
		if g.swap == nil || g.swap.members[cl.id] == nil {
			continue
		}
		m := g.swap.members[cl.id]
		m.arena.Drop()
		delete(g.swap.members, cl.id)
		d.noteMembers()
		g.swap.residency.Drop(cl.id)
		g.swap.unsettled = true
		d.tellPromised(g)
		d.settleMemory(g)
		d.letStalledGoOn(g)
	}
}

// believed bounds what is believed of a client: more than its limit, or than the
// GPU has, it cannot have.
func (g *gpu) believed(account string) uint64 {
	if limit := g.limitOf(g.ledger.Reserved(account, 0).Limit); limit != 0 {
		return min(limit, g.swap.residency.Capacity())
	}
	return g.swap.residency.Capacity()
}

// promiseMemory tells the GPU's Residency what a client has reserved. What was forced
// and has no place is not promised, or a process could take what there is for others
// by a word: if it exists, reports and the driver tell.
func (d *Daemon) promiseMemory(g *gpu, cl *client, placeable bool) {
	if g.swap == nil || g.swap.members[cl.id] == nil {
		return
	}
	m := g.swap.members[cl.id]
	if total := g.ledger.Reserved(cl.Account, cl.id).Total; total <= m.promised || placeable || d.fits(g, cl, total) == nil {
		if total != m.promised {
			d.noteMembers()
		}
		m.promised = total
	}
	g.swap.residency.Promise(cl.id, m.promised, g.believed(cl.Account))
	d.place(g)
	g.swap.prepare()
}

// placeable returns how much of a reservation there is a place for, on the GPU or
// in host memory: all, the least that is of use, or none, with an error.
func (d *Daemon) placeable(g *gpu, cl *client, want wire.Reserve, force bool) (total uint64, code uint32) {
	if g.swap == nil || force || want.Total <= g.ledger.Reserved(cl.Account, cl.id).Total || g.swap.members[cl.id] == nil {
		return want.Total, wire.OK
	}
	err := d.fits(g, cl, want.Total)
	if err == nil {
		return want.Total, wire.OK
	}
	if want.Least < want.Total && d.fits(g, cl, want.Least) == nil {
		return want.Least, wire.OK
	}
	g.swap.refused++
	text := err.Error()
	d.turn(time.Now(), g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_NO_ROOM, Bytes: want.Total, Text: text})
	d.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: refuse %d MiB: %s", g.Index, want.Total>>20, text))
	if !cl.canMove {
		return 0, wire.ErrMemory // all that it knows
	}
	return 0, wire.ErrArena
}

func (d *Daemon) fits(g *gpu, cl *client, total uint64) error {
	needed, err := g.swap.residency.Fits(cl.id, total, g.believed(cl.Account), arena.MinSegment, g.swap.arenaOf)
	if err != nil {
		return err
	}
	return d.arenaFits(needed + d.arenaNeeded(g))
}

// arenaNeeded is how much what is promised on all GPUs but one, or nil, needs.
func (d *Daemon) arenaNeeded(but *gpu) (sum uint64) {
	for _, g := range d.order {
		if g != but && g.swap != nil {
			n, _ := g.swap.residency.Fits(0, 0, 0, arena.MinSegment, g.swap.arenaOf)
			sum += n
		}
	}
	return sum
}

// shortOfArena is for a client that cannot move for want of an arena. What it has been
// given and not made ready yet is no reason to give it more.
func (d *Daemon) shortOfArena(g *gpu, id sched.ClientID, m *clientMemory) {
	if m.moved.Arena < g.swap.residency.Arena(id, arena.MinSegment, 0) {
		return
	}
	g.swap.residency.ShortOfArena(id, func() bool { return d.arenaFits(d.arenaNeeded(nil)) == nil })
}

// arenaOf is what a client has, or is soon to have.
func (s *swap) arenaOf(id sched.ClientID) uint64 {
	if m := s.members[id]; m != nil {
		return m.arena.Bytes()
	}
	return 0
}

// maxRoomWait is how long a client that cannot wait by itself is kept waiting for
// room: shims take two seconds for the scheduler's end.
const maxRoomWait = 1500 * time.Millisecond

// awaitRoom keeps the answer to RESERVE of a client whose memory is never moved
// until others have made room, and reports whether it does.
func (d *Daemon) awaitRoom(g *gpu, cl *client, answer *wire.Frame, force bool) bool {
	if g.swap == nil || answer.Code != wire.OK || g.swap.members[cl.id] == nil {
		return false
	}
	if force {
		g.swap.residency.Force(cl.id)
		return false
	}
	m := g.swap.members[cl.id]
	if o, _ := g.swap.residency.Occupancy(cl.id); o.Keep != sched.Resident || o.Lacks == 0 || m.answer != nil {
		return false
	}
	m.answer, m.until = answer, now().Add(maxRoomWait)
	d.planLook(g)
	return true
}

// answerThose who have the room that they asked for, or have waited for too long.
func (d *Daemon) answerThose(g *gpu) {
	t := now()
	for id, m := range g.swap.members {
		if m.answer == nil {
			continue
		}
		if o, _ := g.swap.residency.Occupancy(id); o.Lacks != 0 && t < m.until {
			continue
		}
		if c := m.client.conn; c != nil {
			d.send(c, m.answer, nil)
		}
		m.answer = nil
	}
}

// tellPromised tells the core whether all of what is reserved fits the GPU.
func (d *Daemon) tellPromised(g *gpu) {
	n, capacity := g.swap.residency.Promised(), g.swap.residency.Capacity()
	change := max(n, g.swap.promised) - min(n, g.swap.promised)
	crosses := (n > capacity) != (g.swap.promised > capacity)
	if change == 0 || !crosses && n != 0 && change < g.MemoryBytes/100 {
		return
	}
	g.swap.promised = n
	d.step(g, sched.SetMemory{Reserved: n, Total: capacity, Swap: true})
}

// place carries out what the Residency has decided.
func (d *Daemon) place(g *gpu) {
	for _, room := range g.swap.residency.Plan() {
		m := g.swap.members[room.Client]
		if m == nil {
			continue
		}
		switch {
		case room.Less && m.asked == 0:
			m.asked, m.since, m.askedOut = now(), now(), m.moved.Out
		case !room.Less:
			m.asked, m.stalled = 0, false
		}
		att := m.client.attached[g]
		if att == nil || m.client.page == nil {
			continue
		}
		d.reach(beforeRoom)
		m.client.page.SetRoom(att.channel, max(room.Bytes, 1))
		d.reach(inRoom)
		d.tellRoom(att, room.Bytes)
		d.reach(afterRoom)
	}
	d.answerThose(g)
	d.planLook(g)
	if d.checkAlways {
		if err := g.swap.residency.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
			d.log.WithError(err).Errorf("bug in nvshare-scheduler: residency on GPU %d", g.Index)
		}
	}
}

func (d *Daemon) tellRoom(att *attachment, bytes uint64) {
	c := att.client.conn
	if c == nil || c.channels[att.channel] != att || !att.answered {
		return
	}
	d.send(c, &wire.Frame{Type: wire.TypeRoom, Channel: att.channel, Room: wire.Room{Bytes: bytes}}, nil)
}

// settleMemory brings rooms into line with who has a grant, and tells the core who
// has memory away. It is called after each step.
func (d *Daemon) settleMemory(g *gpu) {
	s := g.swap
	if s == nil || s.settling {
		return
	}
	s.settling = true
	defer func() { s.settling = false }()
	for s.unsettled {
		s.unsettled = false
		for id := range s.members {
			s.residency.SetActive(id, g.core.Active(id))
		}
		d.place(g)
		for id, m := range s.members {
			if away := s.residency.Away(id); away != m.away {
				m.away = away
				d.step(g, sched.SetAway{Client: id, Away: away})
			}
			if m.stranded != 0 && (s.residency.Stranded(id) == 0 || now() >= m.stranded) {
				m.stranded = 0
				d.step(g, sched.SetStranded{Client: id})
			}
		}
	}
}

// grantedMemory makes room for who is granted, before its gate opens.
func (d *Daemon) grantedMemory(g *gpu, a sched.Grant) {
	if g.swap == nil || g.swap.members[a.Client] == nil {
		return
	}
	m := g.swap.members[a.Client]
	m.granted = 0
	if a.Moving {
		m.granted, m.grantedIn = now(), m.moved.In
	}
	g.swap.residency.SetActive(a.Client, true)
	d.place(g)
	g.swap.unsettled = true
}

func (d *Daemon) releasedMemory(g *gpu, a sched.Released) {
	if g.swap == nil {
		return
	}
	g.swap.residency.SetActive(a.Client, g.core.Active(a.Client)) // room can be taken from it for the next one
	g.swap.unsettled = true
	if m := g.swap.members[a.Client]; m != nil && m.granted != 0 { // it did not get all in
		g.swap.in.took += a.Moved
		m.granted = 0
	}
}

// moved takes note of MOVED.
func (d *Daemon) moved(att *attachment, f *wire.Frame) {
	g, id := att.gpu, att.client.id
	if g.swap == nil || g.swap.members[id] == nil {
		return
	}
	d.reach(atMoved)
	s, m, t := g.swap, g.swap.members[id], now()
	old, was := m.moved, m.told
	if before, ok := s.residency.Occupancy(id); ok && before.Stalled && f.Code&wire.MovedStuck == 0 {
		defer d.letStalledGoOn(g)
	}
	m.moved, m.told, m.since = f.Moved, true, t
	if !was { // of before a restart
		m.moved.Out, m.moved.In = f.Moved.Out, f.Moved.In
		m.askedOut, m.grantedIn = f.Moved.Out, f.Moved.In
		g.countOldArena(m)
	} else {
		s.out.bytes += f.Moved.Out - min(old.Out, f.Moved.Out)
		s.in.bytes += f.Moved.In - min(old.In, f.Moved.In)
	}
	s.residency.Moved(id, f.Moved.Resident, f.Moved.Fixed, f.Moved.Away, f.Code&wire.MovedStuck != 0)
	if f.Code&wire.MovedStuck != 0 && f.Code&wire.MovedNoMemory != 0 {
		s.residency.Refused(id)
		d.strand(g, id, m)
	}
	if f.Code&wire.MovedStuck != 0 && f.Code&wire.MovedNoArena != 0 {
		d.shortOfArena(g, id, m)
	}
	if f.Code&wire.MovedStuck != 0 {
		d.log.WithField("client", id).Debugf("GPU %d: cannot move memory: code %#x", g.Index, f.Code)
	}
	o, _ := s.residency.Occupancy(id)
	if m.asked != 0 && (o.Resident <= o.Room || o.Resident <= o.Fixed) {
		d.endMove(g, id, api.EventType_EVENT_TYPE_SWAP_OUT, &s.out, f.Moved.Out-min(m.askedOut, f.Moved.Out), t.Sub(m.asked))
		m.asked, m.stalled = 0, false
	}
	s.unsettled = true
	switch {
	case f.Code&wire.MovedReady != 0:
		copied := f.Moved.In - min(m.grantedIn, f.Moved.In)
		if m.granted != 0 {
			d.endMove(g, id, api.EventType_EVENT_TYPE_SWAP_IN, &s.in, copied, t.Sub(m.granted))
			m.granted = 0
		}
		s.residency.Ready()
		m.away = false // the core takes that from Ready
		d.step(g, sched.Ready{Client: id, Epoch: sched.Epoch(f.Epoch), Bytes: max(copied, 1)})
	case f.Epoch != 0 && f.Moved.Away == 0:
		d.step(g, sched.Ready{Client: id, Epoch: sched.Epoch(f.Epoch)}) // nothing was away after all
	case f.Epoch != 0:
		d.step(g, sched.Moving{Client: id, Epoch: sched.Epoch(f.Epoch)})
	default:
		// Somebody may wait for just that.
		for other, n := range s.members {
			if n.granted != 0 {
				if epoch, moving := g.core.Grant(other); moving {
					d.step(g, sched.Moving{Client: other, Epoch: epoch})
				}
			}
		}
	}
	d.settleMemory(g)
	d.tellPromised(g)
	g.swap.prepare()
}

func (d *Daemon) endMove(g *gpu, id sched.ClientID, kind api.EventType, m *direction, bytes uint64, took time.Duration) {
	if bytes == 0 {
		return
	}
	m.ended(bytes, took)
	d.turn(time.Now(), g, id, &history.Event{Kind: kind, Bytes: bytes, Took: took})
}

// letStalledGoOn tells the core that those can try again whose grants were asked
// back because they did not get on.
func (d *Daemon) letStalledGoOn(g *gpu) {
	for id := range g.swap.members {
		d.step(g, sched.Moving{Client: id})
	}
}

// planLook plans the next lookAtVictims.
func (d *Daemon) planLook(g *gpu) {
	g.swap.due = 0
	for _, m := range g.swap.members {
		if m.answer != nil && (g.swap.due == 0 || m.until < g.swap.due) {
			g.swap.due = m.until
		}
		if m.stranded != 0 && (g.swap.due == 0 || m.stranded < g.swap.due) {
			g.swap.due = m.stranded
		}
	}
	for _, id := range g.swap.residency.Victims() {
		m := g.swap.members[id]
		if m == nil || m.stalled {
			continue
		}
		at := m.since.Add(stallAfter)
		if o, _ := g.swap.residency.Occupancy(id); o.Stalled {
			at = m.since.Add(max(d.opts.Grace, stallAfter))
		}
		if g.swap.due == 0 || at < g.swap.due {
			g.swap.due = at
		}
	}
}

// lookAtVictims passes over those that do not move, and reports them.
func (d *Daemon) lookAtVictims(g *gpu) {
	t := now()
	for _, id := range g.swap.residency.Victims() {
		m := g.swap.members[id]
		if m == nil {
			continue
		}
		if t >= m.since.Add(stallAfter) && g.swap.residency.Stall(id) {
			g.swap.unsettled = true
		}
		if o, _ := g.swap.residency.Occupancy(id); o.Stalled && !m.stalled && t >= m.since.Add(max(d.opts.Grace, stallAfter)) {
			m.stalled = true
			text := fmt.Sprintf("it does not move %d MiB off the GPU, for which others wait", (o.Resident-min(o.Room, o.Resident))>>20)
			d.turn(time.Now(), g, id, &history.Event{Kind: api.EventType_EVENT_TYPE_STALL, Text: text})
			d.tell(m.client.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: %s", g.Index, text))
		}
	}
	d.answerThose(g)
	g.swap.unsettled = true
	d.settleMemory(g)
	d.planLook(g)
}

// residentFits says why a tenant's memory cannot be kept on a GPU.
func (d *Daemon) residentFits(g *gpu, account string, old, to tenantShares, who string) error {
	const resident = api.MemoryMode_MEMORY_MODE_RESIDENT
	a := d.counts[account]
	if g.swap == nil || a == nil || to.on(g.UUID).MemoryMode != resident || old.on(g.UUID).MemoryMode == resident {
		return nil
	}
	r := g.swap.residency
	var moved []*client
	defer func() {
		for _, cl := range moved {
			r.Attach(cl.id, sched.Swapped, d.groupOf(g, cl), false)
		}
	}()
	for cl := range a.clients {
		if o, ok := r.Occupancy(cl.id); ok && o.Keep == sched.Swapped {
			r.Attach(cl.id, sched.Resident, d.groupOf(g, cl), false)
			moved = append(moved, cl)
		}
	}
	if _, err := r.Fits(0, 0, 0, arena.MinSegment, nil); err != nil {
		return notResident(g, who, err)
	}
	return nil
}
