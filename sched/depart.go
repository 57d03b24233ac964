// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"errors"
	"fmt"
)

// Moving to another GPU. The caller moves a tenant: it suspends the tenant here (Suspend)
// and lets nothing of it be granted, waits until Departed says that nothing of the tenant is
// left to move, moves the processes, and attaches them to the other GPU. Their memory is
// then away, as after a restart of the caller.

var errResident = errors.New("its memory is to stay where it is (memory mode), or its shim cannot move memory")

// DepartFits returns how much each process of a tenant has reserved, or why the tenant
// cannot leave the GPU for another one.
func (c *GPU) DepartFits(tenant string) (reserved map[ClientID]uint64, why error) {
	if _, why := c.SuspendFits(tenant); why != nil {
		return nil, why
	}
	reserved = map[ClientID]uint64{}
	for _, m := range c.membersOf(tenant) {
		switch o := c.mem.residency.clients[m.id]; {
		case o.keep != Swapped:
			return nil, errResident
		case o.unknown:
			return nil, errNotSaid
		}
		reserved[m.id] = m.promised
	}
	return reserved, nil
}

// Departed says whether no client of a tenant has a grant, waits for one, or has memory on
// the GPU that can be moved.
func (c *GPU) Departed(tenant string) bool {
	for _, m := range c.membersOf(tenant) {
		// A page cannot say that there is room for nothing: it says 1.
		if o := c.mem.residency.clients[m.id]; o.keep == Swapped && (o.unknown || max(o.resident, o.may) > o.fixed+1) {
			return false
		}
		if cl := c.clients[m.id]; cl != nil && (cl.grant != nil || cl.in != nil) {
			return false
		}
	}
	return true
}

// ArriveFits says why the processes of a tenant, with so much reserved each, have no place on
// the GPU; nil: they have.
func (c *GPU) ArriveFits(tenant string, reserved map[ClientID]uint64) error {
	r := c.mem.residency
	if r == nil {
		return errNothingSwapped
	}
	sum, largest := uint64(0), uint64(0)
	for _, bytes := range reserved {
		sum = add(sum, bytes)
		largest = max(largest, bytes)
	}
	if s := c.Standing(tenant, 0); s.Limit != 0 && add(c.mem.ledger.reservedBy(tenant, 0).Used, sum) > s.Limit {
		return fmt.Errorf("the tenant's memory limit is %d MiB there, and its processes have %d MiB", s.Limit>>20, sum>>20)
	}
	if add(r.promised(), sum) <= r.capacity {
		return nil
	}
	for _, o := range r.everybody() {
		largest = max(largest, o.counted.movable)
	}
	if r.sum.fixed+largest > r.capacity {
		return &Unplaceable{r.sum.fixed, largest, r.capacity}
	}
	// What is away needs host memory; what the tenant has of that it keeps.
	return c.mem.arenas.Fits(less(add(r.promised(), sum), max(r.promised(), r.capacity)))
}
