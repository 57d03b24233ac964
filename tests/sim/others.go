// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// Memory of others than clients, in some worlds: a desktop or a program without the shim, which takes some and gives it
// back as it likes, and the context of each process. The core is told of none of it: the driver refuses a client
// memory that the core has given it room for, and its shim says so once.

// othersMemory is what others than clients have.
type othersMemory struct {
	on      bool
	desktop uint64
	context uint64  // of each process
	calm    float64 // less happens, by that factor
	want    uint64  // what clients would like to have at most, so that all fits by what is promised; 0: as in other worlds

	fitsFrom base.Time // since then all that is promised has fitted beside that
}

const (
	// oneWord is after how long clients take turns again by the word of one tenant, and how long those last.
	oneWord = 100 * time.Second
	// leavesWithin is after how long a client that was suspended has left, or has a grant and does not leave.
	leavesWithin = 5 * time.Second
	// forgets is after how long the core has forgotten what others had, and a little more.
	forgets = 12 * time.Second
)

// newOthers has others than clients have memory in this world.
func (w *world) newOthers() {
	w.mem = memoryWorld{limits: true, changes: []float64{0.001, 0.05}[w.rng.IntN(2)], capacity: gpuMemory, headroom: []uint64{0, 4}[w.rng.IntN(2)], sleeps: []float64{0, 0.01}[w.rng.IntN(2)]}
	if w.chance(0.5) {
		w.mem.suspendAfter = residency.MinSuspendAfter
	}
	w.mem.others = othersMemory{on: true, context: w.rng.Uint64N(3), calm: 1}
	if w.chance(0.7) {
		w.mem.others.want = gpuMemory * (70 + w.rng.Uint64N(35)) / 100
	}
	if w.chance(0.5) {
		w.daemon.mode = sched.Concurrent
	}
	w.faults.hostile = 0
	if w.chance(0.5) { // nothing comes to anybody's help
		w.faults = faults{cutDrains: w.faults.cutDrains}
		w.mem.others.calm = 0.05
	}
	w.faults.operator = []float64{0, 0, 0.005}[w.rng.IntN(3)]
}

// wantsLittle has a client want no more than its part of what all are to want, in worlds of which that is so.
func (c *client) wantsLittle() {
	if most := c.w.mem.others.want / uint64(len(c.w.client)); most != 0 {
		c.mem.want = max(most-c.w.rng.Uint64N(4), 1)
		if c.w.chance(0.1) {
			c.mem.want = 1 + c.w.rng.Uint64N(most)
		}
	}
}

// idlesFirst is for how long a client may have memory before it works.
func (c *client) idlesFirst() time.Duration {
	if c.w.mem.others.on && c.w.chance(0.3) {
		return 5 * time.Minute
	}
	return 20 * time.Millisecond
}

// mayGrow is a client's allocation under its grant while nobody has to make room: it gets all or nothing.
func (c *client) mayGrow(n uint64) bool {
	return !c.w.mem.others.on || c.local == 0 || !c.w.daemon.still || n <= c.w.freeMemory()
}

// othersChange lets the desktop take or give back memory, no more than there is, and the operator suspend tenants.
func (w *world) othersChange() {
	o := &w.mem.others
	if !o.on {
		return
	}
	if w.chance(0.01 * o.calm) {
		want := []uint64{0, 0, 5, 10, 30}[w.rng.IntN(5)]
		o.desktop = min(want, o.desktop+w.freeMemory())
		w.report.Desktops++
	}
	if w.chance(0.02*o.calm) && len(w.tenants) != 0 && w.daemon.core != nil {
		t := w.tenants[w.rng.IntN(len(w.tenants))]
		w.daemon.observeHost()
		if _, why := w.daemon.core.SuspendFits(t.name); why == nil && t != w.daemon.departs {
			w.daemon.step(sched.Suspend{Tenant: t.name})
		}
	}
	w.lookWhetherAllFits()
}

// freeMemory is what the driver gives.
func (w *world) freeMemory() uint64 {
	used := w.onGPU() + w.othersHave()
	return w.mem.capacity - min(used, w.mem.capacity)
}

func (w *world) othersHave() uint64 {
	sum := w.mem.others.desktop
	for _, c := range w.client {
		if c != nil {
			sum += w.mem.others.context
		}
	}
	return sum
}

// lookWhetherAllFits notes since when all that is promised does.
func (w *world) lookWhetherAllFits() {
	sum := w.othersHave()
	for _, n := range w.daemon.promised {
		sum += n
	}
	if sum > w.mem.capacity-w.mem.headroom || w.daemon.core == nil {
		w.mem.others.fitsFrom = w.now
	}
}

// othersLeap is for a clock that has leapt: nobody has noticed that time.
func (w *world) othersLeap() {
	w.mem.others.fitsFrom = w.now
	for _, c := range w.client {
		if c != nil {
			c.mem.lacksFrom = 0
		}
	}
}

// makesRoom is for a client that is to make room: it is not where pages say that nobody has to, or all has fitted for
// long, but to leave. One that leaves may have a grant in the same Step, and be suspended no more.
func (j *judge) makesRoom(id base.ClientID) {
	w := j.w
	if cm, _ := w.daemon.core.ClientMemory(id); cm.Suspended || j.suspended[id] == w.now {
		return
	}
	if w.daemon.still {
		w.fail("client %d is to make room, and the pages say that nobody has to", id)
	}
	if o := w.mem.others; o.on && !w.modesChange && w.now.Sub(j.suspended[id]) > leavesWithin && w.now.Sub(o.fitsFrom) > forgets+w.daemon.grace {
		w.fail("client %d is to make room, and all has fitted since %v", id, time.Duration(o.fitsFrom))
	}
}

// checkFills holds the core to its word that nobody has a grant for long without its memory while others could make room.
func (j *judge) checkFills() {
	w := j.w
	if !w.mem.others.on {
		return
	}
	for _, c := range w.client {
		if c == nil {
			continue
		}
		if c.local == 0 || !c.attached || c.mem.away == 0 || w.now < c.stopped || w.outOfRoom(c) {
			c.mem.lacksFrom = 0
			continue
		}
		if c.mem.lacksFrom == 0 {
			c.mem.lacksFrom = w.now
		}
		wait := w.now.Sub(c.mem.lacksFrom)
		w.report.LongestLack = max(w.report.LongestLack, wait)
		if bound := oneWord + 4*maxGrace; wait > bound {
			w.fail("client %d has a grant, and gets no memory for %v, more than %v", c.id, wait, bound)
		}
	}
}
