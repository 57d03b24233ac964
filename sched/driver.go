// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// The driver alone shares the GPU where time slices cannot be set and turns leave the GPU idle. Turns
// seem to leave little idle where one tenant keeps the GPU busy and another one gives it back in each
// of its pauses, and the second one loses most by them. So the driver is tried as soon as any client
// leaves gaps (meanIdle), and what all get then decides, beside what they got in turns.

const (
	minMixPause, maxMixPause = time.Minute, 16 * time.Minute
	// mixError is by how much the sum of what tenants get may seem less than in turns: the two are
	// measured over seconds.
	mixError = 0.02
)

// beginDriver leaves the GPU to the driver alone.
func (c *GPU) beginDriver() {
	a := &c.auto
	for _, cl := range c.inOrder() {
		cl.progress.EndTurns(a.turnEnded)
	}
	a.way = WayDriver
	a.startWindow(c.now)
	c.setEffective(Concurrent, because(reasonGaps))
}

// lookAtDriver judges a window of the driver alone: by what clients got, or, while that is not known
// of all of them, by the gaps that they leave.
func (c *GPU) lookAtDriver(window time.Duration) {
	a := &c.auto
	together, turns, known := c.driverGives(window)
	if known {
		a.wastes = together >= turns-mixError
	} else if waste, seen := a.wouldWaste(); seen {
		a.wastes = waste >= idleTogether
	}
	a.startWindow(c.now)
	if a.wastes {
		return
	}
	for _, cl := range c.inOrder() {
		cl.progress.StartTurns(c.now)
	}
	a.mixPause = base.Clamp(2*a.mixPause, minMixPause, maxMixPause)
	a.mixAfter = c.now.Add(a.mixPause)
}

// driverGives returns what clients got in the window together, and what they got in turns, waiting
// included, both of what each gets alone; false: of a client that was active that is not known.
func (c *GPU) driverGives(window time.Duration) (together, turns float64, known bool) {
	active := 0
	known = true
	members := c.activeMembers(window)
	for _, cl := range c.inOrder() {
		p := &cl.progress
		if rate, works := p.Rate(window); works {
			alone, _, measured := p.Alone()
			active++
			known = known && measured && p.ByTurns() > 0
			if known {
				together += ofSlice(cl, members) * rate / alone
				turns += ofSlice(cl, members) * p.ByTurns() / alone
			}
		}
		p.StartWindow()
	}
	return together, turns, known && active > 1
}
