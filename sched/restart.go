// SPDX-License-Identifier: Apache-2.0

package sched

// wayNow returns the way that a restart is to go on with.
func (c *GPU) wayNow() Way {
	if c.mode != Auto {
		return WayTurns // the mode says all
	}
	return c.auto.way
}

// resumeWay goes on with the way from before a restart, once it is known that somebody held the GPU
// then. Nobody is connected.
func (c *GPU) resumeWay() {
	way := c.earlier
	if c.earlier = WayTurns; way == WayTurns {
		return
	}
	a := &c.auto
	a.keepUntil, a.measuredAt, a.gaps, a.wastes = c.now.Add(proofPatience), c.now, true, true
	switch way {
	case WaySlices, WayCohort:
		c.beginSlices(way)
	default:
		a.way = WayDriver
		c.setEffective(Concurrent, because(reasonGaps))
	}
}

// keepsWay says whether the way from before a restart goes on without being looked at: until all who
// held have had time to come back, it says nothing that some are not there. What those who are there
// have against it does not wait, nor does memory that does not fit.
func (c *GPU) keepsWay() bool {
	a, s := &c.auto, &c.slices
	if a.keepUntil == 0 {
		return false
	}
	if s.stale {
		a.against[WaySlices] = c.againstSlices()
	}
	why := a.against[WaySlices].Why
	apart := why == reasonLimit || why == reasonUnsliceable || why == reasonBare
	if c.now < a.keepUntil && !c.mem.Overfull() && (why == reasonNone || apart && c.cohort.on) {
		return true
	}
	a.keepUntil, s.stale = 0, true
	return false
}
