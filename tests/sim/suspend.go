// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// What an operator does to a tenant's memory, and what the daemon tells the core besides.

// swapShares are what moving memory may take of the time, percent; 0: a fixed quantum.
var swapShares = []int{0, 10, 20, 50}

// A tenant that is to leave for another GPU has left this one within departLimit, if its
// processes do what they are told. An impatient operator gives up before.
const (
	departLimit = 3 * time.Second
	impatience  = 200 * time.Millisecond
	departLook  = 5 * time.Millisecond
)

// count takes note of an event that the core is told.
func (r *Report) count(ev base.Event) {
	switch ev.(type) {
	case sched.Suspend:
		r.Suspends++
	case sched.ResumeTenant:
		r.Resumes++
	case sched.Withdraw:
		r.Withdrawals++
	case sched.Called:
		r.Calls++
	case sched.Exec:
		r.Execs++
	case residency.SetGPUMemory:
		r.Sizes++
	case sched.SetSwapShare:
		r.SwapShares++
	}
}

// operateMemory is an operator's part that is about memory.
func (w *world) operateMemory() {
	d := w.daemon
	if w.chance(0.1) {
		w.rng.Uint64N(gpuMemory / 4) // so that each seed shows what it did
		d.step(residency.SetGPUMemory{})
		return
	}
	if w.mem.capacity == 0 {
		return
	}
	if w.chance(0.1) {
		share := swapShares[w.rng.IntN(len(swapShares))]
		if share != d.swapShare {
			d.swapShare = share
			d.step(sched.SetSwapShare{Percent: share})
		}
		return
	}
	if len(w.tenants) == 0 || d.core == nil {
		return
	}
	t := w.tenants[w.rng.IntN(len(w.tenants))]
	if t == d.departs {
		return
	}
	d.observeHost()
	switch w.rng.IntN(3) {
	case 0:
		if _, why := d.core.SuspendFits(t.name); why == nil {
			d.step(sched.Suspend{Tenant: t.name})
		}
	case 1:
		if _, why := d.core.ResumeFits(t.name); why == nil {
			if d.step(sched.ResumeTenant{Tenant: t.name}); d.core != nil {
				w.judge.checkResumed(d.core.Snapshot(w.now))
			}
		}
	case 2:
		d.depart(t)
	}
}

// depart has a tenant leave for another GPU. There it has no place after all, so that it
// stays once nothing of it is on this one, or that has taken too long.
func (d *daemon) depart(t *tenant) {
	w := d.w
	attached := 0
	for _, c := range w.client {
		switch {
		case c == nil || c.tenant != t || d.conns[c.id] == nil && d.pages[c.id] == nil && !d.restored[c.id]:
		case d.conns[c.id] == nil:
			return // it is to come back first
		default:
			attached++
		}
	}
	if why := d.core.DepartFits(t.name); why != nil || attached == 0 || t.share.Group() != "" || d.departs != nil {
		return
	}
	d.departs = t
	waiting := d.core.Snapshot(w.now).Queue
	for _, c := range w.client {
		if c == nil || c.tenant != t || d.conns[c.id] == nil {
			continue
		}
		d.keptOff[c.id] = slices.Contains(waiting, c.id)
		if d.step(sched.Withdraw{Client: c.id}); d.core == nil {
			return
		}
	}
	d.step(sched.Suspend{Tenant: t.name})
	run, looks, patient := d.run, int(departLimit/departLook), w.chance(0.5)
	if !patient {
		looks = w.rng.IntN(int(impatience / departLook))
	}
	var look func()
	look = func() {
		switch {
		case d.core == nil || d.run != run:
		case d.core.Departed(t.name):
			w.report.Departed++
			d.stay(t)
		case looks == 0:
			if patient && d.mayLeave(t) {
				w.fail("tenant %s has not departed within %v", t.name, departLimit)
			}
			d.stay(t)
		default:
			if d.core.IsBack(t.name) {
				if d.step(sched.Suspend{Tenant: t.name}); d.core == nil {
					return
				}
			}
			looks--
			w.after(departLook, look)
		}
	}
	look()
}

// mayLeave says whether nothing keeps a tenant's processes from doing what they are told.
func (d *daemon) mayLeave(t *tenant) bool {
	for _, c := range d.w.client {
		if c != nil && c.tenant == t && (c.hostile || !c.attached || d.conns[c.id] != c.conn || d.w.now < c.stopped) {
			return false
		}
	}
	return t.share.Group() == ""
}

