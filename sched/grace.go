// SPDX-License-Identifier: Apache-2.0

package sched

// gracePeriods fences the grants that are not released in time. It also ends the time
// after a restart in which unknown clients may hold.
func gracePeriods() policy {
	return policy{
		due: func(c *GPU) (Time, bool) {
			var e earliest
			if cl := c.closing.head; cl != nil {
				e.either(cl.grant.graceFrom.Add(c.grace), true)
			}
			e.either(c.holdOff, c.holdOff != 0)
			return e.at, e.ok
		},
		revoke: (*GPU).fenceOverdue,
	}
}

// fenceOverdue fences the grants whose grace period is over.
func (c *GPU) fenceOverdue() {
	if c.holdOff != 0 && c.now >= c.holdOff {
		c.holdOff = 0
	}
	for cl := c.closing.head; cl != nil && c.now >= cl.grant.graceFrom.Add(c.grace); cl = c.closing.head {
		c.fence(cl.grant)
	}
}

func (c *GPU) fence(g *grant) {
	c.become(g, fenced)
	c.counters.Fences++
	c.do(Fence{g.client.id, g.epoch, g.claimed})
}
