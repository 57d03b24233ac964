// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
)

func (c *GPU) checkMemory() error {
	mem := &c.mem
	if err := mem.ledger.check(); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if mem.residency == nil {
		return nil
	}
	if err := mem.residency.check(); err != nil {
		return fmt.Errorf("residency: %w", err)
	}
	for id, m := range mem.members {
		o, cl := mem.residency.clients[id], c.clients[id]
		switch {
		case o == nil:
			return fmt.Errorf("residency does not know client %d", id)
		case (m.answer != nil) != slices.Contains(mem.awaiting, m):
			return fmt.Errorf("client %d waits for room: %t", id, m.answer != nil)
		case m.stranded != slices.Contains(mem.stranded, m):
			return fmt.Errorf("client %d is stranded: %t", id, m.stranded)
		case cl == nil && (o.active || m.stranded):
			return fmt.Errorf("client %d is gone, and has a grant: %t, is stranded: %t", id, o.active, m.stranded)
		case cl != nil && (o.active != (cl.grant != nil) || cl.away != (o.away > 0) || cl.stranded != m.stranded):
			return fmt.Errorf("client %d has a grant: %t, away: %t, stranded: %t; its memory: %+v", id, cl.grant != nil, cl.away, cl.stranded, *o)
		}
	}
	if mem.due != 0 && mem.due <= c.now {
		return fmt.Errorf("memory was due at %d, it is %d", mem.due, c.now)
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
	Client                          ClientID
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
func (c *GPU) ClientMemory(id ClientID) (ClientMemory, bool) {
	mem := &c.mem
	m := mem.members[id]
	if m == nil || mem.residency == nil {
		return ClientMemory{}, false
	}
	o := mem.residency.clients[id]
	cm := ClientMemory{Client: id, Keep: o.keep, Promised: m.promised, Resident: o.resident, Fixed: o.fixed, Away: o.away,
		Room: o.room, Lacks: o.counted.lacks, Out: m.report.Out, In: m.report.In, Suspended: o.suspended && !o.active, PassedOver: o.stalled, Stalled: m.stalled}
	if m.stranded {
		cm.Stranded = mem.residency.stranded(id)
	}
	return cm, true
}

// MemorySnapshot returns nil where nothing is swapped. Clients are in the order of
// their IDs, those that are not connected included.
func (c *GPU) MemorySnapshot() *MemorySnapshot {
	mem := &c.mem
	r := mem.residency
	if r == nil {
		return nil
	}
	s := &MemorySnapshot{Capacity: r.capacity, Promised: r.promised(), Lacking: r.sum.lacks, Out: mem.out, In: mem.in, Refused: mem.refused, Suspends: mem.suspends}
	for _, o := range r.all {
		cm, _ := c.ClientMemory(o.id)
		s.Clients = append(s.Clients, cm)
	}
	return s
}

// Reservations returns the tenants with a limit or with something reserved, in order,
// and where each stands.
func (c *GPU) Reservations() (tenants []string, stand []Standing) {
	tenants = c.mem.ledger.names()
	for _, t := range tenants {
		stand = append(stand, c.mem.ledger.reservedBy(t, 0))
	}
	return tenants, stand
}

// ReservedBy returns what a client, and all of its tenant's clients, have reserved.
func (c *GPU) ReservedBy(tenant string, id ClientID) Standing {
	return c.mem.ledger.reservedBy(tenant, id)
}
