// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"errors"
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Suspending. A tenant that is suspended gives back its grants, and all its memory leaves
// the GPU that can be moved. A client comes back with its next grant, in its turn: until
// then only its context is left on the GPU. A client that works is asked for its grant once
// and goes on at its next call. Resuming asks for the grant in the client's place. A client whose drain
// was cut is granted once more to finish its work, and leaves after that: the grant does not bring it back.

// Why a tenant cannot be suspended or resumed. ErrNothingMoves and ErrNothingAway may hold
// on one GPU of several.
var (
	errNothingSwapped = errors.New("nothing is swapped: the scheduler runs without --swap-memory")
	ErrNothingMoves   = errors.New("none of its processes has memory that can be moved")
	ErrNothingAway    = errors.New("it is not suspended: none of its memory is off the GPU")
	errGangSuspends   = errors.New("it is part of a gang, which has the GPU as one")
	errNotSaid        = errors.New("its processes have not said yet what memory they have on the GPU: try again in a moment")
)

// Suspend has a client's memory leave the GPU, and reports whether there is any that can.
func (mem *Memory) Suspend(id base.ClientID) bool {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return false
	}
	mem.changed()
	if !mem.leaves(m, false) {
		return false
	}
	if mem.rooms.clients[id].finishes() {
		mem.tellStill(false) // before it is asked for its grant: a cut would keep its memory here
	}
	return true
}

// SuspendIdle suspends an idle client, if that moves anything (Config.Contexts: or not) and there is host memory
// for it. Else that is tried again after its time.
func (mem *Memory) SuspendIdle(id base.ClientID) {
	m, o := mem.members[id], mem.rooms.clients[id]
	if o.keep != Swapped || o.unknown || o.suspended || m.gang != "" || o.resident <= o.fixed && !mem.cfg.Contexts || mem.suspendsFit([]*occupant{o}) != nil {
		return
	}
	mem.leaves(m, true)
	mem.changed()
}

// leaves has a client's memory leave, and reports whether there is any that can.
func (mem *Memory) leaves(m *member, idle bool) bool {
	r := mem.rooms
	was := r.suspended
	if !r.suspend(m.id) {
		return false
	}
	if r.suspended != was {
		mem.suspends++
		o := r.clients[m.id]
		mem.do(Suspended{m.id, less(o.resident, o.fixed), idle})
	}
	return true
}

// Resume ends that a client is suspended, if nothing of it has left yet; else the client needs
// a grant to come back, and Resume returns true: also if it only may have memory away.
func (mem *Memory) Resume(id base.ClientID) bool {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return false
	}
	mem.changed()
	o := mem.rooms.clients[id]
	if o.finishes() { // nothing has left yet, and its grant is to bring back what was away before
		mem.rooms.wake(o)
	}
	if o.returns() || o.keep == Swapped && !o.reported && mem.turns.Known(id) && !o.active { // it has said nothing since its latest grant, or a restart
		return true
	}
	mem.rooms.wake(o)
	return false
}

// returns says whether a client has to be granted for its memory to come back. One that is unknown
// may have all of it away.
func (o *occupant) returns() bool {
	return o.keep == Swapped && (o.unknown || o.away > 0 || o.room < o.need())
}

// finishes says whether a client is suspended, and leaves once its work has ended.
func (o *occupant) finishes() bool { return o.suspended && (o.active || o.cut) }

// Finishing returns the clients, in order, that have work to end before they can make room for others, or leave.
func (mem *Memory) Finishing() (ids []base.ClientID) {
	r := mem.rooms
	if r == nil || r.sum.finishing == 0 && (r.sum.unfinished == 0 || r.over() == 0) {
		return nil
	}
	for _, o := range r.everybody() {
		if r.finishes(o) {
			ids = append(ids, o.id)
		}
	}
	return ids
}

// finishes says whether a client is one of Finishing.
func (r *rooms) finishes(o *occupant) bool {
	return o.finishes() || o.cut && !o.active && r.over() != 0
}

// Finishes says whether a client is one of Finishing.
func (mem *Memory) Finishes(id base.ClientID) bool {
	return mem.rooms != nil && mem.rooms.clients[id] != nil && mem.rooms.finishes(mem.rooms.clients[id])
}

// Leaves says whether a client of those is suspended.
func (mem *Memory) Leaves(id base.ClientID) bool { return mem.rooms.clients[id].suspended }

