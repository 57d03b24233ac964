// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// LatencySlice is the GPU's own time slice of other tenants' processes while a latency
// tenant is there. Beside a tenant with this slice a request of 0.53 ms took 0.57 ms (p99,
// H200), and 2.56 ms beside one with the driver's slice of 2 ms.
const LatencySlice = 50 * time.Microsecond

// CrowdedSlice is the same where several others run at once. With LatencySlice these would
// mostly change places, at 0.14 ms each time; a request beside one tenant with this slice took
// 0.72 ms (p99, H200).
const CrowdedSlice = 200 * time.Microsecond

// timeSlices sets the GPU's own time slices. In turns they matter where a latency tenant
// is let in beside the holder, whose kernels may still run for milliseconds: the shorter
// the holder's slice, the sooner the latency tenant's kernels run. With one process on the
// GPU a short slice costs nothing. Where clients share by slices, a slice is as long as the
// client's part of the GPU says.
func timeSlices() policy {
	return policy{grant: (*GPU).setSlices}
}

// sliceState is what a GPU knows of time slices.
type sliceState struct {
	stale bool // clients, their shares or what they proved has changed
	ever  bool // a tenant's priority was ever latency
	set   bool // some client has a slice that is not the driver's

	fixed    bool      // the slice of somebody who shares cannot be set, of an overlap group for one
	crowded  bool      // several others want the GPU beside a latency tenant
	lookedAt base.Time // when that was found
	search   timeslice.Search
}

// sliced says whether clients share the GPU by time slices.
func (c *GPU) sliced() bool { return c.auto.way == WaySlices }

// anySliced says whether any clients do: all of them, or those of a cohort in its turns.
func (c *GPU) anySliced() bool { return c.sliced() || c.cohort.on }

// setSlices tells clients their slices, where they have changed. When clients or shares
// change it costs O(n log n); else nothing.
func (c *GPU) setSlices() {
	if !c.slices.stale {
		return
	}
	c.slices.stale = false
	short := c.servesLatency()
	if !short && !c.anySliced() && !c.slices.set {
		return
	}
	all := c.inOrder()
	var parts []time.Duration
	if c.anySliced() && !short {
		parts = c.slicesByPart(all)
	} else {
		parts = make([]time.Duration, len(all))
	}
	c.slices.set = false
	for i, cl := range all {
		want := parts[i]
		if short && cl.tenant.share.Priority != Latency {
			want = c.besideSlice(cl)
		}
		c.slices.set = c.slices.set || want != 0
		if cl.connected && differ(cl.slice, want) {
			cl.slice = want
			c.addUp(cl)
			c.do(Slice{cl.id, want})
		}
	}
}

// differ says whether a change is worth a message.
func differ(old, to time.Duration) bool {
	return (old == 0) != (to == 0) || (old-to).Abs() > old/20
}

// slicesByPart sets the slices of all clients in proportion of their parts. The GPU gives
// each process one slice after the other, so processes of one tenant share its part. An
// overlap group has one slice, that of its MPS server, which stays the driver's own, as that of a
// client that cannot be sliced does: those of others are in proportion to it.
func (c *GPU) slicesByPart(all []*client) []time.Duration {
	less := c.lessLatency()
	partOf := func(t *tenant) float64 {
		if t.share.Priority == Latency {
			return float64(c.part(t)) * less
		}
		return float64(c.part(t))
	}
	if c.cohort.on {
		parts := c.cohortParts(true) // the shortest slice, and so all, would else be a sleeper's
		partOf = func(t *tenant) float64 { return max(parts[t]*account.One, account.MinPart) }
	}
	bound := time.Duration(timeslice.MaxSlice)
	if c.cohort.on {
		bound = c.cohortSlice()
	}
	wishes := make([]timeslice.Wish, len(all))
	for i, cl := range all {
		if c.slicing(cl) {
			w := timeslice.Wish{Part: partOf(cl.tenant) * cmp.Or(cl.tenant.sliceFactor, 1), Fixed: c.notSliceable(cl).Why != reasonNone}
			if !w.Fixed {
				w.Part /= float64(cl.tenant.processes)
			}
			wishes[i] = w
		}
	}
	return c.slices.search.Lengths(wishes, bound)
}

// groups counts the overlap groups that want the GPU, and share it by slices where anybody does;
// cohort: in a cohort.
func (c *GPU) groups(cohort bool) (n int) {
	for _, t := range c.ganged {
		if t.overlaps() && (!cohort || !t.apart) && slices.ContainsFunc(t.members, (*client).shares) {
			n++
		}
	}
	return n
}

// shares says whether the client wants its part of the GPU.
func (cl *client) shares() bool { return cl.connected && cl.wanted }

// slicing says whether the client shares the GPU by slices, where anybody does.
func (c *GPU) slicing(cl *client) bool {
	return cl.shares() && (!c.cohort.on || c.inCohort(cl.tenant))
}

// activeMembers counts those that were active in most of the time for which clients shared the GPU.
func (c *GPU) activeMembers(shared time.Duration) map[*tenant]int {
	return c.members(func(cl *client) bool {
		_, active := cl.progress.Rate(shared)
		return active
	})
}

