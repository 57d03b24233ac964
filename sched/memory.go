// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"time"
)

// Memory. The ledger says what each tenant has reserved. Where more can be reserved
// than the GPU has, residency says how much of it each client may have there, and
// this file, reserve.go and rooms.go are what happens around that: who is told, who is
// waited for and for how long, and what the turns (moving.go, pause.go) know of memory.
//
//   - A client that is granted gets room before its gate opens. A client that
//     allocates gets room with the answer to Reserve.
//   - A client that has to make room is told (Room), and says what it has moved
//     (Moved). What becomes free goes to the clients that wait for it, piece by piece.
//   - A client that does not move is passed over after StallAfter, and reported
//     after the grace period.

const (
	// DefaultStallAfter is how long a client may take for a piece before others are
	// asked to make room in its place.
	DefaultStallAfter = time.Second
	// maxRoomWait is how long the answer to Reserve waits for room: shims take two
	// seconds for the scheduler's end.
	maxRoomWait = 1500 * time.Millisecond
	// strandedRetry is after how long it is tried again to place what had no place:
	// what is on the GPU besides clients may have gone.
	strandedRetry = 30 * time.Second
	// believedArena is how much host memory from before a restart a client is
	// believed to have beyond what it was promised: a segment.
	believedArena = 1 << 30
)

// Memory says what a GPU has of memory. The zero Memory bounds nothing.
type Memory struct {
	Bytes   uint64 // of the GPU; 0: not known
	Ceiling uint64 // what the GPU is to look like at most; 0: as it is
	// DefaultLimit is the limit of tenants that have none of their own; 0: none.
	DefaultLimit uint64

	Swap       bool          // more can be reserved than Capacity; clients move out what does not fit
	Capacity   uint64        // what clients may have on the GPU at a time
	MoveUnit   uint64        // what clients move at a time; 0: 64 MiB
	ArenaUnit  uint64        // what clients' arenas are multiples of; 0: 1
	StallAfter time.Duration // 0: DefaultStallAfter

	SuspendAfter time.Duration // clients idle for so long are suspended, see idle.go; 0: none are
	Contexts     bool          // a suspended client leaves more than memory: also one that has none on the GPU is suspended
}

// memory is the part of a GPU that decides about memory.
type memory struct {
	Memory
	arenas    *Arenas // of the node
	ledger    *ledger
	residency *residency               // nil: nothing is swapped
	members   map[ClientID]*member     // until their process ends, or its program
	keeps     map[string]Keep          // of tenants; Swapped is not listed
	idleTimes map[string]time.Duration // of tenants, in place of SuspendAfter; 0 is not listed

	unsettled bool    // who has a grant, or what clients have, has changed
	resized   bool    // how much arena clients need may have changed
	needed    uint64  // this GPU's part of Arenas.needed
	wanting   int     // members that need arena, now or soon, as the caller was told
	due       Time    // when settleMemory has something to do; 0: never
	tellAgain *member // an earlier connection may have lost its room

	awaiting []*member // those with an answer that waits for room
	stranded []*member

	idle earliest // when idle clients are looked for

	out, in  Direction
	refused  uint64
	suspends uint64 // of clients
}

// Direction is what was moved one way, and how long that took.
type Direction struct {
	Bytes, Times uint64
	Rate         uint64 // bytes a second, of the latest move
	Took         time.Duration
}

func (m *Direction) ended(bytes uint64, took time.Duration) {
	m.Times++
	m.Took += took
	if took > 0 {
		m.Rate = uint64(float64(bytes) / took.Seconds())
	}
}

// member is what is known of one process's memory. It outlives connections.
type member struct {
	id      ClientID
	account string
	canMove bool
	gang    string

	promised uint64 // reserved, as far as there is a place for it
	report   Report // the latest
	reported bool   // there was one
	since    Time   // of the latest report, or of being asked to make room

	asked    bool // to make room, and it has not done so
	askedAt  Time
	askedOut uint64 // report.Out then
	stalled  bool   // and that was reported

	answer *Reserved // waits for room
	until  Time      // but no longer

	stranded bool // there is no place for it
	retry    Time // it is tried again then

	filling   bool // it was granted, and moves in
	fillSince Time
	fillIn    uint64 // report.In then

	wanted ArenaWanted // as the caller was told
}

func newMemory(cfg Memory, arenas *Arenas, later func(a, b ClientID) bool) memory {
	m := memory{arenas: arenas, ledger: newLedger(), members: map[ClientID]*member{}, keeps: map[string]Keep{}, idleTimes: map[string]time.Duration{}}
	m.configure(cfg, later)
	return m
}

