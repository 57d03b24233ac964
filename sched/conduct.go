// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
)

// What a core does for the gangs with clients on its GPU; gang.go has the whole.

// conduct has the gangs go on, and does what that means here.
func (c *Core) conduct() {
	for _, t := range c.ganged {
		t.gang.advance(c)
		c.follow(t)
	}
}

// follow brings what a gang has of this GPU in line with its phase.
func (c *Core) follow(t *tenant) {
	g := t.gang
	if c.effective != Exclusive {
		return
	}
	if t.hold == playing && g.phase != running || t.hold == kept && g.phase == stopping {
		c.stop(t, GangTurn)
	}
	switch {
	case t.hold == leaving && g.phase != stopping, t.hold == kept && g.phase != called && g.phase != running, c.mustYield(t),
		t.hold != nothing && !t.manned() && !t.live():
		c.kept, t.hold = nil, nothing
		c.gangs.changes++
	case t.hold == nothing && g.phase == stopping && c.kept == nil && t.batch > 0 && c.open.n == 0 && c.closingBatch == t.batch:
		// It drains what it had before it was a gang, or before a restart.
		c.kept, t.hold, t.round = t, leaving, g.round
	}
	if t.hold == leaving {
		if at, has := g.nextStep(); has && c.now >= at {
			g.round++
			g.releasedAt = c.now
			g.tell(c)
		}
		if t.round != g.round {
			t.round = g.round
			if t.stepsAt(c.now) {
				c.stepMembers(t)
			}
		}
	}
	c.review(t)
}

// mustYield says whether the GPU is kept for a gang that is called after another
// one, which has come to this GPU since.
func (c *Core) mustYield(t *tenant) bool {
	first := c.upNext()
	return t.hold == kept && t.gang.phase == called && first.isCalled() &&
		first.gang.ticket < t.gang.ticket
}

// stop ends the turn of the gang that has this GPU, on all its GPUs.
func (c *Core) stop(t *tenant, why RevokeReason) {
	g := t.gang
	t.hold, t.round = leaving, g.round
	c.revokeTenant(t, &c.open, why)
	if g.phase == running || g.phase == called {
		g.enter(stopping, c)
	}
	c.review(t)
}

// stepMembers lets the members that have drained and wait make one call each.
func (c *Core) stepMembers(t *tenant) {
	var stepped []*client
	for _, cl := range slices.Clone(t.crew) {
		if cl.in != &t.queue {
			continue
		}
		g := c.give(cl, c.unqueueForGrant(cl))
		g.graceFrom = t.gang.stoppedAt // it is all one drain
		c.become(g, draining)
		stepped = append(stepped, cl)
	}
	if r := c.record(); len(stepped) > 0 && !covers(c.persisted, r) {
		c.persist(r)
	}
	for _, cl := range stepped {
		c.do(StepOne{Client: cl.id, Epoch: cl.grant.epoch, Grace: cl.grant.graceFrom.Add(c.grace).Sub(c.now)})
	}
}

// upNext returns who has the GPU next: who is called, else who is behind.
func (c *Core) upNext() *tenant {
	var first *tenant
	for _, t := range c.ganged {
		if t.isCalled() && c.kept != t && (first == nil || t.gang.ticket < first.gang.ticket) {
			first = t
		}
	}
	if first == nil {
		first = c.inTurn()
	}
	return first
}

// setAside notes that the turn of a gang has come here, if it is next. If that is
// not so yet on all its GPUs others go before it.
func (c *Core) setAside() bool {
	t := c.upNext()
	if t == nil || t.gang == nil || t.gang.phase != wanted || c.effective != Exclusive {
		return false
	}
	t.due = true
	t.gang.advance(c)
	c.review(t)
	return true
}

// passOver returns who gets the GPU next, now that it is, or becomes, free.
func (c *Core) passOver() *tenant {
	for c.setAside() {
	}
	return c.upNext()
}

// keep keeps the free GPU for a gang that is called, or runs elsewhere.
func (c *Core) keep(t *tenant) {
	c.kept, t.hold = t, kept
	c.gangs.changes++
	t.gang.advance(c)
	c.review(t)
}

