// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Way is how clients share a GPU. It is recorded with the holders, so that a restart stops nobody:
// where all gates are open, all clients go on as they did.
type Way uint8

const (
	// WayTurns: one tenant after the other. It is never refused.
	WayTurns Way = iota
	// WaySlices: all gates are open, and clients share by the GPU's own time slices, whose lengths
	// the core sets (slices.go).
	WaySlices
	// WayCohort: tenants that need turns of their own have these, and all others have one turn
	// together, in which they share by time slices (cohort.go).
	WayCohort
	// WayDriver: all gates are open, and time slices are the driver's.
	WayDriver
)

// candidates are the ways in mode Auto, the best first. The first one is taken that is not refused.
var candidates = [...]Way{WaySlices, WayCohort, WayDriver, WayTurns}

var wayNames = [...]string{"turns", "slices", "cohort", "driver"}

func (w Way) String() string { return base.Name(w, "way", wayNames[:]...) }

// MarshalText is for records.
func (w Way) MarshalText() ([]byte, error) { return []byte(w.String()), nil }

// UnmarshalText takes a way that only a newer scheduler knows for turns.
func (w *Way) UnmarshalText(text []byte) error {
	*w = Way(max(slices.Index(wayNames[:], string(text)), 0))
	return nil
}

const (
	autoWindow  = time.Second     // of looking at turns, and between two looks at who may share
	staleWindow = 5 * time.Second // the same, with few samples

	// Mixing costs tenants that keep the GPU busy some 7 % (two matrix products on an
	// H200), so turns may waste about as much.
	idleInTurns  = 0.10 // of the time of turns: more is worth mixing
	idleTogether = 0.05 // the sum of tenants at the same time: less is worth turns

	sharedWindow = 2 * time.Second // of looking at tenants at the same time
)

// chosenWay has the way follow what is known and what is measured.
func chosenWay() policy {
	return policy{
		due:    func(c *GPU) (base.Time, bool) { return c.auto.keepUntil, c.mode == Auto && c.auto.keepUntil != 0 },
		revoke: (*GPU).lookAtMode,
	}
}

// lookAtMode changes the way if that is due.
func (c *GPU) lookAtMode() {
	a := &c.auto
	switch {
	case c.mode == Concurrent && c.mem.Overfull():
		a.way = WayTurns
		c.setEffective(Exclusive, because(reasonSwap)) // at the same time they would wait for each other
	case c.mode == Concurrent:
		a.way = WayDriver
		c.setEffective(Concurrent, because(reasonSet))
	}
	if c.mode != Auto || c.keepsWay() {
		return
	}
	if c.slices.stale || c.now.Sub(c.slices.lookedAt) >= autoWindow {
		c.lookAtWays()
	}
	c.watch(c.now.Sub(a.since))
	for _, w := range candidates {
		if c.refused(w).Why == reasonNone {
			c.take(w)
			return
		}
	}
}

// lookAtWays finds out who needs turns of its own, and which ways that leaves.
func (c *GPU) lookAtWays() {
	a, s := &c.auto, &c.slices
	crowded := c.crowded()
	if crowded != s.crowded {
		for _, cl := range c.inOrder() {
			cl.progress.ForgetTurns() // is another thing without the latency tenant
		}
		if crowded && c.cohort.on { // the cohort goes on
			a.gaps = c.cohort.idle > idleTogether
		}
	}
	s.crowded, s.lookedAt = crowded, c.now
	a.gaps = a.gaps && crowded
	c.lookWhoIsApart()
	a.against[WaySlices] = c.againstSlices()
	a.against[WayCohort] = c.againstCohort()
	a.against[WayDriver] = c.againstDriver()
	for w, cause := range a.against {
		if cause.Why != reasonNone {
			a.refusedAt[w] = c.now
		}
	}
}

// refused says why a way is not taken now; reasonNone: it may be.
func (c *GPU) refused(w Way) Cause {
	a := &c.auto
	switch {
	case w == WayTurns:
		return Cause{}
	case c.mem.Overfull():
		return because(reasonSwap)
	case a.against[w].Why != reasonNone:
		return a.against[w]
	case w == WayDriver && !a.wastes:
		return because(reasonTurns)
	case w == WayDriver || w == a.way:
		return Cause{}
	case c.now < a.notBefore && !c.othersNow():
		return a.left
	case !c.mayBegin(w):
		return because(reasonMeasure)
	}
	return Cause{}
}

