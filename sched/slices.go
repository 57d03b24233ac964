// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
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
	if c.pool.tenants == 0 {
		return false
	}
	for _, cl := range c.inOrder() {
		if cl.connected && cl.tenant.share.Priority == Latency {
			return true
		}
	}
	return false
}
