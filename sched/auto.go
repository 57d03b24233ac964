// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// In mode Auto the core chooses. Where all clients have proved that their time slices can
// be set, and their memory fits, they share by slices (slices.go), which waste nothing.
// Else turns serve tenants best that keep the GPU busy, and are the only way once memory
// is short. A tenant that leaves the GPU idle in its turn, because the CPU has work to do
// between kernels, wastes that time for all: such tenants get more done at the same time,
// by the driver's own time slices. So do tenants whose turns end after a moment.
//
// Shims tell how often the GPU had work of theirs (Utilization). In turns the samples
// say what turns waste. At the same time they say what turns would waste: a tenant
// that is idle for a part f of the time beside n others, on a GPU that is busy, would
// be idle for about n times f alone.
const (
	reasonSet    = "as set"
	reasonTurns  = "tenants keep the GPU busy: turns cost less than mixing"
	reasonMemory = "memory is short: more than 90 % is reserved"
	reasonSwap   = "more memory is reserved than the GPU has: tenants take turns, and what one lacks is moved out of the others"
	reasonShares = "tenants have limits, requests or priorities"
	reasonShort  = "turns are short: passing the GPU on costs more than sharing it"
	reasonGaps   = "tenants leave the GPU idle in their turns: at the same time they get more done"

	reasonSlices  = "by time slices: every process can set its slice, and all memory fits"
	reasonLimit   = "a tenant has a core limit, which turns hold exactly"
	reasonCohort  = "tenants with core limits take turns with all others together, who share their turn by time slices"
	reasonGang    = "a gang is granted together, which takes turns"
	reasonOverlap = "an overlap group beside a latency tenant takes turns: the slice of its MPS server cannot be shortened"
	reasonBusy    = "beside a latency tenant that is of use only if they leave the GPU idle"
	reasonUneven  = "beside a latency tenant their time slices are too short for unequal parts"
	reasonLatency = "a latency tenant beside several others: it runs beside them, and they take turns"
	reasonMore    = "tenants get more by turns than by slices"
	reasonParts   = "tenants do not get their parts by slices"
	reasonMeasure = "turns measure what each tenant gets alone"

	autoWindow = time.Second      // of looking at turns
	autoTrial  = 10 * time.Second // of concurrent mode, before it looks again
	// shortTurns a second, given back early while somebody waited, are too
	// many: at some 0.3 ms each that is 5 % of the GPU.
	shortTurns = 160

	// Mixing costs tenants that keep the GPU busy some 7 % (two matrix products on an
	// H200), so turns may waste about as much.
	idleInTurns  = 0.10 // of the time of turns: more is worth mixing
	idleTogether = 0.05 // the sum of tenants at the same time: less is worth turns

	sharedWindow = 2 * time.Second // of looking at tenants at the same time
	fewSamples   = 50              // of a GPU in turns, or of a client at the same time, say nothing
	staleWindow  = 5 * time.Second // with few samples
	// A client looks 200 times a second. One that says more counts for no more.
	mostSamples = 250
)

// auto is what mode Auto knows.
type auto struct {
	reason          string
	reserved, total uint64 // memory, bytes
	swap            bool   // what is reserved beyond the total is moved out
	since           Time   // start of the window
	short           int    // turns in it that were given back early while somebody waited
	until           Time   // end of a trial of concurrent mode; 0: none

	turnEnded  Time                 // the latest
	slicing    bool                 // clients share by time slices
	slicedFrom Time                 // no slices before
	left       string               // why not
	measuredAt Time                 // when turns began that measure tenants
	backoff    time.Duration        // the latest time for which slices were given up
	gaveUp     map[ClientID]float64 // calls per second alone of the clients for which they were
	worse      int                  // windows, one after the other, in which slices gave less than turns
	underfed   int                  // windows, in the same way, in which a tenant did not get its part, and did by turns
	gaps       bool                 // several beside a latency tenant leave the GPU idle in their turns
	util       map[ClientID]samples
}

// samples are how often a client looked in the window, and how often the GPU had work
// of it then.
type samples struct{ n, busy int }

func (a *auto) startWindow(now Time) {
	a.since, a.short = now, 0
	clear(a.util)
}

// utilization takes note of what a client says.
func (c *GPU) utilization(ev Utilization) {
	if c.mode != Auto || c.clients[ev.Client] == nil || ev.Samples <= 0 {
		return
	}
	a := &c.auto
	if a.util == nil {
		a.util = map[ClientID]samples{}
	}
	cl := c.clients[ev.Client]
	if cl.in != &c.beside {
		cl.progress.report(c.now, ev, c.effective == Exclusive && !c.inCohort(cl.tenant), c.shareClock())
	}
	if cl.tenant.share.Priority == Latency {
		c.noteUse(cl.tenant, ev)
	}
	if !cl.tenant.mayShareTurn() {
		return // what it leaves to others says nothing of what these gain at the same time
	}
	s := a.util[ev.Client]
	s.n += ev.Samples
	s.busy += min(ev.Busy, ev.Samples)
	a.util[ev.Client] = s
}

// idle returns the part of the time of turns in which the GPU was idle; false: too
// little is known.
func (a *auto) idle(window time.Duration) (float64, bool) {
	var n, idle float64
	for _, id := range slices.Sorted(maps.Keys(a.util)) { // sums of floats depend on the order
		s := a.util[id]
		weight := min(float64(s.n), mostSamples*window.Seconds())
		n += weight
		idle += weight * float64(s.n-s.busy) / float64(s.n)
	}
	return idle / n, n >= fewSamples
}

