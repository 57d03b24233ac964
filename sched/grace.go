// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// A tenant that drains slowly keeps the others waiting. What its latest drain took beyond
// drainAllowance is taken off the grace of its next one, of which minGracePart is left at
// least; and it is billed in full, whatever Tuning.DropTail forgives. So a tenant cannot
// use up nearly all its grace each time: with a grace of 10 s, drains of up to 5 s are
// never fenced, and of several longer ones each second one is.
const (
	// drainAllowance is what a drain may take: 2 ms, after which a shim that can takes its
	// work off the GPU, and time for its threads to run on a busy machine.
	drainAllowance = 50 * time.Millisecond
	minGracePart   = 8
)

// lessGrace is what a drain of the tenant has less than a grace period.
func (c *GPU) lessGrace(t *tenant) time.Duration {
	return min(t.slow, c.grace-c.grace/minGracePart)
}

// noteDrain is for a grant that ends after it was asked back. The tenant is billed up to now.
func (c *GPU) noteDrain(g *grant) {
	t := g.client.tenant
	t.slow, t.slowAt = max(c.now.Sub(g.revokedAt)-drainAllowance, 0), c.now
	if forgiven := t.slow * time.Duration(c.tuning.DropTail) / 100; forgiven > 0 && g.state == draining {
		t.Charge(c.now, forgiven, c.ratesOf(t))
		if t.inHeap() {
			c.heap(t.place).fix(t)
		}
	}
}

// gracePeriods fences the grants that are not released in time. It also ends the time
// after a restart in which unknown clients may hold.
func gracePeriods() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			if cl := c.closing.head; cl != nil {
				e.Either(cl.grant.graceFrom.Add(c.grace), true)
			}
			e.Either(c.holdOff, c.holdOff != 0)
			return e.At, e.OK
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
