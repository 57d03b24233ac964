// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// A cohort. Turns hold a core limit exactly, because all that a tenant does in its turn is
// billed to it; time slices cannot, because what one process had of them is known to some
// percent only. But turns for all, because one tenant needs them, would cost the others
// what they gain by slices: language models half. So tenants that need turns of their own are
// apart, and have these. All others are a cohort. They have one turn together, in which they
// share the GPU by time slices.
//
// To the order of turns the cohort is one tenant: its virtual time is common, its part is
// the sum of theirs, and its turn is over for all of them at once. What each has of the
// common turn is billed by what slices give it, as in sliceway.go.
//
// Apart are tenants with a core limit, and those with a client whose slice cannot be set or whose
// channels cannot be taken off; unless they leave the GPU idle in their turns. Then a turn of its
// own would waste what the tenant leaves, and it is one of the cohort: its limit is charged
// what it uses of its slices (useOf), and a slice that cannot be set is the driver's, to which
// those of others are in proportion. Never of a cohort are latency tenants, which do not wait for
// turns, and gangs, which have their turns on several GPUs at once.

// cohort is what a GPU knows of its cohort.
type cohort struct {
	on    bool
	vt    int64               // virtual time of its tenants
	ran   time.Duration       // that it had the GPU
	since time.Duration       // ran at the start of the window
	had   float64             // of the latest window: all of it where there is no cohort
	idle  float64             // the sum of the parts of the latest window in which its clients had no work
	parts map[*tenant]float64 // as cohortParts, at the end of the latest window
}

const (
	// A tenant leaves the GPU idle if a client of it keeps it busy for less than this part of
	// its own time, and as one of a cohort for less than stillLeaves.
	leavesIdle, stillLeaves = 0.75, 0.85
	// apartFor is how long a tenant at most has turns of its own that did something else in the cohort than
	// before, until its turns have shown what it does now. It has none again sooner.
	apartFor = 10 * time.Second

	// maxCohort is how many clients a cohort has at most: each end of its turn is a message to
	// each, of 3 us.
	maxCohort = 256
)

// inCohort says whether a tenant has its turn together with others.
func (c *GPU) inCohort(t *tenant) bool { return c.cohort.on && !t.apart }

// exclusive says whether a tenant with the share is never of a cohort.
func (s Share) exclusive() bool { return s.Priority == Latency || s.Gang != "" }

// lookWhoIsApart finds out which tenants need turns of their own.
func (c *GPU) lookWhoIsApart() {
	needs, leaves := map[*tenant]bool{}, map[*tenant]bool{}
	c.slices.fixed = false
	for _, cl := range c.inOrder() {
		t := cl.tenant
		if cl.shares() {
			c.slices.fixed = c.slices.fixed || t.share.Priority != Latency && c.notSliceable(cl).Why != reasonNone
			needs[t] = needs[t] || t.limited() || c.notEven(cl)
			leaves[t] = leaves[t] || cl.leavesGaps()
		}
	}
	for _, t := range c.tenantsInOrder() {
		if c.inCohort(t) && t.limited() && t.other && c.now >= t.closeTo {
			c.doubt(t)
		}
		c.setApart(t, t.share.exclusive() || needs[t] && (!leaves[t] || c.doubted(t)))
	}
}

// notEven says whether a client can have slices of its own only, or may drain for long.
func (c *GPU) notEven(cl *client) bool {
	if cl.tenant.overlaps() { // its slice is its MPS server's; it has little work ahead of the GPU, see neighbors
		return false
	}
	return c.notSliceable(cl).Why != reasonNone || cl.controls.Client != 0 && cl.controls.Channels != ControlWorks
}

// leavesGaps says whether the client leaves the GPU idle in its turns.
func (cl *client) leavesGaps() bool {
	most := leavesIdle
	if !cl.tenant.apart {
		most = stillLeaves
	}
	_, busy, known := cl.progress.Alone()
	return known && busy < most
}

// setApart has a tenant take turns of its own, or not.
func (c *GPU) setApart(t *tenant, apart bool) {
	if t.apart == apart {
		return
	}
	c.bill(t)
	t.apart, t.use, t.other = apart, 0, false
	c.noteUse(t)
	c.addUpAll()
	c.slices.stale, c.dueCache.stale, c.tellAll = true, true, true
	c.review(t)
}

// doubt has a tenant take turns of its own that seems to do something else than in its turns before.
func (c *GPU) doubt(t *tenant) {
	t.closeTo = c.now.Add(apartFor)
	load := c.load()
	for _, cl := range c.inOrder() {
		if cl.tenant == t && cl.shares() {
			cl.progress.Doubt(load - cl.progress.Load())
		}
	}
}

// doubted says whether its turns have yet to show what a tenant does.
func (c *GPU) doubted(t *tenant) bool {
	return c.now < t.closeTo && slices.ContainsFunc(c.inOrder(), func(cl *client) bool {
		return cl.tenant == t && cl.shares() && cl.progress.Doubts()
	})
}