// meanIdle is idle with each client counted alike: one that gives the GPU back as soon as it
// pauses has little of the time of turns, and is the one that loses by them.
func (a *auto) meanIdle() (sum float64) {
	for _, id := range slices.Sorted(maps.Keys(a.util)) {
		s := a.util[id]
		sum += float64(s.n-s.busy) / float64(s.n)
	}
	return sum / float64(max(len(a.util), 1))
}

// wouldWaste returns about which part of their turns tenants would leave the GPU idle
// that work at the same time now; false: too little is known.
func (a *auto) wouldWaste() (float64, bool) {
	clients, idle := 0, 0.0
	for _, id := range slices.Sorted(maps.Keys(a.util)) {
		if s := a.util[id]; s.n >= fewSamples {
			clients++
			idle += float64(s.n-s.busy) / float64(s.n)
		}
	}
	return idle, clients > 1
}

// chosenMode has the mode follow what is measured.
func chosenMode() policy {
	return policy{
		due:    func(c *GPU) (Time, bool) { return c.auto.until, c.mode == Auto && c.auto.until != 0 },
		revoke: (*GPU).lookAtMode,
	}
}

func (a *auto) memoryShort() bool { return a.total > 0 && !a.swap && a.reserved > a.total/10*9 }

// overfull says whether clients cannot all have their memory on the GPU.
func (a *auto) overfull() bool { return a.swap && a.reserved > a.total }

// lookAtWays finds out who can share the GPU by time slices.
func (c *GPU) lookAtWays() {
	a, s, co := &c.auto, &c.slices, &c.cohort
	crowded := c.crowded()
	if co.on && crowded && !s.crowded { // the cohort goes on
		a.gaps = co.idle > idleTogether
		for _, cl := range c.clients {
			cl.progress.byTurns = 0 // was another thing, without the latency tenant
		}
	}
	s.crowded, s.lookedAt = crowded, c.now
	a.gaps = a.gaps && s.crowded
	s.why = c.whyTurns()
	co.allowed, co.why = false, ""
	if s.why == reasonLimit {
		if co.allowed, co.why = c.cohortAllowed(); co.why != "" {
			s.why += "; the others do not share theirs: " + co.why
		}
	}
}

// lookAtMode chooses the mode anew if that is due.
func (c *GPU) lookAtMode() {
	a := &c.auto
	switch {
	case c.mode == Exclusive:
		return
	case c.mode == Concurrent && a.overfull():
		c.setEffective(Exclusive, reasonSwap) // at the same time they would wait for each other
		return
	case c.mode == Concurrent:
		c.setEffective(Concurrent, reasonSet)
		return
	}
	exclusive := func(reason string) {
		a.until = 0
		a.startWindow(c.now)
		c.setEffective(Exclusive, reason)
	}
	window := c.now.Sub(a.since)
	if c.slices.stale || c.now.Sub(c.slices.lookedAt) >= autoWindow {
		c.lookAtWays()
	}
	busy, shares := reasonTurns, reasonShares
	if why := c.slices.why; why == reasonOverlap || why == reasonGang {
		shares = why
	}
	if c.now < a.slicedFrom {
		busy, shares = a.left, a.left
	}
	switch {
	case a.overfull():
		c.endSlices(reasonSwap, 0)
	case a.memoryShort():
		c.endSlices(reasonMemory, 0)
	case a.slicing && c.slices.why != "":
		c.endSlices(c.slices.why, minTurns)
	case c.cohort.on && !c.cohort.allowed:
		c.endSlices(cmp.Or(c.slices.why, reasonTurns), minTurns)
	case c.anySliced():
		if c.sharedIn(window) >= c.sliceWindow() {
			c.lookAtSlices(window)
		}
	case window >= autoWindow && (c.slices.why == "" || c.cohort.allowed) && (c.now >= a.slicedFrom || c.othersNow()) && c.readyForSlices(window, c.cohort.allowed):
		c.beginSlices(c.cohort.allowed)
	case c.slices.why == reasonLatency || c.cohort.why == reasonBusy:
		if c.slices.why == reasonLatency {
			shares = reasonLatency
		}
		idle, known := a.idle(window)
		if window < autoWindow || !known && window < staleWindow && a.reason == shares {
			return
		}
		if c.cohort.why == reasonBusy {
			idle = a.meanIdle()
		}
		a.gaps = known && idle > idleInTurns && c.now >= a.slicedFrom
		c.lookAtWays()
		exclusive(shares)
	case c.special > 0:
		if a.reason != shares || window >= staleWindow {
			exclusive(shares)
		}
	case a.until != 0:
		if c.now >= a.until {
			exclusive(busy)
		}
	case a.reason == reasonGaps:
		if window < sharedWindow {
			return
		}
		if idle, known := a.wouldWaste(); known && idle < idleTogether {
			exclusive(busy)
		}
		a.startWindow(c.now)
	case window >= autoWindow:
		if float64(a.short) >= shortTurns*window.Seconds() {
			a.until = c.now.Add(autoTrial)
			c.setEffective(Concurrent, reasonShort)
			return
		}
		idle, known := a.idle(window)
		if known && idle > idleInTurns {
			a.startWindow(c.now)
			c.setEffective(Concurrent, reasonGaps)
			return
		}
		if known || window >= staleWindow || a.reason != busy {
			exclusive(busy)
		}
	case a.reason != busy:
		exclusive(busy)
	}
}
