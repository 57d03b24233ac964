// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
)

// judge knows which process can submit work to the GPU, from the processes
// and their pages alone, and what it was promised.
type judge struct {
	w      *world
	fenced map[*client]bool
	grants map[base.ClientID]grant

	used    map[base.Epoch]bool // by grants, in any life of the daemon
	overlap int                 // times that concurrent mode began

	// After a restart that knew only that unrecorded clients may hold: those
	// that have not attached to this run by then have had their time.
	holdOff  base.Time // 0: none
	attached map[*client]int

	suspended map[base.ClientID]base.Time // when each was last

	// Memory, in this life of the daemon; see memory.go.
	has    map[base.ClientID]uint64    // granted by RESERVED
	asked  map[base.ClientID]base.Time // since when an answer is owed
	forced map[base.ClientID]bool      // has reserved by force

	// See suspend.go; in this life of the daemon, too.
	withdrew  map[base.ClientID]bool      // and has not asked since
	requested map[base.ClientID]bool      // for the GPU, perhaps while it had it, and was granted nothing since
	leaves    map[base.ClientID]bool      // was suspended, and is granted so that its work ends
	owed      map[base.ClientID]base.Time // was resumed then, and was granted nothing since
}

// grant is the latest one of a client.
type grant struct {
	concurrent, latency bool
	beside              bool   // a latency grant that shuts nobody's gate
	shared              bool   // of a cohort
	gang                string // of its client, when it was given
	overlap             int
	counts, running     bool // for its tenant: it is live; and not paused
	restored            bool // after a restart: the share says whether it is a latency grant
}

func newJudge(w *world) *judge {
	return &judge{w: w, used: map[base.Epoch]bool{}, fenced: map[*client]bool{}, grants: map[base.ClientID]grant{}, attached: map[*client]int{}, suspended: map[base.ClientID]base.Time{}}
}

func (j *judge) modeSet(m sched.Mode) {
	if m == sched.Concurrent {
		j.overlap++
	}
}

func (j *judge) restarted() {
	d := j.w.daemon
	j.endHoldOff(d.run - 1)
	j.modeSet(d.effective)
	for id := range j.grants {
		j.ended(id)
	}
	j.w.changed()
	j.has, j.asked, j.forced = map[base.ClientID]uint64{}, map[base.ClientID]base.Time{}, map[base.ClientID]bool{}
	j.withdrew, j.requested = map[base.ClientID]bool{}, map[base.ClientID]bool{}
	j.leaves, j.owed = map[base.ClientID]bool{}, map[base.ClientID]base.Time{}
	j.holdOff = 0
	if d.persisted.Unrecorded {
		j.holdOff = j.w.now.Add(d.quantum + d.grace)
	}
}

func (j *judge) attaches(c *client) { j.attached[c] = j.w.daemon.run }

// endHoldOff counts those as fenced that were away for too long.
func (j *judge) endHoldOff(run int) {
	if j.holdOff == 0 || j.w.now < j.holdOff {
		return
	}
	for _, c := range j.w.client {
		if c != nil && j.attached[c] != run {
			j.fenced[c] = true
		}
	}
	j.holdOff = 0
}

// occupies says whether a process can have work on the GPU now, or submit some
// without anybody else doing anything.
func occupies(c *client) bool {
	opens := c.attached && c.page.word != 0 && c.page.word != c.released
	return c.local != 0 || c.closing != 0 || opens
}

// alone fails unless nobody but fenced clients and latency tenants occupies the
// GPU beside c.
func (j *judge) alone(c base.ClientID, what string, epoch base.Epoch) {
	j.endHoldOff(j.w.daemon.run)
	for _, other := range j.w.client {
		switch {
		case other == nil || other.id == c || !occupies(other) || j.grants[other.id].latency:
		case j.ganged(c, other.id):
		case j.grants[c].shared && j.grants[other.id].shared:
			j.w.report.Shared++
			if j.latency() {
				j.w.report.SharedLatency++
			}
			if (j.w.gangOf(c) != "") != (j.w.gangOf(other.id) != "") {
				j.w.report.SharedGroup++
			}
		case j.fenced[other]:
			j.w.report.Overlaps++
		default:
			j.w.fail("overlap: client %d %s under epoch %d, while client %d is on the GPU (gate %d, draining %d, page %d)",
				c, what, epoch, other.id, other.local, other.closing, other.page.word)
		}
	}
}

// ganged says whether two clients are of one gang, now or when they were granted.
func (j *judge) ganged(a, b base.ClientID) bool {
	then := j.grants[a].gang
	return j.w.ofOneGang(a, b) || then != "" && then == j.grants[b].gang
}

func (j *judge) granted(a sched.Grant) {
	if j.used[a.Epoch] {
		j.w.fail("%v: that epoch was used before", a)
	}
	j.used[a.Epoch] = true
	if j.withdrew[a.Client] && !j.leaves[a.Client] && j.w.gangOf(a.Client) == "" {
		j.w.fail("%v, and its client wants nothing any more", a)
	}
	delete(j.owed, a.Client)
	delete(j.requested, a.Client)
	delete(j.fenced, j.w.byID[a.Client])
	j.ended(a.Client)
	if c := j.w.byID[a.Client]; a.Shared && c != nil && c.tenant != nil { // see checkLimits
		c.tenant.changed(j.w.now)
	}
	j.grants[a.Client] = grant{concurrent: a.Concurrent, latency: a.Latency || a.Beside, beside: a.Beside, shared: a.Shared, gang: j.w.gangOf(a.Client), overlap: j.overlap, counts: true}
	j.running(a.Client, true)
	if j.grants[a.Client].gang != "" && !a.Concurrent {
		j.w.report.GangGrants++
	}
	switch {
	case a.Latency:
		j.shut(a.Client)
	case !a.Concurrent:
		j.alone(a.Client, "is granted", a.Epoch)
	}
}

