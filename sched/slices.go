// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"time"
)

// LatencySlice is the GPU's own time slice of other tenants' processes while a latency
// tenant is there. Beside a tenant with this slice a request of 0.53 ms took 0.57 ms (p99,
// H200), and 2.56 ms beside one with the driver's slice of 2 ms.
const LatencySlice = 50 * time.Microsecond

// LeastSlice is the shortest that a tenant has because its part is small. Changing from one
// process to another takes 0.14 ms: shorter slices waste the GPU.
const LeastSlice = time.Millisecond

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

	why      string // clients cannot share by slices, because; "": they can
	lookedAt Time   // when that was found
	search
}

// sliced says whether clients share the GPU by time slices.
func (c *GPU) sliced() bool { return c.auto.slicing }

// setSlices tells clients their slices, where they have changed. When clients or shares
// change it costs O(n log n); else nothing.
func (c *GPU) setSlices() {
	if !c.slices.stale {
		return
	}
	c.slices.stale = false
	short := c.slices.ever && c.hasLatencyTenant()
	if !short && !c.sliced() && !c.slices.set {
		return
	}
	var parts map[*client]time.Duration
	if c.sliced() && !short {
		parts = c.slicesByPart()
	}
	c.slices.set = false
	for _, cl := range c.inOrder() {
		want := parts[cl]
		if short && cl.tenant.share.Priority != Latency {
			want = LatencySlice
		}
		c.slices.set = c.slices.set || want != 0
		if cl.connected && differ(cl.slice, want) {
			cl.slice = want
			c.do(Slice{cl.id, want})
		}
	}
}

// differ says whether a change is worth a message.
func differ(old, to time.Duration) bool {
	return (old == 0) != (to == 0) || (old-to).Abs() > old/20
}

// slicesByPart returns the slices of clients in proportion of their parts. The GPU gives
// each process one slice after the other, so processes of one tenant share its part.
func (c *GPU) slicesByPart() map[*client]time.Duration {
	processes := map[*tenant]int{}
	for _, cl := range c.clients {
		if cl.connected && cl.wanted {
			processes[cl.tenant]++
		}
	}
	weights := map[*client]float64{}
	least, most := 0.0, 0.0
	for _, cl := range c.clients {
		if cl.connected && cl.wanted {
			w := float64(c.part(cl.tenant)) * cmp.Or(cl.tenant.sliceFactor, 1) / float64(processes[cl.tenant])
			weights[cl] = w
			if least == 0 || w < least {
				least = w
			}
			most = max(most, w)
		}
	}
	longest := c.slices.longest
	if longest == 0 {
		if most-least < most/50 { // nothing to be said against the driver's own
			return nil
		}
		longest = DriverSlice
	}
	// The smallest part has LeastSlice, unless the others would have more than MaxSlice.
	longest = min(max(longest, time.Duration(float64(LeastSlice)*most/max(least, 1))), MaxSlice)
	out := map[*client]time.Duration{}
	for cl, w := range weights {
		out[cl] = max(time.Duration(float64(longest)*w/most).Round(10*time.Microsecond), LeastSlice)
	}
	return out
}

func (c *GPU) hasLatencyTenant() bool {
	for _, cl := range c.clients {
		if cl.connected && cl.tenant.share.Priority == Latency {
			return true
		}
	}
	return false
}

// A window is how long it takes to see what slices do: so many rounds of slices, and so
// many reports.
const (
	sliceWindow, maxSliceWindow = 2 * time.Second, 10 * time.Second
	sliceRounds                 = 16
)

func (c *GPU) sliceWindow() time.Duration {
	var round time.Duration
	for _, cl := range c.clients {
		if cl.connected && cl.wanted {
			round += cl.slice
		}
	}
	return clamp(sliceRounds*round, sliceWindow, maxSliceWindow)
}