// configure says how the memory of a GPU is shared that nobody has used yet.
func (m *memory) configure(cfg Memory, later func(a, b ClientID) bool) {
	m.Memory = cfg
	m.ledger.fallback = cfg.DefaultLimit
	if m.StallAfter == 0 {
		m.StallAfter = DefaultStallAfter
	}
	if m.SuspendAfter > 0 {
		m.SuspendAfter = clamp(m.SuspendAfter, MinSuspendAfter, MaxSuspendAfter)
	}
	if cfg.Swap {
		m.residency = newResidency(cfg.Capacity)
		m.residency.later = later
		m.residency.moveUnit, m.residency.arenaUnit = cfg.MoveUnit, cfg.ArenaUnit
		m.ledger.setCeiling(0) // each client is bounded, by residency.fits
	} else {
		m.ledger.setCeiling(cfg.Ceiling)
	}
}

// Unused says whether the GPU has no client, and nobody has memory on it.
func (c *GPU) Unused() bool { return len(c.clients) == 0 && len(c.mem.members) == 0 }

// accountOf is the name under which a tenant's memory is counted.
func accountOf(tenant string, id ClientID) string {
	if tenant == "" {
		return fmt.Sprintf("client %d", id)
	}
	return tenant
}

// limitOf is the lower one of a tenant's limit and what the GPU is to look like.
func (m *memory) limitOf(limit uint64) uint64 {
	if m.Ceiling != 0 && (limit == 0 || limit > m.Ceiling) {
		return m.Ceiling
	}
	return limit
}

// believed bounds what is believed of a client: more than the GPU has, or than its
// tenant's limit, it cannot have, unless it was promised that before the limit.
func (m *memory) believed(c *member) uint64 {
	if limit := m.limitOf(m.ledger.reservedBy(c.account, 0).Limit); limit != 0 {
		return min(max(limit, c.promised), m.residency.capacity)
	}
	return m.residency.capacity
}

// keepOf says how a client's memory is kept.
func (m *memory) keepOf(c *member) Keep {
	switch keep := m.keeps[c.account]; {
	case keep == Managed:
		if o := m.residency.clients[c.id]; o != nil && o.keep != Managed && o.promised != 0 {
			return Resident // what it has allocated so far is not managed
		}
		return Managed
	case keep == Resident, !c.canMove:
		return Resident
	}
	return Swapped
}

// Standing returns what a client is to see of its tenant's limit, and of what is
// reserved; with client 0, what a process that has reserved nothing is to see. Where
// memory is swapped and the GPU is to look small, that bounds each process, not all
// of a tenant together: as a small GPU would.
func (c *GPU) Standing(tenant string, id ClientID) Standing {
	m := &c.mem
	s := m.ledger.reservedBy(tenant, id)
	byCeiling := m.Ceiling != 0 && (s.Limit == 0 || s.Limit >= m.Ceiling)
	s.Limit = m.limitOf(s.Limit)
	switch {
	case !byCeiling || m.residency == nil:
	case id == 0:
		s.Used = min(s.Used, s.Limit)
	default:
		s.Used = s.Total
	}
	return s
}

// attachMemory takes in a client that attaches, and gives its new page its room.
func (c *GPU) attachMemory(cl *client, ev Attach) {
	mem := &c.mem
	m := mem.members[cl.id]
	isNew := m == nil
	if isNew {
		m = &member{id: cl.id, since: c.now}
		mem.members[cl.id] = m
	}
	m.account, m.canMove, m.gang = accountOf(ev.Tenant, cl.id), ev.CanMove, ev.Share.Crew()
	if mem.residency == nil {
		return
	}
	keep := mem.keepOf(m)
	mem.residency.attach(m.id, keep, m.gang, isNew && ev.Again && keep == Swapped)
	if isNew {
		c.promise(m, false)
	} else {
		c.dropAnswer(m) // it asks again
		c.unstrand(m)
	}
	mem.residency.setActive(m.id, cl.grant != nil)
	c.memoryChanged()
	if keep != Managed {
		c.do(Room{Client: m.id, Bytes: mem.residency.clients[m.id].room})
		if m.asked {
			mem.tellAgain = m
		}
	}
	cl.away = mem.residency.away(m.id)
}

// dropAnswer forgets the answer that waits for room.
func (c *GPU) dropAnswer(m *member) {
	m.answer = nil
	c.mem.awaiting = slices.DeleteFunc(c.mem.awaiting, func(o *member) bool { return o == m })
}

