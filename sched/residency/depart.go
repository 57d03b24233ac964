// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"errors"
	"fmt"

	"github.com/nvshare/nvshare/sched/base"
)

// Moving to another GPU. The caller moves a tenant: it suspends the tenant here (Suspend)
// and lets nothing of it be granted, waits until Departed says that nothing of the tenant is
// left to move, moves the processes, and attaches them to the other GPU. Their memory is
// then away, as after a restart of the caller.

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
		movers[m.id] = Mover{m.promised, o.pinned(), max(r.arenaOf(o, 0), o.arena)}
	}
	return movers
}

// Departed says whether no client of a tenant has memory on the GPU that can be moved.
func (mem *Memory) Departed(tenant string) bool {
	for _, m := range mem.membersOf(tenant) {
		// A page cannot say that there is room for nothing: it says 1.
		if o := mem.rooms.clients[m.id]; o.keep == Swapped && (o.unknown || max(o.resident, o.may) > o.fixed+1) {
			return false
		}
	}
	return true
}

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
			r.promise(id, m.Bytes, r.capacity)
			r.moved(id, m.Fixed, m.Fixed, less(m.Bytes, m.Fixed), false)
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