// stay lets a tenant on that was to depart.
func (d *daemon) stay(t *tenant) {
	d.departs = nil
	for _, c := range d.w.client {
		if c == nil || c.tenant != t {
			continue
		}
		wants := d.keptOff[c.id]
		delete(d.keptOff, c.id)
		c.blockedSince = d.w.now
		if wants && d.conns[c.id] != nil {
			if d.step(sched.Request{Client: c.id}); d.core == nil {
				return
			}
		}
	}
}

// keeps says whether the core is not to be told what a client says.
func (d *daemon) keeps(ev base.Event) bool {
	switch ev := ev.(type) {
	case sched.Request:
		if _, off := d.keptOff[ev.Client]; off {
			d.keptOff[ev.Client] = true
			return true
		}
	case sched.Withdraw:
		if _, off := d.keptOff[ev.Client]; off {
			d.keptOff[ev.Client] = false
		}
	case sched.Called:
		return !d.core.SuspendsIdle()
	}
	return false
}

// replaced is for a process that runs another program.
func (d *daemon) replaced(id base.ClientID) {
	d.w.judge.forget(id)
	delete(d.arenas, id)
	d.step(sched.Exec{Client: id})
}

// wants takes note of who wants the GPU, and who does not any more.
func (j *judge) wants(ev base.Event) {
	switch ev := ev.(type) {
	case sched.Withdraw:
		j.withdrew[ev.Client] = true
		delete(j.requested, ev.Client)
		delete(j.owed, ev.Client)
	case sched.Request:
		j.requested[ev.Client] = true
		delete(j.withdrew, ev.Client)
	case sched.Attach:
		j.requested[ev.Client] = ev.Want
		delete(j.owed, ev.Client)
		if ev.Want {
			delete(j.withdrew, ev.Client)
		}
	case sched.Release:
		if ev.Preempted {
			delete(j.withdrew, ev.Client)
		}
		if ev.Reason == sched.Exit {
			delete(j.requested, ev.Client)
		}
	case sched.ResumeTenant:
		for id := range j.withdrew {
			if t := j.w.joined[id]; t != nil && t.name == ev.Tenant {
				delete(j.withdrew, id)
			}
		}
		j.owes(ev.Tenant)
	case sched.Gone:
		delete(j.withdrew, ev.Client)
		delete(j.leaves, ev.Client)
		delete(j.owed, ev.Client)
	}
}

// owes notes that the clients of a tenant are to get a grant whose memory is away.
func (j *judge) owes(tenant string) {
	for _, c := range j.w.client {
		if c != nil && c.tenant != nil && c.tenant.name == tenant && c.tenant.share.Group() == "" && c.attached && c.mem.away > 0 && c.moves() && c.local == 0 && c.closing == 0 && j.w.daemon.conns[c.id] == c.conn {
			j.owed[c.id] = j.w.now
		}
	}
}

// checkResumed holds the core to its word that clients which were resumed wait for a grant.
func (j *judge) checkResumed(s sched.Snapshot) {
	for _, c := range s.Clients {
		if j.owed[c.ID] == j.w.now && c.State == sched.StateIdle {
			j.w.fail("client %d was resumed, and does not wait for the GPU", c.ID)
		}
	}
}

// idleTime is after what time a client is suspended; 0 or less: never.
func (c *client) idleTime() time.Duration {
	if c.tenant != nil && c.tenant.memory.SuspendAfter != 0 {
		return c.tenant.memory.SuspendAfter
	}
	return c.w.mem.suspendAfter
}

// idle is for a client that is suspended because it was idle.
func (j *judge) idle(id base.ClientID) {
	c := j.w.byID[id]
	if c == nil {
		return
	}
	after := c.idleTime()
	if been := j.w.now.Sub(c.idleFrom); after <= 0 || been < after {
		j.w.fail("client %d is suspended, idle for %v of %v", id, been, after)
	}
}

// checkIdle holds the core to its word that clients leave which are idle.
func (j *judge) checkIdle() {
	w := j.w
	if w.mem.capacity == 0 || w.mem.arena != 0 {
		return
	}
	for _, c := range w.client {
		if c == nil || !c.attached || c.hostile || c.pending || c.local != 0 || c.closing != 0 || w.now < c.stopped || !c.moves() || c.mem.resident <= c.mem.fixed+1 {
			continue
		}
		if c.tenant != nil && c.tenant.share.Group() != "" || j.owed[c.id] != 0 || j.requested[c.id] || w.daemon.conns[c.id] != c.conn {
			continue
		}
		after, kept := c.idleTime(), base.Time(0)
		if c.tenant != nil {
			kept = c.tenant.kept
		}
		if been := w.now.Sub(max(c.idleFrom, c.blockedSince, w.stable, kept)); after > 0 && been > 2*after+time.Second {
			w.fail("client %d has %d on the GPU, idle for %v, more than %v", c.id, c.mem.resident, been, after)
		}
	}
}
