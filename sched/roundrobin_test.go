// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// An example of a policy, as small as one can be: the GPU goes from tenant to tenant in the order
// of their names. Weights are the lengths of turns still, which are the core's. It stands in for turns in a
// script (testdata/round_robin.txt), and not in policies: turns also has gangs, groups, cohorts and
// memory that moves take their turns, and says who is next before it is granted.
func roundRobin() policy {
	var last tenantKey // who had the GPU latest

	// next is the first tenant behind that one that waits.
	next := func(c *GPU) *tenant {
		waiting := slices.DeleteFunc(c.tenantsInOrder(), func(t *tenant) bool { return !t.takesTurn() })
		for _, t := range waiting {
			if t.key.compare(last) > 0 {
				return t
			}
		}
		if len(waiting) > 0 {
			return waiting[0]
		}
		return nil
	}

	// over is when the turn of the holder ends; nobody waits: never.
	over := func(c *GPU) (at base.Time, ok bool) {
		if holder := c.open.head; holder != nil && next(c) != nil {
			return holder.grant.since.Add(c.quantum), true
		}
		return 0, false
	}

	return policy{
		due: over,
		revoke: func(c *GPU) {
			if at, ok := over(c); ok && c.now >= at {
				c.revoke(c.open.head.grant, QuantumOver)
			}
		},
		grant: func(c *GPU) {
			for t := next(c); t != nil && c.effective == Exclusive && c.free(); t = next(c) {
				last = t.key
				c.grant(t.queue.head)
			}
		},
	}
}
