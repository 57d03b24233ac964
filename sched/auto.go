// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"maps"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// In mode Auto the core chooses. Where all clients have proved that their time slices can
// be set, and their memory fits, they share by slices (slices.go), which waste nothing.
// Else turns serve tenants best that keep the GPU busy, and are the only way once memory
// is short. A tenant that leaves the GPU idle in its turn, because the CPU has work to do
// between kernels, wastes that time for all: such tenants get more done at the same time,
// by the driver's own time slices. So do tenants whose turns end after a moment.
//
// Shims tell how often the GPU had work of theirs (Utilization). In turns the samples
// say what turns waste. At the same time they say what turns would waste, where what clients get
// does not (driver.go): a tenant that is idle for a part f of the time beside n others, on a GPU
// that is busy, would be idle for about n times f alone.
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
