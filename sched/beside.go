// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// tenantsBeside lets latency tenants run beside the holder, whose gate stays open. That is
// where the time slices of all others can be set: these are so short (LatencySlice) that a
// latency tenant's kernels run at once. Its grant stays, so that no message and no gate is
// on the way of a request. What it leaves of the GPU is the holder's.
//
// A saturating tenant would have nearly all of the GPU beside such short slices. Shims say
// how often the GPU had work of a latency tenant. Where that is more than latency tenants
// may have together, the rest of it is taken from their patience, and they have latency grants
// instead, which are billed exactly, for a time that doubles. Or by time slices, they have
// slices of their part, which is smaller by what they used too much.
func tenantsBeside() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) { return c.besides.from, c.besides.blocked },
		revoke: func(c *GPU) {
			c.lookBeside()
			c.endBeside()
		},
	}
}

const (
	besideWindow = time.Second // of looking at what latency tenants use
	// They have no beside grants after one in which that was too much, for a time that
	// doubles, and is as at first after so long without.
	besidePause, maxBesidePause = 5 * time.Second, 2 * time.Minute
	besideForgets               = 5 * time.Minute
)

// besides is what a GPU knows of latency tenants beside others.
type besides struct {
	short    bool      // the time slices of all others can be set
	lookedAt base.Time // when that was found

	since   base.Time // start of the window
	use     int       // permille of the GPU that tenants with beside grants used in the latest one
	blocked bool      // they used too much
	from    base.Time // until then
	pause   time.Duration
	part    int // permille of the GPU that is theirs by time slices meanwhile
}

// lookBeside looks whether the time slices of all others can be set.
func (c *GPU) lookBeside() {
	b := &c.besides
	if b.blocked && c.now >= b.from {
		c.block(false)
		b.since = c.now
		for _, t := range c.tenants {
			t.looks, t.hot = 0, 0
		}
	}
	if !c.slices.ever || !c.slices.stale && c.now.Sub(b.lookedAt) < besideWindow {
		return
	}
	b.lookedAt, b.short = c.now, true
	for _, cl := range c.inOrder() {
		proving := cl.controls.Client == 0 && c.now.Sub(cl.wantedAt) < proofPatience
		if cl.shares() && cl.tenant.share.Priority != Latency && !proving && c.notSliceable(cl).Why != reasonNone {
			b.short = false
			return
		}
	}
}

// block has latency tenants run beside others no more, or again. By time slices those of all change
// with it, so what was measured so far is no measure of what comes.
func (c *GPU) block(blocked bool) {
	c.besides.blocked, c.slices.stale = blocked, true
	if !c.sliced() {
		return
	}
	for _, cl := range c.inOrder() {
		cl.progress.StartWindow()
	}
	c.auto.startWindow(c.now)
}

// besideAllowed says whether latency tenants may run beside the holder. Memory that does
// not fit must be free to move, which it is not under a grant that stays.
func (c *GPU) besideAllowed() bool {
	return c.besides.short && !c.besides.blocked && c.mode == Auto && c.effective == Exclusive && !c.mem.Overfull()
}

// mayBeBeside says whether the clients of a tenant get beside grants. A limit is held
// exactly, by grants that end when they are not used.
func (c *GPU) mayBeBeside(t *tenant) bool {
	return c.besideAllowed() && t.share.Priority == Latency && !t.Demoted() && !t.limited() && t.slot == nil
}

// endBeside asks back the beside grants of tenants that may not have them any more.
func (c *GPU) endBeside() {
	for cl := c.beside.head; cl != nil; {
		next := cl.next
		c.bill(cl.tenant) // its patience may end
		switch {
		case c.mayBeBeside(cl.tenant):
		case cl.tenant.Demoted():
			c.revoke(cl.grant, PriorityUsedUp)
		default:
			c.revoke(cl.grant, ModeChange)
		}
		cl = next
	}
	if c.beside.n == 0 {
		c.setBesideUse(0)
	}
}

// setBesideUse changes what holders are billed beside latency tenants.
func (c *GPU) setBesideUse(permille int) {
	if c.besides.use == permille {
		return
	}
	for _, t := range c.tenants {
		c.bill(t) // as before, so far
	}
	c.besides.use = permille
}

// noteUseBeside takes note of how often the GPU had work of a latency tenant.
func (c *GPU) noteUseBeside(t *tenant, ev timeslice.Utilization) {
	b := &c.besides
	t.looks += ev.Samples
	t.hot += min(ev.Busy, ev.Samples)
	window := c.now.Sub(b.since)
	if window < besideWindow {
		return
	}
	b.since = c.now
	all, use := 0, 0
	for _, t := range c.tenants {
		if t.share.Priority != Latency {
			continue
		}
		permille := 1000 * t.hot / max(t.looks, 1)
		t.looks, t.hot = 0, 0
		all += permille
		if t.beside > 0 {
			c.bill(t)
			t.gets = permille
			use += permille
		}
	}
	c.setBesideUse(min(use, 1000))
	most, long := 10*c.pool.percent(), window > 2*besideWindow // which tells of its end only
	if !long && c.wantedByOthers() {
		c.chargeBeside(window)
	}
	switch {
	case long || all <= most:
		if c.now.Sub(b.from) > besideForgets {
			b.pause = 0
		}
	case !b.blocked && (c.beside.n > 0 || c.sliced()):
		b.pause = min(max(2*b.pause, besidePause), maxBesidePause)
		c.block(true)
		b.from = c.now.Add(b.pause)
		b.part = max(most-int(window*time.Duration(min(all, 1000)-most)/b.pause), most/2)
	}
}

// chargeBeside takes from the patience of latency tenants what they used beside others.
func (c *GPU) chargeBeside(window time.Duration) {
	c.countPatience()
	p := &c.pool
	p.patience = max(p.patience-window*time.Duration(c.besides.use)/1000, -account.PatienceOwed)
	for cl := c.beside.head; cl != nil; cl = cl.next {
		if t := cl.tenant; t.beside > 0 {
			t.UsePatience(window*time.Duration(t.gets)/time.Duration(1000*t.beside), p.patience)
		}
	}
	for _, t := range c.metered { // what is common is gone for those with latency grants, too
		if t.share.Priority == Latency {
			t.UsePatience(0, p.patience)
		}
	}
}

// lessLatency is by what latency tenants' parts are multiplied where tenants share the GPU
// by slices, so that latency tenants have no more together than they may.
func (c *GPU) lessLatency() float64 {
	var latency, others int64
	for _, t := range c.tenantsInOrder() {
		if t.processes == 0 || c.cohort.on && t.apart {
			continue
		}
		if t.share.Priority == Latency {
			latency += c.part(t)
		} else {
			others += c.part(t)
		}
	}
	most := float64(c.besides.part) / 1000
	if latency == 0 || others == 0 || float64(latency)*(1-most) <= float64(others)*most {
		return 1
	}
	return float64(others) * most / (1 - most) / float64(latency)
}

// crowded says whether several others want the GPU beside a latency tenant. At the same
// time with slices as short as theirs they would hinder each other.
func (c *GPU) crowded() bool {
	batch, latency := 0, false
	if c.pool.tenants == 0 {
		return false
	}
	for _, cl := range c.inOrder() {
		switch {
		case !cl.connected:
		case cl.tenant.share.Priority == Latency:
			latency = true
		case cl.wanted:
			batch++
		}
	}
	return latency && batch > 1
}