// load is how much work waits for the GPU of all who share it by slices, 1 for each that always has some.
func (c *GPU) load() (load float64) {
	for _, cl := range c.inOrder() {
		if c.slicing(cl) {
			load += cl.progress.Load()
		}
	}
	return load
}

// noteUse has the limit of a tenant in a cohort be charged what its clients use.
func (c *GPU) noteUse(t *tenant) {
	if t.apart || !t.limited() {
		return
	}
	c.bill(t)
	load, use := c.load(), 0.0
	t.other = false
	for _, cl := range c.inOrder() {
		if cl.tenant != t || !cl.shares() {
			continue
		}
		part, other := cl.progress.Use(load - cl.progress.Load())
		t.other = t.other || other
		if t.overlaps() { // its clients have the GPU at the same time
			part *= 1 - use
		}
		use += part
	}
	t.use = base.Clamp(int(1000*use), 1, 1000)
}

// againstCohort says why there is no cohort. It is there for tenants with limits or requests, if
// slices alone cannot serve them and two others at least can share a turn.
//
// There is no cohort beside a gang that works. When a gang is called, each of its GPUs is idle from
// its own drain to the last drain on any of them, and a cohort drains as slowly as the slowest of
// its clients: what that costs the other GPUs nobody has measured. And the simulator of several GPUs
// has no time slices, so nothing would show that a gang's call and a cohort's end get on.
//
// An overlap group is one of the others, as where all share by slices.
//
// A latency tenant is let in beside the cohort as beside any holder: by a beside grant, for which
// the slices are short; or, if it has a limit itself or the slice of another one cannot be set, by
// latency grants, which are billed exactly, and shut the gates of the whole cohort meanwhile. Short slices cost clients that keep the
// GPU busy much, and are too short to hold requests. So the others share their turn
// beside it only if they leave the GPU idle in turns, and if nothing is promised to them.
func (c *GPU) againstCohort() Cause {
	if c.auto.against[WaySlices].Why == reasonNone || c.exact == 0 && !c.slices.crowded {
		return because(reasonNotNeeded)
	}
	others, clients, promised := 0, 0, false
	short := c.slices.crowded && !c.slices.fixed
	groups := map[*tenant]bool{}
	for _, cl := range c.inOrder() {
		t := cl.tenant
		switch {
		case c.gangPlays(cl):
			return because(reasonGang)
		case !cl.shares():
			continue
		case t.apart && c.cohort.on && c.doubted(t):
			if !groups[t] {
				others++ // it is back soon
			}
			groups[t] = true
			continue
		case t.apart:
			continue
		}
		clients++
		if !groups[t] {
			others++
		}
		if t.overlaps() {
			groups[t] = true
		}
		promised = promised || t.share.Request > 0
	}
	switch {
	case others < 2:
		return because(reasonFew)
	case short && promised:
		return because(reasonUneven)
	case short && !c.auto.gaps:
		return because(reasonBusy)
	case clients > maxCohort:
		return because(reasonMany)
	}
	return Cause{}
}

// startCohort is for clients that begin to share their turns by slices.
func (c *GPU) startCohort() {
	co := &c.cohort
	co.on, co.vt, co.ran, co.since, co.idle = true, c.virtualNow(), 0, 0, 1
	for _, t := range c.tenantsInOrder() {
		c.review(t)
	}
	c.tellAll = true
}

// endCohort has each tenant take turns of its own. Nobody goes on beside others.
func (c *GPU) endCohort() {
	if !c.cohort.on {
		return
	}
	for _, t := range c.tenants {
		c.bill(t) // as one of the cohort
	}
	c.cohort.on, c.cohort.parts = false, nil
	for c.open.n > 1 {
		c.revoke(c.open.head.grant, ModeChange)
	}
	for _, t := range c.tenantsInOrder() {
		c.review(t)
	}
	c.slices.stale, c.tellAll = true, true
}

// sharedTurns lets the tenants of a cohort join its turn.
func sharedTurns() policy {
	return policy{
		revoke: func(c *GPU) {
			if !c.cohort.on {
				return
			}
			for cl := c.open.head; cl != nil; {
				next := cl.next
				if cl.grant.shared && !c.inCohort(cl.tenant) { // it has a limit since just now
					c.revoke(cl.grant, ModeChange)
				}
				cl = next
			}
		},
		grant: func(c *GPU) {
			for t := c.joiner(); t != nil; t = c.joiner() {
				c.grant(c.nearest(t))
			}
		},
	}
}

// cohortRuns says whether only the cohort is on the GPU, apart from latency tenants that
// disturb nobody, and its turn goes on.
func (c *GPU) cohortRuns() bool {
	return c.open.n > 0 && c.onlyCohort(func(*grant) bool { return true })
}

// cohortIsLost says whether nobody has the GPU, and those whose turn it is have lost their
// connections, as after a restart.
func (c *GPU) cohortIsLost() bool {
	return c.open.n == 0 && c.onlyCohort(func(g *grant) bool { return g.state == lost })
}