// measured is what a window has shown.
type measured struct {
	rates map[ClientID]float64 // of active clients, calls per second
	known bool                 // the speed alone of all active clients
	sum   float64              // of what they get, as parts of what they get alone
	idle  float64              // the sum of the parts of the window in which they had no work
}

// measure looks at the window that ends, and begins the next one.
func (c *GPU) measure(window time.Duration) measured {
	m := measured{rates: map[ClientID]float64{}, known: true}
	gets := map[*tenant]float64{}
	for _, cl := range c.inOrder() {
		p := &cl.progress
		rate, active := p.rate(window)
		if active {
			m.rates[cl.id] = rate
			m.idle += 1 - float64(p.busySamples)/float64(max(p.samples, 1))
			alone, busy, known := p.alone()
			if known {
				m.sum += rate / alone
				gets[cl.tenant] += min(rate/alone, 1) * busy
			} else {
				m.known = false
				gets[cl.tenant] += c.sliceOf(cl)
			}
		}
		p.startWindow()
	}
	all := 0.0
	for _, t := range c.tenantsInOrder() {
		all += gets[t]
	}
	for _, t := range c.tenantsInOrder() {
		c.bill(t) // by what it got so far
		t.gets = int(1000 * gets[t] / max(all, 1))
	}
	return m
}

// sliceOf returns the client's part of the GPU by the slices alone.
func (c *GPU) sliceOf(cl *client) float64 {
	var sum time.Duration
	for _, o := range c.clients {
		if o.connected && o.wanted {
			sum += cmp.Or(o.slice, DriverSlice)
		}
	}
	return float64(cmp.Or(cl.slice, DriverSlice)) / float64(max(sum, 1))
}

// Where shares are uneven, slices are corrected by what tenants get: a program that waits
// for its kernels does not use a long slice to its end. Only slices of those are shortened
// that say themselves that they get more than their part: so a tenant that says that it
// gets little takes nothing from others' parts.
const (
	shareError   = 0.02 // of the GPU
	damping      = 0.8
	leastFactor  = 0.02
	maxUnderfed  = 5 // windows in which a tenant does not get its part: then turns are better
	worthMeasure = 30 * time.Second
)

// uneven says whether tenants are promised something, or their weights differ.
func (c *GPU) uneven() bool {
	if c.exact > 0 {
		return true
	}
	weight := 0
	for _, t := range c.tenants {
		if t.clients > 0 && t.share.Priority != Latency {
			if weight != 0 && t.share.Weight != weight {
				return true
			}
			weight = t.share.Weight
		}
	}
	return false
}

// correct changes slices by what tenants got. It returns whether one that did not get its
// part got more in turns.
func (c *GPU) correct() bool {
	underfed, turnsBetter := false, false
	for _, t := range c.tenantsInOrder() {
		needs, byTurns := 0.0, 0.0
		for _, cl := range c.inOrder() {
			if rate, busy, known := cl.progress.alone(); cl.tenant == t && cl.connected && known {
				needs += busy
				byTurns += busy * cl.progress.byTurns / rate
			}
		}
		got := float64(t.gets) / 1000
		if got > 0 && got < min(float64(c.part(t))/one, needs)-shareError {
			underfed = true
			turnsBetter = turnsBetter || got < byTurns-shareError
		}
	}
	if !underfed {
		return false
	}
	for _, t := range c.tenantsInOrder() {
		part, got := float64(c.part(t))/one, float64(t.gets)/1000
		if got > part+shareError {
			t.sliceFactor = max(cmp.Or(t.sliceFactor, 1)*(1-damping*(got-part)/got), leastFactor)
			c.slices.stale = true
		}
	}
	return turnsBetter
}

func (c *GPU) tenantsInOrder() []*tenant {
	return slices.SortedFunc(func(yield func(*tenant) bool) {
		for _, t := range c.tenants {
			if t.clients > 0 && !yield(t) {
				return
			}
		}
	}, func(a, b *tenant) int { return cmp.Compare(a.name, b.name) })
}
