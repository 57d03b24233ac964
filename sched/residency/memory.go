// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// This file and moving.go are what happens around ledger and rooms: who is told, who is waited for.
// A client gets room before its gate opens, and with the answer to Reserve. One that has to make room
// is told (Room), and says what it has moved (Moved); what becomes free goes to those that wait, piece
// by piece. One that does not move is passed over after StallAfter, and reported after the grace period.

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

// Config says what a GPU has of memory. The zero Config bounds nothing.
type Config struct {
	Ceiling uint64 // what the GPU is to look like at most; 0: as it is
	// DefaultLimit is the limit of tenants that have none of their own; 0: none.
	DefaultLimit uint64

	Swap       bool          // more can be reserved than Capacity; clients move out what does not fit
	Capacity   uint64        // what clients may have on the GPU at a time where more is reserved
	Physical   uint64        // what they may have while no more than that is reserved: then nothing moves; less: Capacity
	MoveUnit   uint64        // what clients move at a time; 0: 64 MiB
	ArenaUnit  uint64        // what clients' arenas are multiples of; 0: 1
	StallAfter time.Duration // 0: DefaultStallAfter

	SuspendAfter time.Duration // clients idle for so long are suspended, see idle.go; 0: none are
	Contexts     bool          // a suspended client leaves more than memory: also one that has none on the GPU is suspended
}

// Memory decides about the memory of a GPU. Begin comes before the calls of a Step, and Settle after
// them.
type Memory struct {
	cfg       Config
	turns     Turns
	do        func(base.Action)
	now       base.Time     // of the latest Begin
	grace     time.Duration // after which who does not move out is reported
	arenas    *Arenas       // of the node
	ledger    *ledger
	rooms     *rooms                    // nil: nothing is swapped
	members   map[base.ClientID]*member // until their process ends, or its program
	keeps     map[string]Keep           // of tenants; Swapped is not listed
	idleTimes map[string]time.Duration  // of tenants, in place of SuspendAfter; 0 is not listed

	unsettled bool      // who has a grant, or what clients have, has changed
	resized   bool      // how much arena clients need may have changed
	needed    uint64    // this GPU's part of Arenas.needed
	still     bool      // nobody has to make room, as the caller was told
	stillFrom base.Time // when the caller is to be told so; 0: not as things are

	outsideUntil base.Time            // see outsideEnds
	refusals     []*member            // whom the driver has refused memory since they began to move in
	crowded      bool                 // clients take turns for one of them
	crowdedUntil base.Time            // at least
	restsUntil   base.Time            // they do not again before, while others pay
	said         map[string]base.Time // the tenants by whose word they do, or did lately
	wanting      int                  // members that need arena, now or soon, as the caller was told
	due          base.Time            // when Settle has something to do; 0: never
	tellAgain    *member              // an earlier connection may have lost its room

	awaiting []*member // those with an answer that waits for room
	stranded []*member

	out, in  Direction
	refused  uint64
	suspends uint64 // of clients
	looked   uint64 // members that were looked at, in passes over all
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
	id      base.ClientID
	account string
	canMove bool
	gang    string

	promised uint64    // reserved, as far as there is a place for it
	report   Report    // the latest
	reported bool      // there was one
	since    base.Time // of the latest report, or of being asked to make room

	asked    bool // to make room, and it has not done so
	askedAt  base.Time
	askedOut uint64 // report.Out then
	stalled  bool   // and that was reported
	stalls   int    // so often in a row, without a piece that has left or was freed
	cannot   bool   // its latest report without a grant says itself that it is stuck

	answer *Reserved // waits for room
	until  base.Time // but no longer

	stranded bool      // there is no place for it
	behind   bool      // for now: see rooms.behind
	retry    base.Time // else it is tried again then

	cutSince base.Time // each drain since then was cut while somebody had to make room; 0: not so
	mayCut   bool      // its word is taken that its latest grant ended with work left: it did, or before a restart

	filling   bool // it was granted, and moves in
	fillSince base.Time
	fillIn    uint64    // report.In then
	refusedAt base.Time // the driver refused it memory, or it got some; of one in refusals
	lacks     bool      // its latest report says that the driver refuses it memory
	crowds    bool      // and its word is taken

	wanted ArenaWanted // as the caller was told
}