// restored notes what a restarted core is told of a grant: the share of its client
// may have changed meanwhile.
func (j *judge) restored(r sched.Restore) {
	g := j.grants[r.Client]
	g.gang, g.restored = sched.Share{Gang: r.Gang, Overlap: r.Overlap}.Group(), true
	j.grants[r.Client] = g
}

// stepped is for a client of a gang that makes one call while others drain.
func (j *judge) stepped(a sched.StepOne) {
	j.w.report.GangSteps++
	j.granted(sched.Grant{Client: a.Client, Epoch: a.Epoch})
}

// shut fails if a gate is open beside which a latency tenant is let in.
func (j *judge) shut(c base.ClientID) {
	for id, p := range j.w.daemon.pages {
		if g := j.grants[id]; id != c && j.w.byID[id] != nil && p.word != 0 && !g.latency && j.w.daemon.effective == sched.Exclusive {
			j.w.fail("the gate of client %d is open while client %d gets a latency grant", id, c)
		}
	}
}

func (j *judge) resumed(a sched.Resume) {
	for id, p := range j.w.daemon.pages {
		if g := j.grants[id]; g.latency && !g.beside && id != a.Client && j.w.byID[id] != nil && p.word != 0 && j.w.daemon.effective == sched.Exclusive {
			j.w.fail("client %d is resumed while client %d has a latency grant", a.Client, id)
		}
	}
}

// running notes that a client's grant is paused, or not.
func (j *judge) running(id base.ClientID, on bool) {
	g := j.grants[id]
	if !g.counts || g.running == on {
		return
	}
	g.running = on
	j.grants[id] = g
	if c := j.w.byID[id]; c != nil && c.tenant != nil {
		n := 1
		if !on {
			n = -1
		}
		c.tenant.count(j.w.now, n)
	}
}

// beside says whether a latency tenant runs beside the holder, whose gate is open.
func (j *judge) beside() bool {
	for _, g := range j.grants {
		if g.beside && g.running {
			return true
		}
	}
	return false
}

// latency says whether a latency tenant has the GPU, whoever else has.
func (j *judge) latency() bool {
	for _, g := range j.grants {
		if g.latency && g.running {
			return true
		}
	}
	return false
}

// ended notes that a client's grant is not live any more.
func (j *judge) ended(id base.ClientID) {
	j.running(id, false)
	if g, ok := j.grants[id]; ok {
		g.counts = false
		j.grants[id] = g
	}
}

func (j *judge) opened(c *client) {
	// A fenced one can still open: stopped after its word was written, and the
	// daemon that wrote it is dead.
	if g := j.grants[c.id]; !g.concurrent && g.overlap == j.overlap && !j.fenced[c] {
		j.alone(c.id, "opens its gate", c.local)
	}
}

func (j *judge) adopted(a sched.Adopt) {
	c := j.w.byID[a.Client]
	delete(j.fenced, c)
	g := j.grants[a.Client]
	latency := c != nil && c.tenant != nil && c.tenant.share.Priority == sched.Latency
	g.latency = latency || g.latency && !g.restored // as far as can be told from here
	g.restored = false
	j.ended(a.Client)
	g.counts, g.running, g.beside, g.shared = true, false, false, a.Shared
	j.grants[a.Client] = g
	j.running(a.Client, true)
	if j.w.daemon.effective == sched.Exclusive && !g.latency {
		j.alone(a.Client, "is adopted", a.Epoch)
	}
}

func (j *judge) fence(id base.ClientID) {
	j.ended(id)
	if c := j.w.byID[id]; c != nil {
		j.fenced[c] = true
	}
}

// drained says that the client has no work on the GPU; dead, it has none.
func (j *judge) drained(c *client) {
	delete(j.fenced, c)
	if !c.alive {
		delete(j.attached, c)
		j.ended(c.id)
		delete(j.grants, c.id)
	}
}

func (j *judge) waited(c *client) {
	j.w.report.LongestWait = max(j.w.report.LongestWait, j.w.now.Sub(c.blockedSince))
}

// checkStarvation holds the core to its word that everybody gets a turn.
func (j *judge) checkStarvation() {
	for _, c := range j.w.client {
		if c == nil || !c.blocked || !c.attached || c.closing != 0 || j.w.now < c.stopped {
			continue
		}
		if wait, bound := j.w.now.Sub(max(c.blockedSince, j.w.stable)), j.patience(c); wait > bound && !j.spoilt(c) {
			j.w.fail("client %d waits for %v, more than %v", c.id, wait, bound)
		}
	}
	for _, c := range j.w.client {
		if c == nil || j.owed[c.id] == 0 || !c.attached {
			continue
		}
		if wait, bound := j.w.now.Sub(max(j.owed[c.id], c.idleFrom, j.w.stable)), j.patience(c); wait > bound && !j.spoilt(c) {
			j.w.fail("client %d was resumed %v ago, and has not been granted, within %v", c.id, wait, bound)
		}
	}
}

// spoilt says whether the client, or one that has its limit in common with it,
// makes claims that keep it from its turn. Tenants of an overlap group, or of a gang, have
// the limit of any of them in common, and owe what one that has left them has used.
func (j *judge) spoilt(c *client) bool {
	if c.hostile || j.w.outOfRoom(c) {
		return true
	}
	limited, hostile := false, j.w.indebted[j.w.gangOf(c.id)]
	for _, other := range j.w.client {
		if other != nil && other.tenant != nil && (other.tenant == c.tenant || j.w.ofOneGang(other.id, c.id)) {
			limited, hostile = limited || other.tenant.share.Limit != 0, hostile || other.hostile
		}
	}
	return limited && hostile
}