// members counts those members of each overlap group for which counts is true.
func (c *GPU) members(counts func(*client) bool) map[*tenant]int {
	all := map[*tenant]int{}
	for _, t := range c.ganged {
		if !t.overlaps() {
			continue
		}
		c.looked += uint64(len(t.members))
		for _, cl := range t.members {
			if counts(cl) {
				all[t]++
			}
		}
	}
	return all
}

// ofSlice returns how much of a slice is a client's: all of it, or a part if it is one of so
// many members of an overlap group, who have one slice together.
func ofSlice(cl *client, members map[*tenant]int) float64 {
	return 1 / float64(max(members[cl.tenant], 1))
}

// besideSlice is the slice of a client beside a latency tenant.
func (c *GPU) besideSlice(cl *client) time.Duration {
	if c.slices.crowded && (c.sliced() || c.inCohort(cl.tenant)) {
		return CrowdedSlice
	}
	return LatencySlice
}

// servesLatency says whether the slices of others are short because of a latency tenant.
func (c *GPU) servesLatency() bool {
	return c.slices.ever && !(c.sliced() && c.besides.blocked) && !(c.anySliced() && c.slices.fixed) && c.hasLatencyTenant()
}

func (c *GPU) hasLatencyTenant() bool {
	return c.pool.tenants > 0 && slices.ContainsFunc(c.inOrder(), func(cl *client) bool { return cl.connected && cl.tenant.share.Priority == Latency })
}

// listedDrivers has the versions of the driver with which the controls were seen to work,
// by their effect on a GPU. The shim's list (hook/core/controls.c) is the same: a test
// compares them.
func listedDrivers() []string { return []string{"580.159.04"} }

// Listed says whether time slices were seen to work, by their effect on a GPU, with this
// version of the driver. With others they are tried.
func (e Controls) Listed() bool { return slices.Contains(listedDrivers(), e.Driver) }

// proofPatience is how long a client that comes while others share by slices may take to
// prove its controls: the shim proves them within 0.1 s of the first grant.
const proofPatience = 2 * time.Second

// control takes note of what a client has proved.
func (c *GPU) control(ev Controls) {
	if cl := c.clients[ev.Client]; cl != nil && cl.connected && cl.controls != ev {
		cl.controls, c.slices.stale = ev, true
	}
}

// wantsGPU notes when a client first wanted the GPU over its connection.
func (c *GPU) wantsGPU(cl *client) {
	if !cl.wanted {
		cl.wanted, cl.wantedAt, c.slices.stale = true, c.now, true
		c.addUp(cl)
	}
}

// notSliceable says why a client's time slice cannot be set; reasonNone: it can.
func (c *GPU) notSliceable(cl *client) Cause {
	switch p := &cl.controls; {
	case p.Client == 0 && c.anySliced() && c.now.Sub(cl.wantedAt) < proofPatience:
		return Cause{}
	case p.Client == 0:
		return Cause{Why: reasonUnproved, Client: cl.id}
	case p.Slices != ControlWorks:
		return Cause{reasonUnsliceable, cl.id, p.Slices}
	case p.Bare > 0:
		return Cause{Why: reasonBare, Client: cl.id}
	}
	return Cause{}
}

func (c *GPU) setMode(m Mode) {
	if m > Auto {
		panic(fmt.Sprintf("sched: unknown %v", m))
	}
	if m == c.mode {
		return
	}
	c.mode = m
	c.endCohort()
	c.auto.way, c.slices.stale = WayTurns, true
	c.auto.startWindow(c.now)
	if m != Auto && !(m == Concurrent && c.mem.Overfull()) {
		c.setEffective(m, because(reasonSet))
	}
}

// setEffective changes how grants are given from now on.
func (c *GPU) setEffective(m Mode, cause Cause) {
	if m == c.effective && cause == c.auto.cause {
		return
	}
	c.auto.cause = cause
	c.do(ModeChosen{m, cause})
	if m == c.effective {
		return
	}
	c.tellAll = true
	c.next = nil
	if m == Concurrent {
		c.effective = m
		for cl := c.open.head; cl != nil; cl = cl.next {
			cl.grant.alone = false
			if cl.grant.state == paused {
				c.resume(cl.grant)
			}
		}
		for c.beside.head != nil {
			c.change(c.beside.head.grant, granted, turnGrant)
		}
		c.kept = nil
		c.thereMayBeRoom()
		for _, t := range c.ganged {
			t.slot.Ignore()
		}
	} else {
		for cl := c.closing.head; cl != nil; cl = cl.next {
			c.askBack(cl.grant)
		}
		for _, l := range []*list{&c.open, &c.latency} {
			for l.head != nil {
				c.revoke(l.head.grant, ModeChange)
			}
		}
		// Clients that had the GPU at the same time are not ahead of each other.
		c.effective = m
		for _, t := range c.tenants {
			c.bill(t)
		}
		for _, t := range c.tenants {
			c.vtime = max(c.vtime, t.VT())
		}
		for _, t := range c.tenants {
			t.SetVT(c.vtime)
		}
		c.ready.reorder()
		c.deferred.reorder()
	}
	for _, cl := range c.inOrder() {
		c.review(cl.tenant) // who is urgent depends on the mode
		c.stand(cl)
	}
	for _, t := range c.ganged {
		t.slot.Tell()
	}
}

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