// Turns are what the memory of a GPU asks those who take turns on it, and tells them. It calls
// them while one of its own functions runs.
type Turns interface {
	Known(base.ClientID) bool
	Connected(base.ClientID) bool
	// Later says whether a client is expected to use the GPU later than another one: its memory
	// is the first to make room.
	Later(a, b base.ClientID) bool
	// SetAway says whether a client has memory to move before it can go on under a grant.
	SetAway(id base.ClientID, away bool)
	// SetStranded says whether a client is granted nothing, as there is no place for its memory.
	SetStranded(id base.ClientID, on bool)
	// Ready says that all memory of a client is on the GPU. Copied is how much it moved since
	// the grant, if that is known.
	Ready(id base.ClientID, epoch base.Epoch, copied uint64, known bool)
	// MovesOn says that a client has not opened its gate under its grant, and whether it has
	// moved another piece.
	MovesOn(id base.ClientID, epoch base.Epoch, piece bool)
	// MovedOut says that a client without a grant has moved: those that move in may have waited
	// for that.
	MovedOut()
	// MayBeRoom lets those try again that did not get their memory onto the GPU.
	MayBeRoom()
}

// New returns the memory of a GPU that nobody has used yet. The actions go to do.
func New(cfg Config, arenas *Arenas, turns Turns, do func(base.Action)) *Memory {
	mem := &Memory{turns: turns, do: do, arenas: arenas, ledger: newLedger(), members: map[base.ClientID]*member{}, keeps: map[string]Keep{}, idleTimes: map[string]time.Duration{}, said: map[string]base.Time{}}
	mem.configure(cfg)
	return mem
}

// configure says how the memory of a GPU is shared that nobody has used yet.
func (mem *Memory) configure(cfg Config) {
	mem.cfg = cfg
	mem.ledger.fallback = cfg.DefaultLimit
	mem.cfg.StallAfter = cmp.Or(cfg.StallAfter, DefaultStallAfter)
	if mem.cfg.SuspendAfter > 0 {
		mem.cfg.SuspendAfter = base.Clamp(mem.cfg.SuspendAfter, MinSuspendAfter, MaxSuspendAfter)
	}
	if cfg.Swap {
		mem.rooms = newRooms(cfg.Capacity)
		mem.rooms.physical = max(mem.rooms.capacity, min(cfg.Physical, maxCapacity))
		mem.still = true
		mem.rooms.later = mem.turns.Later
		mem.rooms.moveUnit, mem.rooms.arenaUnit = cfg.MoveUnit, cfg.ArenaUnit
		mem.ledger.setCeiling(0) // each client is bounded, by rooms.fits
	} else {
		mem.ledger.setCeiling(cfg.Ceiling)
	}
}

// Begin says what time it is, and after what time who does not move out is reported.
func (mem *Memory) Begin(now base.Time, grace time.Duration) {
	if mem.now = now; mem.grace != grace {
		mem.grace, mem.unsettled = grace, true
	}
	if mem.due != 0 && now >= mem.due {
		mem.endCuts()
	}
}

// Resize says how the memory of the GPU is shared from now on. Unused: it has no client.
func (mem *Memory) Resize(ev SetGPUMemory, unused bool) {
	if ev.Swap != nil && mem.rooms == nil && unused && mem.Unused() {
		mem.configure(*ev.Swap)
	}
	mem.changed()
}

// Unused says whether nobody has memory on the GPU.
func (mem *Memory) Unused() bool { return len(mem.members) == 0 }

// Looked counts what passes over all clients have cost.
func (mem *Memory) Looked() uint64 {
	if mem.rooms == nil {
		return mem.looked
	}
	return mem.looked + mem.rooms.looked
}

// accountOf is the name under which a tenant's memory is counted.
func accountOf(tenant string, id base.ClientID) string {
	if tenant == "" {
		return fmt.Sprintf("client %d", id)
	}
	return tenant
}

// limitOf is the lower one of a tenant's limit and what the GPU is to look like.
func (mem *Memory) limitOf(limit uint64) uint64 {
	if mem.cfg.Ceiling != 0 && (limit == 0 || limit > mem.cfg.Ceiling) {
		return mem.cfg.Ceiling
	}
	return limit
}

// believed bounds what is believed of a client: more than the GPU has, or than its
// tenant's limit, it cannot have, unless it was promised that before the limit.
func (mem *Memory) believed(m *member) uint64 {
	if limit := mem.limitOf(mem.ledger.reservedBy(m.account, 0).Limit); limit != 0 {
		return min(max(limit, m.promised), mem.rooms.physical)
	}
	return mem.rooms.physical
}