// ResumeFits returns how much of a tenant's memory would come back to the GPU if it is
// resumed, or why nothing would.
func (v View) ResumeFits(tenant string) (bytes uint64, why error) {
	r := v.mem.rooms
	if r == nil {
		return 0, errNothingSwapped
	}
	why = ErrNothingAway
	unknown := false
	for _, m := range v.mem.membersOf(tenant) {
		o := r.clients[m.id]
		switch {
		case !o.suspended && !o.returns():
		case m.gang != "":
			return 0, errGangSuspends
		case o.unknown && !o.suspended:
			unknown = true
		default:
			bytes += o.away
			why = nil
		}
	}
	if why != nil && unknown {
		why = errNotSaid
	}
	return bytes, why
}

// SuspendFits returns how much of a tenant's memory would leave the GPU if it is
// suspended, or why that cannot be.
func (v View) SuspendFits(tenant string) (bytes uint64, why error) {
	r := v.mem.rooms
	if r == nil {
		return 0, errNothingSwapped
	}
	gang, unknown := "", false
	var all []*occupant
	for _, m := range v.mem.membersOf(tenant) {
		switch o := r.clients[m.id]; {
		case o.keep != Swapped:
		case o.unknown:
			unknown = true
		default:
			bytes += less(o.resident, o.fixed)
			all = append(all, o)
			gang = m.gang
		}
	}
	switch {
	case len(all) == 0 && unknown:
		return 0, errNotSaid
	case len(all) == 0:
		return 0, ErrNothingMoves
	case gang != "":
		return 0, errGangSuspends
	}
	return bytes, v.mem.suspendsFit(all)
}

// leastRoom is what a client may keep that has no room at all: pages say 1 byte then.
const leastRoom = 1

// HasLeft says whether a client is suspended, and nothing that can be moved is left of its memory
// on the GPU.
func (mem *Memory) HasLeft(id base.ClientID) bool {
	if mem.rooms == nil || mem.rooms.clients[id] == nil {
		return false
	}
	o := mem.rooms.clients[id]
	return o.suspended && o.victim() && o.resident <= o.fixed+leastRoom
}

// suspendsFit returns why there is no host memory for all memory of these clients; nil:
// there is.
func (mem *Memory) suspendsFit(all []*occupant) error {
	r := mem.rooms
	needed := mem.arenas.needed - mem.needed
	var added []*occupant
	for _, o := range all {
		if !o.suspended {
			o.suspended = true
			r.suspended++
			added = append(added, o)
		}
	}
	why := mem.arenas.fits(needed + r.arenaNeeded())
	for _, o := range added {
		r.wake(o)
	}
	return why
}

// suspend has a client's memory leave. It reports whether there is any that can.
func (r *rooms) suspend(id base.ClientID) bool {
	o := r.clients[id]
	if o == nil || o.keep != Swapped || o.unknown {
		return false
	}
	r.sleep(o)
	r.leave(o)
	return true
}

func (r *rooms) sleep(o *occupant) {
	if !o.suspended {
		o.suspended = true
		r.suspended++
		r.recount(o)
	}
}

// wake says that a client is not suspended any more.
func (r *rooms) wake(o *occupant) {
	if o.suspended {
		o.suspended = false
		r.suspended--
		r.recount(o)
	}
}

// leave takes its room from a client that is suspended, once it has no grant.
func (r *rooms) leave(o *occupant) {
	if o.suspended && o.victim() && o.room > o.fixed {
		o.stalled = false // it has not been asked for that yet
		r.take(o, o.room-o.fixed)
	}
}

// take lowers a client's room.
func (r *rooms) take(o *occupant, bytes uint64) {
	o.room -= bytes
	if o.reported && !o.grows {
		o.may = max(o.room, o.resident) // what it does not use is free at once
		o.given = min(o.given, o.may)
	}
	r.recount(o)
}

// Limits of Config.SuspendAfter, the time after which idle clients are suspended.
const (
	MinSuspendAfter = time.Second
	MaxSuspendAfter = 365 * 24 * time.Hour
)

// setIdleTime changes after what time a tenant's clients are suspended; 0: SuspendAfter;
// less: never.
func (mem *Memory) setIdleTime(tenant string, after time.Duration) {
	switch {
	case after == 0:
		delete(mem.idleTimes, tenant)
	case after > 0:
		after = base.Clamp(after, MinSuspendAfter, MaxSuspendAfter)
		fallthrough
	default:
		mem.idleTimes[tenant] = after
	}
}

// IdleTime returns after what time a client is suspended; 0: never.
func (mem *Memory) IdleTime(id base.ClientID) time.Duration {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return 0
	}
	if after, ok := mem.idleTimes[m.account]; ok {
		return max(after, 0)
	}
	return mem.cfg.SuspendAfter
}

