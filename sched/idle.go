// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// Automatic suspending. A client that has not used the GPU for Memory.SuspendAfter is
// suspended as by Suspend. A client without a grant is idle since it gave the GPU back. A
// client alone keeps its grant although it does nothing. So a holder that has made no calls
// for a while is told to leave once it has nothing to do: only the client knows whether a
// kernel still runs. The client then gives the GPU back, and its time begins.

// Limits of Memory.SuspendAfter, the time after which idle clients are suspended.
const (
	MinSuspendAfter = time.Second
	MaxSuspendAfter = 365 * 24 * time.Hour
)

// A holder without calls for an idlePart of its time, and for quietLeast, is told to leave.
// Clients report calls once a second.
const (
	idlePart   = 16
	quietLeast = 2 * time.Second
)

// lookForIdle has idle clients looked for in this Step.
func (c *GPU) lookForIdle() {
	if c.mem.residency != nil && c.mem.SuspendAfter > 0 {
		c.mem.idle = earliest{c.now, true}
	}
}

// startWork is for a client that is granted.
func (c *GPU) startWork(cl *client) {
	cl.quiet, cl.calledAt = false, c.now
	if c.mem.idle.ok {
		c.mem.idle.either(cl.quietAt(c.mem.SuspendAfter), true)
	}
}

// quietAt returns when a holder has made no calls for long.
func (cl *client) quietAt(after time.Duration) Time {
	return cl.calledAt.Add(max(after/idlePart, quietLeast))
}

// called notes that a client works.
func (c *GPU) called(id ClientID) {
	if cl := c.clients[id]; cl != nil {
		cl.calledAt = c.now
		c.tellToLeave(cl, false)
	}
}

// tellToLeave tells a holder whether to give the GPU back when it has nothing to do,
// though nobody waits.
func (c *GPU) tellToLeave(cl *client, on bool) {
	if cl.quiet == on {
		return
	}
	cl.quiet = on
	if cl.grant.holds() {
		c.notice(cl)
	}
}

// idleClients suspends clients that have been idle for their time.
func idleClients() policy {
	return policy{
		due:    func(c *GPU) (Time, bool) { return c.mem.idle.at, c.mem.idle.ok },
		revoke: (*GPU).suspendIdle,
	}
}

// suspendIdle looks at all clients, and says when to look again. A client that does
// anything meanwhile only becomes idle later.
func (c *GPU) suspendIdle() {
	mem := &c.mem
	if !mem.idle.ok || c.now < mem.idle.at {
		return
	}
	var next earliest
	for _, cl := range c.inOrder() {
		m := mem.members[cl.id]
		if m == nil {
			continue
		}
		at := c.now.Add(mem.SuspendAfter)
		switch {
		case cl.grant.holds() && !cl.quiet && cl.tenant.seat == nil:
			if quiet := cl.quietAt(mem.SuspendAfter); quiet > c.now {
				at = min(at, quiet)
			} else {
				c.tellToLeave(cl, true)
			}
		case cl.grant == nil && cl.in == nil && !cl.later:
			if idle := cl.idleSince.Add(mem.SuspendAfter); idle > c.now {
				at = idle
			} else {
				c.suspendClient(m)
			}
		}
		next.either(at, true)
	}
	mem.idle = next
}

// suspendClient suspends an idle client, if that moves anything (Memory.Contexts: or not) and there is host memory
// for it. Else that is tried again after its time.
func (c *GPU) suspendClient(m *member) {
	o := c.mem.residency.clients[m.id]
	if o.keep != Swapped || o.unknown || o.suspended || m.gang != "" || o.resident <= o.fixed && !c.mem.Contexts || c.suspendsFit([]*occupant{o}) != nil {
		return
	}
	c.leaves(m, true)
	c.memoryChanged()
}
