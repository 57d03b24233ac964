// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// View answers what the caller asks about the memory of a GPU. It changes nothing.
type View struct{ mem *Memory }

// View returns what the caller may ask.
func (mem *Memory) View() View { return View{mem} }

// Check returns an error that names the first broken invariant, which is a bug in this package, or
// nil. It costs O(clients) and changes nothing.
func (mem *Memory) Check() error {
	if err := mem.ledger.check(); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if mem.rooms == nil {
		return nil
	}
	if err := mem.rooms.check(); err != nil {
		return fmt.Errorf("rooms: %w", err)
	}
	for id, m := range mem.members {
		o := mem.rooms.clients[id]
		switch {
		case o == nil:
			return fmt.Errorf("no rooms are known for client %d", id)
		case (m.answer != nil) != slices.Contains(mem.awaiting, m):
			return fmt.Errorf("client %d waits for room: %t", id, m.answer != nil)
		case m.stranded != slices.Contains(mem.stranded, m):
			return fmt.Errorf("client %d is stranded: %t", id, m.stranded)
		case !mem.turns.Known(id) && (o.active || m.stranded):
			return fmt.Errorf("client %d is gone, and has a grant: %t, is stranded: %t", id, o.active, m.stranded)
		}
	}
	if mem.due != 0 && mem.due <= mem.now {
		return fmt.Errorf("memory was due at %d, it is %d", mem.due, mem.now)
	}
	return nil
}

// CheckClient returns an error if the turns know something else about a client than Memory.
func (mem *Memory) CheckClient(id base.ClientID, granted, away, stranded bool) error {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return nil
	}
	if o := mem.rooms.clients[id]; o.active != granted || (o.away > 0) != away || m.stranded != stranded {
		return fmt.Errorf("has a grant: %t, away: %t, stranded: %t; its memory: %+v", granted, away, stranded, *o)
	}
	return nil
}

// MemorySnapshot describes a GPU's memory where it is swapped.
type MemorySnapshot struct {
	Capacity, Promised uint64
	Lacking            uint64 // room that clients wait for
	Out, In            Direction
	Refused            uint64 // reservations without a place
	Suspends           uint64 // of clients, by order or because they were idle
	Clients            []ClientMemory
}

// ClientMemory describes the memory of one client, as it says.
type ClientMemory struct {
	Client                          base.ClientID
	Keep                            Keep
	Promised, Resident, Fixed, Away uint64
	Room, Lacks                     uint64
	Out, In                         uint64 // copied
	PassedOver                      bool   // it does not move out as it should
	Stalled                         bool   // for so long that it was reported
	Suspended                       bool   // its memory left, or is leaving, until it has a grant
	Stranded                        uint64 // that have no place, if it is stranded
}

// ClientMemory returns what a client has; false: it is not known, or nothing is
// swapped.
func (v View) ClientMemory(id base.ClientID) (ClientMemory, bool) {
	mem := v.mem
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return ClientMemory{}, false
	}
	o := mem.rooms.clients[id]
	cm := ClientMemory{Client: id, Keep: o.keep, Promised: m.promised, Resident: o.resident, Fixed: o.fixed, Away: o.away,
		Room: o.room, Lacks: o.counted.lacks, Out: m.report.Out, In: m.report.In, Suspended: o.suspended && !o.active, PassedOver: o.stalled, Stalled: m.stalled}
	if m.stranded {
		cm.Stranded = mem.rooms.stranded(id)
	}
	return cm, true
}

// MemorySnapshot returns nil where nothing is swapped. Clients are in the order of
// their IDs, those that are not connected included.
func (v View) MemorySnapshot() *MemorySnapshot {
	mem := v.mem
	r := mem.rooms
	if r == nil {
		return nil
	}
	s := &MemorySnapshot{Capacity: r.capacity, Promised: r.promised(), Lacking: r.sum.lacks, Out: mem.out, In: mem.in, Refused: mem.refused, Suspends: mem.suspends}
	for _, o := range r.all {
		cm, _ := v.ClientMemory(o.id)
		s.Clients = append(s.Clients, cm)
	}
	return s
}

// Reservations returns the tenants with a limit or with something reserved, in order,
// and where each stands.
func (v View) Reservations() (tenants []string, stand []Standing) {
	tenants = v.mem.ledger.names()
	for _, t := range tenants {
		stand = append(stand, v.mem.ledger.reservedBy(t, 0))
	}
	return tenants, stand
}

// ReservedBy returns what a client, and all of its tenant's clients, have reserved.
func (v View) ReservedBy(tenant string, id base.ClientID) Standing {
	return v.mem.ledger.reservedBy(tenant, id)
}
