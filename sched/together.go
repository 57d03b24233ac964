// SPDX-License-Identifier: Apache-2.0

package sched

// together grants every request at once, in concurrent mode: clients share the GPU by
// the driver's own time slices.
func together() policy {
	return policy{grant: func(c *GPU) {
		for c.effective == Concurrent && c.ready.top() != nil {
			c.grant(c.ready.top().queue.head)
		}
	}}
}