// keepOf says how a client's memory is kept.
func (mem *Memory) keepOf(m *member) Keep {
	switch keep := mem.keeps[m.account]; {
	case keep == Managed:
		if o := mem.rooms.clients[m.id]; o != nil && o.keep != Managed && o.promised != 0 {
			return Resident // what it has allocated so far is not managed
		}
		return Managed
	case keep == Resident, !m.canMove:
		return Resident
	}
	return Swapped
}

// Standing returns what a client is to see of its tenant's limit, and of what is
// reserved; with client 0, what a process that has reserved nothing is to see. Where
// memory is swapped and the GPU is to look small, that bounds each process, not all
// of a tenant together: as a small GPU would.
func (v View) Standing(tenant string, id base.ClientID) Standing {
	mem := v.mem
	s := mem.ledger.reservedBy(tenant, id)
	byCeiling := mem.cfg.Ceiling != 0 && (s.Limit == 0 || s.Limit >= mem.cfg.Ceiling)
	s.Limit = mem.limitOf(s.Limit)
	switch {
	case !byCeiling || mem.rooms == nil:
	case id == 0:
		s.Used = min(s.Used, s.Limit)
	default:
		s.Used = s.Total
	}
	return s
}

// Client is a client that attaches.
type Client struct {
	ID      base.ClientID
	Tenant  string // "": its own
	Gang    string // those that are granted together; "": itself
	CanMove bool   // its memory
	Again   bool   // it was here before this Memory
	Cut     bool   // its latest grant ended with work left, which is off the GPU
	Granted bool   // it has a grant
}

// Attach takes in a client that attaches, and gives its new page its room. It reports whether the
// client has memory away.
func (mem *Memory) Attach(cl Client) (away bool) {
	m := mem.members[cl.ID]
	isNew := m == nil
	if isNew {
		m = &member{id: cl.ID, since: mem.now, mayCut: cl.Again}
		mem.members[cl.ID] = m
	}
	m.account, m.canMove, m.gang = accountOf(cl.Tenant, cl.ID), cl.CanMove, cl.Gang
	if mem.rooms == nil {
		return false
	}
	keep := mem.keepOf(m)
	mem.rooms.attach(m.id, keep, m.gang, isNew && cl.Again && keep == Swapped)
	if isNew {
		mem.goesOn(m, cl.Again && cl.Granted)
		mem.promise(m, false)
	} else {
		mem.dropAnswer(m) // it asks again
		mem.unstrand(m)
	}
	mem.rooms.setActive(m.id, cl.Granted)
	mem.SetCut(m.id, cl.Cut && (m.mayCut || cl.Granted)) // with a grant: its release was lost
	mem.changed()
	if keep != Managed {
		o := mem.rooms.clients[m.id]
		mem.do(Room{Client: m.id, Bytes: o.room, Seq: o.tell()})
		if m.asked {
			mem.tellAgain = m
		}
	}
	return mem.rooms.away(m.id)
}

// dropAnswer forgets the answer that waits for room.
func (mem *Memory) dropAnswer(m *member) {
	m.answer = nil
	mem.awaiting = slices.DeleteFunc(mem.awaiting, func(o *member) bool { return o == m })
}

// Restore waits for a client that was here before a restart. Granted: it has a grant.
func (mem *Memory) Restore(ev RestoreMemory, granted bool) {
	if mem.rooms == nil || mem.members[ev.Client] != nil {
		return
	}
	m := &member{id: ev.Client, account: accountOf(ev.Tenant, ev.Client), canMove: ev.CanMove, gang: ev.Gang, since: mem.now, mayCut: true}
	mem.members[m.id] = m
	m.promised = min(ev.Bytes, mem.rooms.physical)
	keep := mem.keepOf(m)
	mem.rooms.attach(m.id, keep, m.gang, keep == Swapped)
	mem.rooms.promise(m.id, m.promised, mem.believed(m))
	mem.rooms.force(m.id)
	if o := mem.rooms.clients[m.id]; ev.Suspended && keep == Swapped {
		mem.rooms.sleep(o)
	}
	mem.rooms.setActive(m.id, granted)
	mem.goesOn(m, granted)
	mem.changed()
}