// restoreMemory has residency wait for a client that was here before a restart.
func (c *GPU) restoreMemory(ev RestoreMemory) {
	mem := &c.mem
	if mem.residency == nil || mem.members[ev.Client] != nil {
		return
	}
	m := &member{id: ev.Client, account: accountOf(ev.Tenant, ev.Client), canMove: ev.CanMove, gang: ev.Gang, since: c.now}
	mem.members[m.id] = m
	m.promised = min(ev.Bytes, mem.residency.capacity)
	keep := mem.keepOf(m)
	mem.residency.attach(m.id, keep, m.gang, keep == Swapped)
	mem.residency.promise(m.id, m.promised, mem.believed(m))
	mem.residency.force(m.id)
	if o := mem.residency.clients[m.id]; ev.Suspended && keep == Swapped {
		mem.residency.sleep(o)
	}
	if cl := c.clients[m.id]; cl != nil {
		mem.residency.setActive(m.id, cl.grant != nil)
	}
	c.memoryChanged()
}

// dropMemory forgets what a client has: it is dead, or another program now.
func (c *GPU) dropMemory(id ClientID) {
	mem := &c.mem
	m := mem.members[id]
	if m == nil {
		return
	}
	if mem.ledger.drop(m.account, id) {
		c.do(LimitsChanged{m.account})
	}
	c.dropAnswer(m)
	c.place(m)
	delete(mem.members, id)
	mem.wants(m, ArenaWanted{})
	if mem.residency != nil {
		mem.residency.drop(id)
		if m.promised != 0 {
			c.do(Promised{Client: id})
		}
		if cl := c.clients[id]; cl != nil && cl.away {
			c.setAway(cl, false)
		}
		c.thereMayBeRoom()
	}
	c.memoryChanged()
}

// setTenantMemory changes a tenant's limit, and how its clients' memory is kept.
func (c *GPU) setTenantMemory(ev SetTenantMemory) {
	mem := &c.mem
	if mem.ledger.setLimit(ev.Tenant, ev.Limit) != ev.Limit {
		c.do(LimitsChanged{ev.Tenant})
	}
	if mem.idleTimes[ev.Tenant] != ev.SuspendAfter {
		mem.setIdleTime(ev.Tenant, ev.SuspendAfter)
		c.lookForIdle()
	}
	if ev.Keep == Swapped {
		delete(mem.keeps, ev.Tenant)
	} else {
		mem.keeps[ev.Tenant] = ev.Keep
	}
	c.keepAnew(ev.Tenant)
}

// regroup has a change of a tenant's gang hold for its clients.
func (c *GPU) regroup(tenant, gang string) {
	changed := false
	for _, m := range c.membersOf(tenant) {
		changed = changed || m.gang != gang
		m.gang = gang
	}
	if changed {
		c.keepAnew(tenant)
	}
}

// keepAnew has a change of a tenant's memory mode, limit or gang hold for its clients.
func (c *GPU) keepAnew(tenant string) {
	if c.mem.residency == nil {
		return
	}
	for _, m := range c.membersOf(tenant) {
		c.mem.residency.attach(m.id, c.mem.keepOf(m), m.gang, false)
		c.promise(m, false)
		c.lookWhatIsAway(m)
	}
	c.memoryChanged()
}

// membersOf returns the members of a tenant, in order.
func (c *GPU) membersOf(tenant string) (all []*member) {
	for _, m := range c.mem.members {
		if m.account == tenant {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b *member) int { return int(a.id) - int(b.id) })
	return all
}

// promise tells residency what a client has reserved. What was forced and has no
// place is not promised, or a process could take by a word what there is for others:
// whether it exists, reports and the driver tell.
func (c *GPU) promise(m *member, placeable bool) {
	mem := &c.mem
	total := mem.ledger.reservedBy(m.account, m.id).Total
	if total <= m.promised || placeable || c.fits(m, total) == nil {
		if total != m.promised {
			c.do(Promised{m.id, total})
		}
		m.promised = total
	}
	mem.residency.promise(m.id, m.promised, mem.believed(m))
	c.lookWhatIsAway(m)
}

// lookWhatIsAway has the turns know whether a client has memory away.
func (c *GPU) lookWhatIsAway(m *member) {
	cl := c.clients[m.id]
	if cl == nil || cl.tenant == nil { // it attaches just now
		return
	}
	if away := c.mem.residency.away(m.id); away != cl.away {
		c.setAway(cl, away)
	}
}

// memoryChanged has settleMemory look again, and mode Auto know what is reserved: if
// that has changed by a hundredth of the GPU's memory, to nothing, or beyond what fits.
func (c *GPU) memoryChanged() {
	mem, a := &c.mem, &c.auto
	mem.unsettled, mem.resized = true, true
	n, total := mem.ledger.total(), mem.Bytes
	crosses := false
	if mem.residency != nil {
		n, total = mem.residency.promised(), mem.residency.capacity
		crosses = (n > total) != (a.reserved > total)
	}
	change := max(n, a.reserved) - min(n, a.reserved)
	if change != 0 && (crosses || n == 0 || change >= mem.Bytes/100) {
		a.reserved = n
	}
	a.total, a.swap = total, mem.residency != nil
}
