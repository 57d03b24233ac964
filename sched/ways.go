// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
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
	c.mem.LookOutside()
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
		if window < autoWindow {
			return
		}
		c.looked += uint64(len(a.util))
		idle, known := a.idle(window)
		if !known && window < staleWindow {
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
	switch {
	case slices.ContainsFunc(c.inOrder(), c.gangPlays):
		return because(reasonGang)
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

// Why is a reason for the way in which clients share a GPU.
type Why uint8

const (
	reasonNone Why = iota
	reasonSet
	reasonSlices
	reasonCohort
	reasonGaps
	reasonTurns
	reasonAlone

	reasonSwap
	reasonLimit
	reasonShares
	reasonGang
	reasonOverlap
	reasonUnsliceable
	reasonBare
	reasonUnproved
	reasonLatency
	reasonBusy
	reasonUneven
	reasonMore
	reasonParts
	reasonMeasure
	reasonFew
	reasonMany
	reasonNotNeeded
)

// whys has for each Why its code, which does not change between versions, and its text.
func whys() []struct{ code, text string } {
	return []struct{ code, text string }{
		reasonNone:   {"", ""},
		reasonSet:    {"as-set", "as set"},
		reasonSlices: {"slices", "by time slices: every process can set its slice, and all memory fits"},
		reasonCohort: {"cohort", "a tenant that needs turns of its own takes turns with all others together, who share their turn by time slices"},
		reasonGaps:   {"gaps", "tenants leave the GPU idle in their turns: at the same time they get more done"},
		reasonTurns:  {"busy", "tenants keep the GPU busy: turns cost less than mixing"},
		reasonAlone:  {"alone", "at most one process uses the GPU"},

		reasonSwap:        {"memory", "more memory is reserved than the GPU has: tenants take turns, and what one lacks is moved out of the others"},
		reasonLimit:       {"core-limit", "a tenant has a core limit, which turns hold exactly"},
		reasonShares:      {"shares", "tenants have core limits or core requests, which the driver alone does not hold"},
		reasonGang:        {"gang", "a gang is granted together, which takes turns"},
		reasonOverlap:     {"group-beside-latency", "an overlap group beside a latency tenant takes turns: the slice of its MPS server cannot be shortened"},
		reasonUnsliceable: {"slices-refused", "client %d cannot be sliced: time slices: %v"},
		reasonBare:        {"slices-unseen", "client %d cannot be sliced: it has channels in no group that was seen"},
		reasonUnproved:    {"slices-unproved", "client %d cannot be sliced: its shim does not say whether time slices work"},
		reasonLatency:     {"latency", "a latency tenant beside several others: it runs beside them, and they take turns"},
		reasonBusy:        {"latency-busy", "beside a latency tenant time slices are of use only if the others leave the GPU idle"},
		reasonUneven:      {"latency-requests", "beside a latency tenant time slices are too short to hold core requests"},
		reasonMore:        {"turns-give-more", "tenants get more by turns than by slices"},
		reasonParts:       {"parts", "tenants do not get their parts by slices"},
		reasonMeasure:     {"measuring", "turns measure what each tenant gets alone"},
		reasonFew:         {"too-few", "fewer than two can share a turn"},
		reasonMany:        {"too-many", fmt.Sprintf("more than %d clients would have to be stopped together", maxCohort)},
		reasonNotNeeded:   {"not-needed", "nobody needs turns of its own"},
	}
}

// Code returns the name of the reason for programs.
func (w Why) Code() string { return whys()[w].code }

// Cause is a reason with the client that it is about.
type Cause struct {
	Why
	Client  base.ClientID // 0: it is about no single client
	Control Control       // what the driver answered that client
}

func because(w Why) Cause { return Cause{Why: w} }

func (c Cause) String() string {
	text := whys()[c.Why].text
	switch c.Why {
	case reasonUnsliceable:
		return fmt.Sprintf(text, c.Client, c.Control)
	case reasonBare, reasonUnproved:
		return fmt.Sprintf(text, c.Client)
	}
	return text
}

// WayRefusal says why clients do not share a GPU in a way that would be better.
type WayRefusal struct {
	Way string
	Cause
}

func (r WayRefusal) String() string { return r.Way + ": " + r.Code() }

// In mode Auto the core chooses. Where all clients can be sliced, and memory fits, they share by slices,
// which waste nothing. Else turns serve tenants best that keep the GPU busy, and are the only way once
// memory is short. A tenant that leaves the GPU idle in its turn wastes that time for all: such tenants
// get more done at the same time, by the driver's own slices.
//
// Shims tell how often the GPU had work of theirs (Utilization). In turns that says what turns waste; at
// the same time, what they would waste: a tenant that is idle for a part f of the time beside n others,
// on a GPU that is busy, would be idle for about n times f alone.
const (
	fewSamples = 50 // of a GPU in turns, or of a client at the same time, say nothing
	// A client that says more than this a second counts for no more.
	mostSamples = timeslice.LooksPerSecond * 5 / 4
)

// auto is what mode Auto knows.
type auto struct {
	way       Way
	cause     Cause                      // of what is in effect
	against   [len(candidates)]Cause     // why a way cannot be taken as things are, as of the latest look
	refusedAt [len(candidates)]base.Time // when that was so, latest
	since     base.Time                  // start of the window
	wastes    bool                       // turns leave the GPU idle, or would, as of the latest window

	turnEnded  base.Time                 // the latest
	notBefore  base.Time                 // slices are not begun again
	left       Cause                     // why not
	measuredAt base.Time                 // when turns began that measure tenants
	backoff    time.Duration             // the latest time for which slices were given up
	gaveUp     map[base.ClientID]float64 // calls per second alone of the clients for which they were
	worse      int                       // windows, one after the other, in which slices gave less than turns
	underfed   int                       // windows, in the same way, in which a tenant did not get its part, and did by turns
	gaps       bool                      // several beside a latency tenant leave the GPU idle in their turns
	keepUntil  base.Time                 // the way from before a restart goes on until then; 0: the way is judged as any other
	util       map[base.ClientID]samples
	mixAfter   base.Time     // the driver alone is not tried before that
	mixPause   time.Duration // the latest time for which it was given up, because turns gave more
}

// samples are how often a client looked in the window, and how often the GPU had work
// of it then.
type samples struct{ n, busy int }

func (a *auto) startWindow(now base.Time) {
	a.since = now
	clear(a.util)
}

// utilization takes note of what a client says.
func (c *GPU) utilization(ev timeslice.Utilization) {
	if c.mode != Auto || c.clients[ev.Client] == nil || ev.Samples <= 0 {
		return
	}
	ev.Busy = base.Clamp(ev.Busy, 0, ev.Samples)
	a := &c.auto
	if a.util == nil {
		a.util = map[base.ClientID]samples{}
	}
	cl := c.clients[ev.Client]
	if cl.in != &c.beside {
		cl.progress.Report(c.now, ev, c.effective == Exclusive && !c.inCohort(cl.tenant), c.shareClock())
	}
	if cl.tenant.share.Priority == Latency {
		c.noteUseBeside(cl.tenant, ev)
	}
	if c.inCohort(cl.tenant) {
		c.noteUse(cl.tenant)
	}
	if s := cl.tenant.share; s.exclusive() || s.limited() && cl.tenant.apart {
		return // what it leaves to others says nothing of what these gain at the same time
	}
	s := a.util[ev.Client]
	s.n += ev.Samples
	s.busy += ev.Busy
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
