// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
)

func (c *GPU) setMode(m Mode) {
	if m > Auto {
		panic(fmt.Sprintf("sched: unknown %v", m))
	}
	if m == c.mode {
		return
	}
	c.mode = m
	c.endCohort()
	c.auto.way, c.slices.stale = WayTurns, true
	c.auto.startWindow(c.now)
	if m != Auto && !(m == Concurrent && c.mem.Overfull()) {
		c.setEffective(m, because(reasonSet))
	}
}

// setEffective changes how grants are given from now on.
func (c *GPU) setEffective(m Mode, cause Cause) {
	if m == c.effective && cause == c.auto.cause {
		return
	}
	c.auto.cause = cause
	c.do(ModeChosen{m, cause})
	if m == c.effective {
		return
	}
	c.tellAll = true
	c.next = nil
	if m == Concurrent {
		c.effective = m
		for cl := c.open.head; cl != nil; cl = cl.next {
			cl.grant.alone = false
			if cl.grant.state == paused {
				c.resume(cl.grant)
			}
		}
		for c.beside.head != nil {
			c.change(c.beside.head.grant, granted, turnGrant)
		}
		c.kept = nil
		for _, t := range c.ganged {
			t.slot.Ignore()
		}
	} else {
		for cl := c.closing.head; cl != nil; cl = cl.next {
			c.askBack(cl.grant)
		}
		for _, l := range []*list{&c.open, &c.latency} {
			for l.head != nil {
				c.revoke(l.head.grant, ModeChange)
			}
		}
		// Clients that had the GPU at the same time are not ahead of each other.
		c.effective = m
		for _, t := range c.tenants {
			c.bill(t)
		}
		for _, t := range c.tenants {
			c.vtime = max(c.vtime, t.VT())
		}
		for _, t := range c.tenants {
			t.SetVT(c.vtime)
		}
		c.ready.reorder()
		c.deferred.reorder()
	}
	for _, cl := range c.inOrder() {
		c.review(cl.tenant) // who is urgent depends on the mode
		c.stand(cl)
	}
	for _, t := range c.ganged {
		t.slot.Tell()
	}
}
