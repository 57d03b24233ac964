// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"time"
)

// A cohort. Turns hold a core limit exactly, because all that a tenant does in its turn is
// billed to it; time slices cannot, because what one process had of them is known to some
// percent only. But turns for all, because one tenant has a limit, would cost the others
// what they gain by slices: language models half. So the tenants without a limit are a
// cohort. They have one turn together, in which they share the GPU by time slices, and each
// tenant with a limit has its own turn between these. An overlap group without a limit is one of
// the cohort: its clients are then granted as any others, and the GPU is not kept for it.
//
// To the order of turns the cohort is one tenant: its virtual time is common, its part is
// the sum of theirs, and its turn is over for all of them at once. What each has of the
// common turn is billed by what slices give it, as in sliceway.go.

// cohort is what a GPU knows of its cohort.
type cohort struct {
	on      bool
	allowed bool                // there may be one, as of the latest look
	why     string              // only this is against one, as of the latest look
	vt      int64               // virtual time of its tenants
	ran     time.Duration       // that it had the GPU
	since   time.Duration       // ran at the start of the window
	had     float64             // of the latest window: all of it where there is no cohort
	idle    float64             // the sum of the parts of the latest window in which its clients had no work
	parts   map[*tenant]float64 // as cohortParts, at the end of the latest window
}

// inCohort says whether a tenant has its turn together with others.
func (c *GPU) inCohort(t *tenant) bool { return c.cohort.on && t.mayShareTurn() }

// mayShareTurn says whether the tenant may have its turn together with others.
func (t *tenant) mayShareTurn() bool { return !t.share.apart() }

// apart says whether a tenant with the share never has a turn together with others: its use must
// be billed exactly, or it has its turns on several GPUs at once, or it does not wait for turns.
func (s Share) apart() bool { return s.limited() || s.Priority == Latency || s.Gang != "" }

// maxCohort is how many clients a cohort has at most: each end of its turn is a message to each.
const maxCohort = 32

// cohortAllowed says whether there may be a cohort: a tenant has a limit, and nothing but
// limits is against time slices for two others at least. If only these others are against it,
// why says so.
//
// There is no cohort beside a gang. When a gang is called, each of its GPUs is idle from its own
// drain to the last drain on any of them, and a cohort drains as slowly as the slowest of its
// clients: what that costs the other GPUs nobody has measured. And the simulator of several GPUs
// has no time slices, so nothing would show that a gang's call and a cohort's end get on.
//
// An overlap group is one of the others, as where all share by slices; with a limit it has turns
// of its own. There is no cohort with a group beside a latency tenant, as there are no slices.
//
// A latency tenant is let in beside the cohort as beside any holder: by a beside grant, for which
// the slices are short; or, if it has a limit itself, by latency grants, which are billed exactly,
// and shut the gates of the whole cohort meanwhile. Such short slices cost clients that keep the
// GPU busy much, and are too short to be of different lengths. So the others share their turn
// beside it only if they leave the GPU idle in turns, and if their parts are equal.
func (c *GPU) cohortAllowed() (allowed bool, why string) {
	limited, others, clients, even, weight := false, 0, 0, true, 0
	groups := map[*tenant]bool{}
	for _, cl := range c.inOrder() {
		t := cl.tenant
		if t.seat != nil && !t.overlaps() {
			return false, ""
		}
		if !cl.connected {
			continue
		}
		limited = limited || t.limited()
		if !t.mayShareTurn() || !cl.wanted {
			continue
		}
		clients++
		if !groups[t] {
			others++
		}
		even = even && t.share.Request == 0 && (weight == 0 || weight == t.share.Weight)
		weight = t.share.Weight
		switch p := cl.controls; {
		case t.overlaps(): // its slice is its MPS server's; it has little work ahead of the GPU, see neighbors
			groups[t] = true
		case c.notSliceable(cl) != "":
			why = fmt.Sprintf("client %d cannot be sliced: %s", cl.id, c.notSliceable(cl))
		case p.Client != 0 && p.Channels != ControlWorks: // work that is far ahead of the GPU could not be cut
			why = fmt.Sprintf("the channels of client %d cannot be taken off: %s", cl.id, p.Channels)
		}
	}
	switch {
	case !limited || others < 2:
		return false, ""
	case why != "":
	case len(groups) > 0 && c.hasLatencyTenant():
		why = reasonOverlap
	case c.slices.crowded && !even:
		why = reasonUneven
	case c.slices.crowded && !c.auto.gaps:
		why = reasonBusy
	case clients > maxCohort:
		why = fmt.Sprintf("they are %d clients, and %d at most are stopped together", clients, maxCohort)
	}
	return why == "", why
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
	if !c.cohort.on || c.open.n == 0 || c.kept != nil || c.holdOff != 0 || c.latency.n > 0 || len(c.moves) > 0 {
		return false
	}
	for _, l := range []*list{&c.open, &c.closing} {
		for cl := l.head; cl != nil; cl = cl.next {
			if cl.grant.kind == turnGrant && !cl.grant.shared {
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
	r := c.roster
	if !t.active {
		r.countShare(t.share, 1)
	}
	requests, weights := int64(r.requests-r.apart.requests)*one/100, int64(r.weights-r.apart.weights)
	rest, all := c.duesNow().with(t)
	// Its tenants have no limit, so there are weights.
	return min(max(requests+rest*weights/all, minPart), one)
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
		if awake[t] {
			sum += parts[t]
		}
	}
	for t := range parts {
		parts[t] /= max(sum, minPart/float64(one))
	}
	return parts
}

// keepUp gives a tenant that wants the GPU the virtual time of its cohort: who did less
// before has not saved that up, and who did more is not behind.
func (c *GPU) keepUp(t *tenant) {
	if t.queue.n > 0 && c.inCohort(t) {
		t.vt = c.cohort.vt
	}
}

// countCohort adds up for how long the cohort has the GPU. It is called before anything
// changes.
func (c *GPU) countCohort(now Time) {
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
	return max(turn/time.Duration(cohortRounds*max(n, 1)), LeastSlice)
}

// A client with a limit that gives the GPU back in each of its short pauses would wait each
// time until the cohort has had a turn. If it keeps the GPU busy for most of its turns it stays.
const (
	shortPause = 2 * time.Millisecond
	busyTurn   = 0.25
)

func (cl *client) staysInTurn() bool {
	return 2*cl.pausesBelow(shortPause) > len(cl.lately()) && cl.progress.hot > busyTurn*cl.progress.looks
}
