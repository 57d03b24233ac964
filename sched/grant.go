// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// enlist puts a client whose grant is live, or becomes so, into one of open,
// latency and closing, and counts it.
func (c *Core) enlist(cl *client, l *list) {
	c.bill(cl.tenant)
	if l == &c.closing {
		l.insert(cl)
		if !cl.latency {
			c.closingBatch++
		}
	} else {
		l.push(cl)
	}
	c.count(cl, +1)
	c.review(cl.tenant)
}

// unlist takes it out again.
func (c *Core) unlist(cl *client) {
	c.bill(cl.tenant)
	c.count(cl, -1)
	c.stopMoving(cl)
	if cl.in == &c.closing && !cl.latency {
		c.closingBatch--
	}
	cl.in.remove(cl)
	c.review(cl.tenant)
}

// ranAt returns how much of its turn a grant has had.
func (c *Core) ranAt(cl *client) time.Duration {
	if cl.paused || cl.moving {
		return cl.ran
	}
	return cl.ran + c.now.Sub(cl.runFrom)
}

// endGrant takes the client's grant away: released, reclaimed, or never held.
func (c *Core) endGrant(cl *client, how EndReason) {
	held := c.now.Sub(cl.since)
	r := Released{Client: cl.id, Tenant: cl.tenant.displayName(), Epoch: cl.epoch, Reason: how, Held: held, Fenced: cl.fenced}
	if cl.revoked {
		r.Drained = c.now.Sub(cl.revokedAt)
	}
	if cl.in == &c.open || cl.in == &c.closing {
		c.spare()
		c.reserve() // those who wait go before it, should it want another one at once
	}
	c.unclose(cl)
	r.Moved = cl.moved
	cl.moved, cl.ready = 0, false
	cl.held += held
	cl.epoch = 0
	cl.want = false
	cl.revoked, cl.claimed = false, false
	cl.latency, cl.paused = false, false
	t := cl.tenant
	if t.gang != nil {
		t.gang.releasedAt = c.now
	}
	if t.credit < 0 && t.limited() {
		t.credit = t.credit * time.Duration(100-c.tuning.DropCarry) / 100
	}
	if t.limited() && t.credit < t.slice()/4 {
		t.capped = true // a turn of less is not worth its hand-over
	}
	c.review(t)
	if how == EndIdle && c.waiting > 0 {
		c.auto.short++
	}
	c.do(r)
}

// unclose takes the grant out of what it is in, as if it were none.
func (c *Core) unclose(cl *client) {
	if cl.fenced {
		c.bill(cl.tenant)
		c.count(cl, -1)
		cl.fenced = false
	} else if cl.in != nil {
		c.unlist(cl)
	}
}

// startClosing lets the grace period of a grant begin, if it has not.
func (c *Core) startClosing(cl *client) {
	if cl.fenced || cl.in == &c.closing {
		return
	}
	if cl.in != nil {
		cl.ran, cl.runFrom = c.ranAt(cl), c.now
		c.unlist(cl)
	}
	cl.paused = false
	cl.base = c.now
	c.enlist(cl, &c.closing)
}

// inOrder returns all clients in the order of their ids.
func (c *Core) inOrder() []*client {
	return slices.SortedFunc(maps.Values(c.clients), func(a, b *client) int { return cmp.Compare(a.id, b.id) })
}