// onlyCohort says whether all turns are those of the cohort, and all are as ok says.
func (c *GPU) onlyCohort(ok func(*grant) bool) bool {
	if !c.cohort.on || c.kept != nil || c.holdOff != 0 || c.latency.n > 0 || len(c.moves) > 0 {
		return false
	}
	for _, l := range []*list{&c.open, &c.closing} {
		for cl := l.head; cl != nil; cl = cl.next {
			if cl.grant.kind == turnGrant && (!cl.grant.shared || !ok(cl.grant)) {
				return false
			}
		}
	}
	return true
}

// joiner returns a tenant that waits and may join the turn that goes on; nil: none. One that
// has to move memory has a turn of its own first: it is not ready.
func (c *GPU) joiner() *tenant {
	if c.ready.top() == nil || !c.cohortRuns() {
		return nil
	}
	for _, t := range c.ready.items {
		if c.inCohort(t) {
			return t
		}
	}
	return nil
}

// turnPart returns which part of the GPU a tenant's turns are to have: in a cohort all its
// tenants' parts.
func (c *GPU) turnPart(t *tenant) int64 {
	if !c.inCohort(t) {
		return c.part(t)
	}
	d := c.duesNow()
	parts := d.cohort
	if !t.active {
		parts += c.part(t)
	}
	return min(max(parts, account.MinPart), account.One)
}

// cohortParts returns the parts that the tenants of the cohort are to have of its turn, 1 in
// all. A tenant that does not want the GPU for a moment counts, as turns end all the time. One
// that sleeps has none; sleepers: it has, beyond that 1, about what it would have awake.
func (c *GPU) cohortParts(sleepers bool) map[*tenant]float64 {
	requests, weights := 0, 0
	awake := map[*tenant]bool{}
	for _, cl := range c.inOrder() {
		if t := cl.tenant; cl.shares() && !c.sleeps(cl) && !awake[t] {
			awake[t] = true
			requests += t.share.Request
			weights += t.share.Weight
		}
	}
	parts := map[*tenant]float64{}
	sum := 0.0
	for _, t := range c.tenantsInOrder() { // sums of floats depend on the order
		if !c.inCohort(t) || !awake[t] && !sleepers {
			continue
		}
		parts[t] = float64(t.share.Request)/100 + max(1-float64(requests)/100, 0)*float64(t.share.Weight)/float64(max(weights, 1))
		if t.limited() { // also if it says that it uses little
			parts[t] = min(parts[t], float64(t.share.Limit)/100)
		}
		if awake[t] {
			sum += parts[t]
		}
	}
	for t := range parts {
		parts[t] /= max(sum, account.MinPart/float64(account.One))
	}
	return parts
}

// keepUp gives a tenant that wants the GPU the virtual time of its cohort: who did less
// before has not saved that up, and who did more is not behind.
func (c *GPU) keepUp(t *tenant) {
	if t.queue.n > 0 && c.inCohort(t) {
		t.SetVT(c.cohort.vt)
	}
}

// countCohort adds up for how long the cohort has the GPU. It is called before anything
// changes.
func (c *GPU) countCohort(now base.Time) {
	if c.cohort.on && c.open.n > 0 && c.open.head.grant.shared {
		c.cohort.ran += now.Sub(c.now)
	}
}

// shareClock runs while clients share the GPU by slices: in a cohort, in its turns.
func (c *GPU) shareClock() time.Duration {
	if c.cohort.on {
		return c.cohort.ran
	}
	return time.Duration(c.now)
}

// sharedIn returns for how long of the window clients shared the GPU by slices.
func (c *GPU) sharedIn(window time.Duration) time.Duration {
	if !c.cohort.on {
		return window
	}
	return max(c.cohort.ran-c.cohort.since, time.Millisecond) // it is divided by this
}

// notAlone notes that the turn of a holder says nothing about what it gets alone, because
// others of its cohort hold too.
func (c *GPU) notAlone() {
	if c.open.n < 2 || !c.open.head.grant.shared {
		return
	}
	for cl := c.open.head; cl != nil; cl = cl.next {
		cl.grant.alone = false
	}
}

// cohortRounds is how many rounds of slices a turn of the cohort has at least. A turn may end
// in the middle of a round, always with the same client ahead.
const cohortRounds = 4

// cohortSlice returns the longest slice of which a turn of the cohort has enough.
func (c *GPU) cohortSlice() time.Duration {
	n, turn := 0, time.Duration(0)
	for _, cl := range c.inOrder() {
		if c.slicing(cl) {
			n++
			turn = max(turn, c.turn(cl.tenant))
		}
	}
	return max(turn/time.Duration(cohortRounds*max(n, 1)), timeslice.LeastSlice)
}

// A client with a limit that gives the GPU back in each of its short pauses would wait each
// time until the cohort has had a turn. If it keeps the GPU busy for most of its turns it stays.
const (
	shortPause = 2 * time.Millisecond
	busyTurn   = 0.25
)

func (cl *client) staysInTurn() bool {
	return cl.pauses.MostBelow(shortPause) && cl.progress.Keeps(busyTurn)
}
