// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// LatencySlice is the GPU's own time slice of other tenants' processes while a latency
// tenant is there. Beside a tenant with this slice a request of 0.53 ms took 0.57 ms (p99,
// H200), and 2.56 ms beside one with the driver's slice of 2 ms.
const LatencySlice = 50 * time.Microsecond

// timeSlices lets the GPU's own scheduler serve latency tenants soon. A latency tenant is
// let in beside the holder, whose kernels may still run for milliseconds: the shorter
// the holder's slice, the sooner the latency tenant's kernels run. With one process on the
// GPU a short slice costs nothing.
func timeSlices() policy {
	return policy{grant: (*GPU).setSlices}
}

// sliceState is what a GPU knows of time slices.
type sliceState struct {
	stale bool // clients or their shares have changed
	ever  bool // a tenant's priority was ever latency
	short bool // a latency tenant is there
}

// setSlices tells clients their slices, where they have changed. When clients or shares
// change it costs O(n), on a GPU that ever had a latency tenant; else nothing.
func (c *GPU) setSlices() {
	if !c.slices.stale {
		return
	}
	c.slices.stale = false
	short := c.slices.ever && c.hasLatencyTenant()
	if !short && !c.slices.short {
		return
	}
	c.slices.short = short
	for _, cl := range c.inOrder() {
		want := time.Duration(0)
		if short && cl.tenant.share.Priority != Latency {
			want = LatencySlice
		}
		if cl.connected && cl.slice != want {
			cl.slice = want
			c.do(Slice{cl.id, want})
		}
	}
}

func (c *GPU) hasLatencyTenant() bool {
	for _, cl := range c.clients {
		if cl.connected && cl.tenant.share.Priority == Latency {
			return true
		}
	}
	return false
}
