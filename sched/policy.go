// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
)

// policy is one rule of who is granted, and when a grant is asked back. Each has a
// file of its own, and its line in policies. A Step asks all of them, again and
// again, until nothing changes: they leave nothing undone that is due, and do nothing
// twice. A way to share the GPU, as by time slices, is a policy that grants.
type policy struct {
	due    func(*GPU) (base.Time, bool) // when it has something to do if nothing else happens; nil: never
	revoke func(*GPU)                   // asks back the grants whose time is over; nil: none
	grant  func(*GPU)                   // gives the grants whose time has come; nil: none
}

// policies are in the order in which they are asked.
func policies() []policy {
	return []policy{
		gracePeriods(),
		chosenWay(),
		limits(),
		gangTurns(),
		tenantsBeside(),
		latencyTenants(),
		timeSlices(),
		idleClients(),
		strandedMemory(),
		stalledMoves(),
		turns(),
		sharedTurns(),
		together(),
	}
}

// applyPolicies runs at the end of each Step.
func (c *GPU) applyPolicies() {
	for done := -1; done != c.changes(); { // one may make another due
		done = c.changes()
		for _, p := range c.policies {
			if p.revoke != nil {
				p.revoke(c)
			}
		}
		for _, p := range c.policies {
			if p.grant != nil {
				p.grant(c)
			}
		}
	}
}

// changes counts what policies change and others look at: actions, phases of gangs, and
// clients that begin to wait.
func (c *GPU) changes() int { return len(c.acts) + c.gangs.Changes() + int(c.seq) }

// due returns when something has to be done.
func (c *GPU) due() (base.Time, bool) {
	var e base.Earliest
	for _, p := range c.policies {
		if p.due != nil {
			e.Either(p.due(c))
		}
	}
	return e.At, e.OK
}

func (c *GPU) grant(cl *client) {
	t := cl.tenant
	cl.standing = false // the grant replaces that
	c.startWork(cl)
	latency := t.place == urgent
	if c.effective == Exclusive && !latency && !c.free() && !(c.cohortRuns() && c.inCohort(t)) && (c.kept != t || t.slot.Hold() != gang.Playing || !c.alone(t)) {
		panic("sched: two holders")
	}
	gr := c.give(cl, c.unqueueForGrant(cl))
	waited := c.countGrant(cl)
	limited := min(t.LimitedFor()-cl.limitedThen, waited)
	first := c.open.head
	beside := latency && c.mayBeBeside(t)
	switch {
	case beside:
		gr.kind = besideGrant
	case latency:
		gr.kind = latencyGrant
	}
	c.startMoving(gr)
	c.mem.Granted(cl.id, gr.move.on)
	c.become(gr, granted)
	g := Grant{
		Client: cl.id, Tenant: t.displayName(), Epoch: gr.epoch, Waited: waited, Limited: limited,
		Concurrent: latency || c.effective == Concurrent, Latency: latency && !beside, Beside: beside, Moving: gr.move.on,
	}
	if !latency {
		gr.alone = c.effective == Exclusive && c.latency.n == 0
		gr.startVT = t.VT()
		if first != nil && c.effective == Exclusive { // the turn of its gang or cohort has begun already
			gr.ran, gr.startVT = c.ranAt(first.grant), first.grant.startVT
		}
		gr.shared = c.effective == Exclusive && c.inCohort(t)
		g.Shared = gr.shared
		c.notAlone()
		if c.effective == Exclusive {
			g.Quantum = c.turn(t)
		}
	}
	// Nobody waits for the end of a latency grant, so it need not outlive a restart:
	// it is recorded after it has been given, see settle. Its epoch must not be used
	// again after a restart, see takeEpoch.
	late := latency && c.persisted.Epoch != 0 && c.epoch < c.persisted.Epoch+unrecorded
	if r := c.record(); !late && !covers(c.persisted, r) {
		c.persist(r)
	}
	c.notice(cl) // before the gate opens, so that the page is right when it does
	c.do(g)
	if latency && c.latency.n > noticed && cl.told.Leave {
		c.tellAll = true // they may be granted in this Step as well
	}
}

// countGrant counts a grant and how long its client waited for it, which it returns.
func (c *GPU) countGrant(cl *client) time.Duration {
	t, waited := cl.tenant, c.now.Sub(cl.waitingSince)
	cl.longestWait = max(cl.longestWait, waited)
	t.longestWait = max(t.longestWait, waited)
	t.recentWait.Note(c.now, waited)
	if t.waits == nil {
		t.waits = &account.Lately{}
	}
	t.waits.Note(c.now, waited)
	cl.grants++
	t.grants++
	c.counters.Grants++
	return waited
}

func (c *GPU) revoke(g *grant, why RevokeReason) {
	c.become(g, draining)
	c.counters.Revokes++
	c.do(Revoke{Client: g.client.id, Epoch: g.epoch, Grace: g.graceFrom.Add(c.grace).Sub(c.now), Waiters: c.waiting, Why: why})
}

func (c *GPU) revokeTenant(t *tenant, l *list, why RevokeReason) {
	for cl := l.head; cl != nil; {
		next := cl.next
		if cl.tenant == t {
			c.revoke(cl.grant, why)
		}
		cl = next
	}
}

// unqueueForGrant takes a client out of its queue and returns the epoch of its
// grant: the one that was chosen for it, or the next.
func (c *GPU) unqueueForGrant(cl *client) base.Epoch {
	chosen := c.next == cl
	c.unqueue(cl)
	if chosen {
		return c.nextEpoch
	}
	return c.takeEpoch()
}
