// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Automatic suspending. A client that has not used the GPU for Memory.SuspendAfter, or for
// the time of its tenant, is
// suspended as by Suspend. A client without a grant is idle since it gave the GPU back. A
// client alone keeps its grant although it does nothing. So a holder that has made no calls
// for a while is told to leave once it has nothing to do: only the client knows whether a
// kernel still runs. The client then gives the GPU back, and its time begins.

// A holder without calls for an idlePart of its time, and for quietLeast, is told to leave.
// Clients report calls once a second.
const (
	idlePart   = 16
	quietLeast = 2 * time.Second
)

// lookForIdle has idle clients looked for in this Step.
func (c *GPU) lookForIdle() {
	if c.SuspendsIdle() {
		c.idle = base.Earliest{At: c.now, OK: true}
	}
}

// startWork is for a client that is granted.
func (c *GPU) startWork(cl *client) {
	cl.quiet, cl.calledAt = false, c.now
	if after := c.mem.IdleTime(cl.id); after > 0 && c.idle.OK {
		c.idle.Either(cl.quietAt(after), true)
	}
}

// quietAt returns when a holder has made no calls for long.
func (cl *client) quietAt(after time.Duration) base.Time {
	return cl.calledAt.Add(max(after/idlePart, quietLeast))
}

// called notes that a client works.
func (c *GPU) called(id base.ClientID) {
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
		due:    func(c *GPU) (base.Time, bool) { return c.idle.At, c.idle.OK },
		revoke: (*GPU).suspendIdle,
	}
}

// suspendIdle looks at all clients, and says when to look again. A client that does
// anything meanwhile only becomes idle later.
func (c *GPU) suspendIdle() {
	if !c.idle.OK || c.now < c.idle.At {
		return
	}
	var next base.Earliest
	for _, cl := range c.inOrder() {
		after := c.mem.IdleTime(cl.id)
		if after == 0 {
			continue
		}
		at := c.now.Add(after)
		switch {
		case cl.grant.holds() && !cl.quiet && cl.tenant.slot == nil:
			if quiet := cl.quietAt(after); quiet > c.now {
				at = min(at, quiet)
			} else {
				c.tellToLeave(cl, true)
			}
		case cl.grant == nil && cl.in == nil && !cl.later:
			if idle := cl.idleSince.Add(after); idle > c.now {
				at = idle
			} else {
				c.mem.SuspendIdle(cl.id)
			}
		}
		next.Either(at, true)
	}
	c.idle = next
}