// goesOn is for a client from before a restart: with a grant, it may be moving in.
func (mem *Memory) goesOn(m *member, granted bool) {
	if granted && mem.keepOf(m) == Swapped {
		mem.beginFill(m)
		mem.mayLack(m)
	}
}

// Drop forgets what a client has: it is dead, or another program now.
func (mem *Memory) Drop(id base.ClientID) {
	m := mem.members[id]
	if m == nil {
		return
	}
	if mem.ledger.drop(m.account, id) {
		mem.do(LimitsChanged{m.account})
	}
	mem.dropAnswer(m)
	mem.endFill(m)
	mem.place(m)
	delete(mem.members, id)
	mem.wants(m, ArenaWanted{})
	if mem.rooms != nil {
		mem.rooms.drop(id)
		if m.promised != 0 {
			mem.do(Promised{Client: id})
		}
		mem.turns.SetAway(id, false)
		mem.turns.MayBeRoom()
	}
	mem.changed()
}

// SetTenant changes a tenant's limit, and how its clients' memory is kept. It reports whether they are
// idle after another time than before.
func (mem *Memory) SetTenant(ev SetTenantMemory) (idles bool) {
	if mem.ledger.setLimit(ev.Tenant, ev.Limit) != ev.Limit {
		mem.do(LimitsChanged{ev.Tenant})
	}
	if idles = mem.idleTimes[ev.Tenant] != ev.SuspendAfter; idles {
		mem.setIdleTime(ev.Tenant, ev.SuspendAfter)
	}
	if ev.Keep == Swapped {
		delete(mem.keeps, ev.Tenant)
	} else {
		mem.keeps[ev.Tenant] = ev.Keep
	}
	mem.keepAnew(ev.Tenant)
	return idles
}

// Regroup has a change of a tenant's gang hold for its clients.
func (mem *Memory) Regroup(tenant, gang string) {
	changed := false
	for _, m := range mem.membersOf(tenant) {
		changed = changed || m.gang != gang
		m.gang = gang
	}
	if changed {
		mem.keepAnew(tenant)
	}
}

// keepAnew has a change of a tenant's memory mode, limit or gang hold for its clients.
func (mem *Memory) keepAnew(tenant string) {
	if mem.rooms == nil {
		return
	}
	for _, m := range mem.membersOf(tenant) {
		mem.rooms.attach(m.id, mem.keepOf(m), m.gang, false)
		mem.promise(m, false)
		mem.lookWhatIsAway(m)
	}
	mem.changed()
}

// Clients returns the clients of a tenant whose memory is known, in order.
func (mem *Memory) Clients(tenant string) (ids []base.ClientID) {
	for _, m := range mem.membersOf(tenant) {
		ids = append(ids, m.id)
	}
	return ids
}

// Forget is for a client that has left the turns: it does not wait for a place any more, and nobody for its work.
// That its work was cut, and since when, stays: it may come back with that work, but gets no new time for it.
func (mem *Memory) Forget(id base.ClientID) {
	if m := mem.members[id]; m != nil {
		mem.unstrand(m)
		if mem.rooms != nil {
			mem.rooms.setCut(id, false)
			mem.unsettled = true
		}
	}
}

// membersOf returns the members of a tenant, in order.
func (mem *Memory) membersOf(tenant string) (all []*member) {
	mem.looked += uint64(len(mem.members))
	for _, m := range mem.members {
		if m.account == tenant {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b *member) int { return cmp.Compare(a.id, b.id) })
	return all
}

// promise tells rooms what a client has reserved. What was forced and has no
// place is not promised, or a process could take by a word what there is for others:
// whether it exists, reports and the driver tell.
func (mem *Memory) promise(m *member, placeable bool) {
	total := mem.ledger.reservedBy(m.account, m.id).Total
	if total <= m.promised || placeable || mem.fits(m, total) == nil {
		if total != m.promised {
			mem.do(Promised{m.id, total})
		}
		m.promised = total
	}
	mem.rooms.promise(m.id, m.promised, mem.believed(m))
	mem.lookWhatIsAway(m)
}

// lookWhatIsAway has the turns know whether a client has memory away.
func (mem *Memory) lookWhatIsAway(m *member) {
	mem.turns.SetAway(m.id, mem.rooms.away(m.id))
}

// changed has Settle look again.
func (mem *Memory) changed() { mem.unsettled, mem.resized = true, true }