// take has clients share in a way from now on. A way that was left for turns is not taken again
// for a while, so that the way does not swing.
func (c *GPU) take(w Way) {
	a := &c.auto
	if w == a.way {
		if w == WayTurns {
			c.setEffective(Exclusive, c.whyTurns())
		}
		return
	}
	switch w {
	case WaySlices, WayCohort:
		c.beginSlices(w)
	case WayDriver:
		if c.anySliced() {
			c.endSlices(c.refused(a.way), minTurns)
		}
		c.beginDriver()
	case WayTurns:
		c.endSlices(c.whyTurns(), minTurns)
	}
}

// whyTurns says why clients take turns.
func (c *GPU) whyTurns() Cause {
	a := &c.auto
	switch first := a.against[WaySlices]; {
	case c.mem.Overfull():
		return because(reasonSwap)
	case len(c.clients) < 2:
		return because(reasonAlone)
	case first.Why != reasonNone:
		return first
	case c.now < a.notBefore:
		return a.left
	}
	return because(reasonTurns)
}

// mayBegin says whether clients that do not share by slices may begin to: nothing has been against
// it for a moment, there is something to share, and, where tenants are promised parts, turns have
// shown what each gets alone. From one way of slices to the other nothing has to be waited for.
func (c *GPU) mayBegin(w Way) bool {
	known, n := c.sharers(w == WayCohort)
	free := c.now.Sub(c.auto.refusedAt[w])
	return n > 1 && (c.anySliced() || free >= autoWindow && (known || free >= staleWindow || w == WaySlices && !c.uneven()))
}

// watch looks at the window that ends, and chooses what follows from it: in turns, whether these
// leave the GPU idle; at the same time, whether turns would.
func (c *GPU) watch(window time.Duration) {
	a := &c.auto
	switch a.way {
	case WaySlices, WayCohort:
		if !c.mem.Overfull() && a.against[a.way].Why == reasonNone && c.sharedIn(window) >= c.sliceWindow() {
			c.lookAtSlices(window)
		}
	case WayDriver:
		if window >= sharedWindow {
			c.lookAtDriver(window)
		}
	case WayTurns:
		idle, known := a.idle(window)
		if window < autoWindow || !known && window < staleWindow {
			return
		}
		a.wastes = known && c.now >= a.mixAfter && max(idle, a.meanIdle()) > idleInTurns
		if c.slices.crowded {
			if why := a.against[WayCohort].Why; why == reasonBusy || why == reasonNone {
				idle = a.meanIdle()
			}
			if gaps := known && idle > idleInTurns && c.now >= a.notBefore; gaps != a.gaps {
				a.gaps = gaps
				c.lookAtWays()
			}
		}
		a.startWindow(c.now)
	}
}

// againstSlices says why clients cannot all share the GPU by time slices.
func (c *GPU) againstSlices() Cause {
	var refused Cause
	for _, cl := range c.inOrder() {
		t := cl.tenant
		switch {
		case !cl.connected:
			continue // it has no time slice of ours, and comes back soon, or ends
		case c.gangPlays(cl):
			return because(reasonGang)
		case t.limited():
			return because(reasonLimit)
		case !cl.wanted:
			continue
		case t.overlaps() && c.hasLatencyTenant():
			return because(reasonOverlap)
		case t.overlaps():
			continue // its MPS server has a slice as any process, which stays the driver's own
		case t.share.Priority == Latency:
			continue // it needs no slice of a certain length
		}
		if why := c.notSliceable(cl); why.Why != reasonNone {
			refused = why
		}
	}
	switch {
	case refused.Why != reasonNone:
		return refused
	case c.slices.crowded && !c.auto.gaps:
		return because(reasonLatency)
	}
	return Cause{}
}

// againstDriver says why the driver alone cannot share the GPU: it knows no parts and no gangs.
func (c *GPU) againstDriver() Cause {
	for _, cl := range c.inOrder() {
		if c.gangPlays(cl) {
			return because(reasonGang)
		}
	}
	switch {
	case c.exact > 0:
		return because(reasonShares)
	case c.slices.crowded:
		return because(reasonLatency)
	}
	return Cause{}
}

// gangPlays says whether a client is of a gang and works. A rank that sleeps, or has not called
// CUDA yet, decides nothing for the others.
func (c *GPU) gangPlays(cl *client) bool {
	return cl.connected && cl.wanted && cl.tenant.slot != nil && !cl.tenant.overlaps() && !c.sleeps(cl)
}