// SuspendsIdle says whether any client is suspended when it is idle.
func (v View) SuspendsIdle() bool {
	if v.mem.rooms == nil {
		return false
	}
	for _, after := range v.mem.idleTimes {
		if after > 0 {
			return true
		}
	}
	return v.mem.cfg.SuspendAfter > 0
}

// Moving to another GPU. The caller moves a tenant: it suspends the tenant here (Suspend)
// and lets nothing of it be granted, waits until Departed says that nothing of the tenant is
// left to move, moves the processes, and attaches them to the other GPU. Their memory is
// then away, as after a restart of the caller. While IsBack, it suspends the tenant again.

var errResident = errors.New("its memory is to stay where it is (memory mode), or its shim cannot move memory")

// Mover is a process that is to move to another GPU.
type Mover struct {
	Bytes uint64 // that it has reserved
	Fixed uint64 // of them, what the driver moves with the process, and nothing can move there
	Arena uint64 // host memory that it has, or needs, where it is
}

// DepartFits says why a tenant cannot leave the GPU for another one; nil: it can.
func (v View) DepartFits(tenant string) error {
	mem := v.mem
	if _, why := v.SuspendFits(tenant); why != nil {
		return why
	}
	for _, m := range mem.membersOf(tenant) {
		switch o := mem.rooms.clients[m.id]; {
		case o.keep != Swapped:
			return errResident
		case o.unknown:
			return errNotSaid
		}
	}
	return nil
}

// Movers returns the processes of a tenant that have memory on the GPU.
func (v View) Movers(tenant string) map[base.ClientID]Mover {
	r := v.mem.rooms
	if r == nil {
		return nil
	}
	movers := map[base.ClientID]Mover{}
	for _, m := range v.mem.membersOf(tenant) {
		o := r.clients[m.id]
		movers[m.id] = Mover{m.promised, o.pinned(), max(r.arenaOf(o), o.arena)}
	}
	return movers
}

// Departed says whether no client of a tenant has memory on the GPU that can be moved.
func (mem *Memory) Departed(tenant string) bool {
	for _, m := range mem.membersOf(tenant) {
		if o := mem.rooms.clients[m.id]; o.keep == Swapped && (o.unknown || o.stays()) {
			return false
		}
	}
	return true
}

// IsBack says whether a client of a tenant has memory on the GPU, or room for it, although its tenant was
// suspended: it has begun, or was granted, since.
func (mem *Memory) IsBack(tenant string) bool {
	for _, m := range mem.membersOf(tenant) {
		if o := mem.rooms.clients[m.id]; o.keep == Swapped && !o.unknown && !o.suspended && o.stays() {
			return true
		}
	}
	return false
}

// stays says whether a client has, or may have, memory on the GPU that can be moved. A page cannot say that
// there is room for nothing: it says leastRoom.
func (o *occupant) stays() bool { return max(o.resident, o.may) > o.fixed+leastRoom }

// ArriveFits says why the processes of a tenant have no place on the GPU, beside those there
// and others that are on their way there; nil: they have. All that can be moved may arrive in
// host memory, which clients keep.
func (v View) ArriveFits(tenant string, movers, others map[base.ClientID]Mover) error {
	mem := v.mem
	r := mem.rooms
	if r == nil {
		return errNothingSwapped
	}
	sum := uint64(0)
	for _, m := range movers {
		sum = add(sum, m.Bytes)
	}
	if s := v.Standing(tenant, 0); s.Limit != 0 && add(mem.ledger.reservedBy(tenant, 0).Used, sum) > s.Limit {
		return fmt.Errorf("the tenant's memory limit is %d MiB there, and its processes have %d MiB", s.Limit>>20, sum>>20)
	}
	defer func(seq uint64) { r.seq = seq }(r.seq)
	needed := mem.arenas.needed - mem.needed
	for _, some := range []map[base.ClientID]Mover{movers, others} {
		for id, m := range some {
			if r.clients[id] != nil {
				continue // it has arrived
			}
			defer r.drop(id)
			r.attach(id, Swapped, "", false)
			r.promise(id, m.Bytes, r.physical)
			r.moved(id, m.Fixed, m.Fixed, less(m.Bytes, m.Fixed), 0, false)
			r.setArena(id, m.Arena)
			r.sleep(r.clients[id])
			needed = less(needed, m.Arena)
		}
	}
	if err := r.placeable(); err != nil {
		return err
	}
	_, why := mem.arenas.check(needed + r.arenaNeeded())
	return why
}