// restoreGang has a gang that held go on: it runs, and its members are lost. Did
// others hold as well, then not as turns are, and it gives back what it has.
func (c *Core) restoreGang(t *tenant) {
	switch {
	case c.effective != Exclusive:
	case c.kept != nil && c.kept != t:
		c.stop(c.kept, GangTurn)
	case t.gang == nil || c.kept == t:
	case c.closingBatch > t.batch || c.open.n > 0 || c.holdOff != 0:
		if t.gang.phase == running {
			t.gang.enter(stopping, c)
		}
	case t.gang.phase == resting || t.gang.phase == running:
		c.kept, t.hold = t, playing
		if t.gang.phase == resting {
			t.gang.enter(running, c)
		}
	}
}

// awaited returns a member of the gang that has its turn here which is lost, and
// may go on when it is back; nil: there is none.
func (t *tenant) awaited() *client {
	for _, cl := range t.crew {
		if cl.grant != nil && cl.grant.state == lost {
			return cl
		}
	}
	return nil
}

// alone says whether nobody is on the GPU but the gang for which it is kept.
func (c *Core) alone(t *tenant) bool {
	return c.open.n+c.closingBatch == t.batch && c.latency.n == 0 && c.urgent.top() == nil && c.holdOff == 0
}

// grantGang grants the members of the gang that has its turn: at its begin all,
// later those that ask.
func (c *Core) grantGang() {
	t := c.kept
	if t == nil || t.gang.phase != running || !c.alone(t) {
		return
	}
	if t.hold == kept {
		t.hold = playing
		c.gangs.changes++
		t.vt = max(t.vt, c.virtualNow()-int64(c.quantum)*int64(c.active+1)) // see setActive
		for _, cl := range slices.Clone(t.crew) {
			if cl.connected && cl.in == nil && cl.grant == nil {
				c.request(cl)
			}
		}
	}
	for t.hold == playing && t.queue.n > 0 {
		c.grant(t.queue.head)
	}
}

// sit and unsit: the tenant of a gang has its first client, or lost its last.
func (c *Core) sit(t *tenant) {
	c.gangs.join(t)
	c.ganged = append(c.ganged, t)
}

func (c *Core) unsit(t *tenant) {
	if c.kept == t {
		c.kept = nil
	}
	c.ganged = slices.Delete(c.ganged, slices.Index(c.ganged, t), slices.Index(c.ganged, t)+1)
	c.gangs.leave(t)
}

// reshare is SetShare: what the tenant's clients are part of may change with it.
func (c *Core) reshare(account string, s Share) {
	if t := c.tenants[account]; t != nil && s.Gang == "" {
		c.setShare(t, s)
		if t.share.Priority == Batch {
			c.revokeTenant(t, &c.latency, PriorityUsedUp) // nothing else would end them
		}
		c.standAll(t)
	}
	for _, cl := range c.inOrder() {
		if cl.account != account || account == "" {
			continue
		}
		t := c.tenantOf(account, cl.id, s)
		if t != cl.tenant && c.effective == Exclusive {
			switch {
			case cl.grant.holds():
				c.revoke(cl.grant, GangTurn)
			case cl.grant.closes():
				c.askBack(cl.grant) // it was given to it as another
			}
		}
		c.join(cl, t)
		c.setShare(t, s)
		c.stand(cl)
	}
}

// checkGangs checks what is kept, and who is granted together.
func (c *Core) checkGangs() error {
	if c.kept != nil && (c.effective != Exclusive || c.kept.gang == nil || c.kept.hold == nothing || c.kept.clients == 0) {
		return fmt.Errorf("the GPU is kept for nobody: %s", c.kept.displayName())
	}
	for _, t := range c.ganged {
		if t.gang == nil || len(t.crew) != t.clients || t.clients == 0 {
			return fmt.Errorf("tenant %s: %d clients, %d in its crew", t.displayName(), t.clients, len(t.crew))
		}
		if t.hold != nothing && c.kept != t {
			return fmt.Errorf("tenant %s says it has the GPU", t.displayName())
		}
	}
	if c.effective != Exclusive {
		return nil
	}
	for cl := c.open.head; cl != nil; cl = cl.next {
		if c.open.n > 1 && (c.kept == nil || cl.tenant != c.kept) || c.kept != nil && (cl.tenant != c.kept || c.kept.hold != playing) {
			return fmt.Errorf("two holders: %d grants are open, that of client %d not by its gang's turn", c.open.n, cl.id)
		}
	}
	if t := c.kept; t != nil && t.gang.phase == running && t.queue.n > 0 && c.alone(t) {
		return fmt.Errorf("%d clients of the gang that has the GPU wait", t.queue.n)
	}
	return nil
}
