// SPDX-License-Identifier: Apache-2.0

package sched

import "errors"

// Suspending. A tenant that is suspended gives back its grants, and all its memory leaves
// the GPU that can be moved. A client comes back with its next grant, in its turn: until
// then only its context is left on the GPU. A client that works is asked for its grant once
// and goes on at its next call. Resuming asks for the grant in the client's place.

// Why a tenant cannot be suspended or resumed. ErrNothingMoves and ErrNothingAway may hold
// on one GPU of several.
var (
	errNothingSwapped = errors.New("nothing is swapped: the scheduler runs without --swap-memory")
	ErrNothingMoves   = errors.New("none of its processes has memory that can be moved")
	ErrNothingAway    = errors.New("it is not suspended: none of its memory is off the GPU")
	errGangSuspends   = errors.New("it is part of a gang, which has the GPU as one")
	errNotSaid        = errors.New("its processes have not said yet what memory they have on the GPU: try again in a moment")
)

// suspend has a tenant leave the GPU.
func (c *GPU) suspend(tenant string) {
	if c.mem.residency == nil {
		return
	}
	for _, m := range c.membersOf(tenant) {
		if !c.leaves(m, false) {
			continue
		}
		if cl := c.clients[m.id]; cl != nil && cl.grant.holds() && cl.tenant.seat == nil {
			c.revoke(cl.grant, Suspending)
		}
	}
	c.memoryChanged()
}

// leaves has a client's memory leave, and reports whether there is any that can.
func (c *GPU) leaves(m *member, idle bool) bool {
	r := c.mem.residency
	was := r.suspended
	if !r.suspend(m.id) {
		return false
	}
	if r.suspended != was {
		c.mem.suspends++
		o := r.clients[m.id]
		c.do(Suspended{m.id, less(o.resident, o.fixed), idle})
	}
	return true
}

// resumeTenant has a tenant's memory come back: a client that has memory away, or may have, waits for
// a grant as if it had asked for one. A client without a connection comes back with its own request.
func (c *GPU) resumeTenant(tenant string) {
	if c.mem.residency == nil {
		return
	}
	for _, m := range c.membersOf(tenant) {
		o, cl := c.mem.residency.clients[m.id], c.clients[m.id]
		switch {
		case o.returns():
		case o.keep == Swapped && !o.reported && cl != nil && cl.grant == nil: // it has said nothing since its latest grant, or a restart
		default:
			c.mem.residency.wake(o) // nothing of it has left yet
			continue
		}
		if cl != nil && cl.connected && cl.tenant.seat == nil && !cl.grant.holds() {
			c.request(cl)
		}
	}
	c.memoryChanged()
}

// returns says whether a client has to be granted for its memory to come back. One that is unknown
// may have all of it away.
func (o *occupant) returns() bool {
	return o.keep == Swapped && (o.unknown || o.away > 0 || o.room < o.need())
}

// ResumeFits returns how much of a tenant's memory would come back to the GPU if it is
// resumed, or why nothing would.
func (c *GPU) ResumeFits(tenant string) (bytes uint64, why error) {
	r := c.mem.residency
	if r == nil {
		return 0, errNothingSwapped
	}
	why = ErrNothingAway
	unknown := false
	for _, m := range c.membersOf(tenant) {
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
func (c *GPU) SuspendFits(tenant string) (bytes uint64, why error) {
	r := c.mem.residency
	if r == nil {
		return 0, errNothingSwapped
	}
	gang, unknown := "", false
	var all []*occupant
	for _, m := range c.membersOf(tenant) {
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
	return bytes, c.suspendsFit(all)
}

// leastRoom is what a client may keep that has no room at all: pages say 1 byte then.
const leastRoom = 1

// Left says whether a client is suspended, nothing that can be moved is left of its memory
// on the GPU, and it does not wait to come back.
func (c *GPU) Left(id ClientID) bool {
	r, cl := c.mem.residency, c.clients[id]
	if r == nil || cl == nil || r.clients[id] == nil {
		return false
	}
	o := r.clients[id]
	return o.suspended && o.victim() && o.resident <= o.fixed+leastRoom && cl.grant == nil && cl.in == nil && !cl.later
}

// suspendsFit returns why there is no host memory for all memory of these clients; nil:
// there is.
func (c *GPU) suspendsFit(all []*occupant) error {
	r := c.mem.residency
	needed := c.mem.arenas.needed - c.mem.needed
	var added []*occupant
	for _, o := range all {
		if !o.suspended {
			o.suspended = true
			r.suspended++
			added = append(added, o)
		}
	}
	why := c.mem.arenas.fits(needed + r.arenaNeeded())
	for _, o := range added {
		r.wake(o)
	}
	return why
}

// suspend has a client's memory leave. It reports whether there is any that can.
func (r *residency) suspend(id ClientID) bool {
	o := r.clients[id]
	if o == nil || o.keep != Swapped || o.unknown {
		return false
	}
	r.sleep(o)
	r.leave(o)
	return true
}

// sleep says that a client is suspended.
func (r *residency) sleep(o *occupant) {
	if !o.suspended {
		o.suspended = true
		r.suspended++
	}
}

// wake says that a client is not suspended any more.
func (r *residency) wake(o *occupant) {
	if o.suspended {
		o.suspended = false
		r.suspended--
	}
}

// leave takes its room from a client that is suspended, once it has no grant.
func (r *residency) leave(o *occupant) {
	if o.suspended && o.victim() && o.room > o.fixed {
		r.take(o, o.room-o.fixed)
	}
}

// take lowers a client's room.
func (r *residency) take(o *occupant, bytes uint64) {
	o.room -= bytes
	if o.reported {
		o.may = max(o.room, o.resident) // what it does not use is free at once
		o.given = min(o.given, o.may)
	}
	r.recount(o)
}
