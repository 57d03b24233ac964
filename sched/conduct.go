// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// What a core does for the gangs with clients on its GPU. gang.go has the rules.

// gangTurns keeps the GPU for gangs whose turn has come on all their GPUs.
func gangTurns() policy {
	return policy{
		due: func(c *GPU) (Time, bool) {
			var e base.Earliest
			for _, t := range c.ganged {
				g := t.seat.gang
				e.Either(g.gangs.gather, g.phase == wanted && g.isDue())
			}
			if c.kept != nil && c.kept.seat.hold == leaving {
				e.Either(c.kept.seat.gang.nextStep())
			}
			return e.At, e.OK
		},
		revoke: (*GPU).conduct,
		grant:  (*GPU).grantGang,
	}
}

// conduct brings all gangs on this GPU to their next phase, and does what that means
// for the GPU.
func (c *GPU) conduct() {
	for _, t := range c.ganged {
		t.seat.gang.advance()
		c.follow(t)
	}
}

// follow brings what a gang has of this GPU in line with its phase.
func (c *GPU) follow(t *tenant) {
	g := t.seat.gang
	if c.inCohort(t) {
		c.leaveToCohort(t)
	}
	if !t.counts() {
		return
	}
	if t.seat.hold == nothing && g.phase == stopping { // its turn was that of a cohort
		c.revokeTenant(t, &c.open, GangTurn)
	}
	if t.seat.hold == playing && g.phase != running || t.seat.hold == kept && g.phase == stopping {
		c.stop(t, GangTurn)
	}
	switch {
	case t.seat.hold == leaving && g.phase != stopping, t.seat.hold == kept && g.phase != called && g.phase != running, c.mustYield(t),
		t.seat.hold != nothing && !t.manned() && !t.live():
		c.kept = nil
		t.seat.take(nothing)
	case t.seat.hold == nothing && g.phase == stopping && c.kept == nil && t.batch > 0 && c.open.n == 0 && c.closingBatch == t.batch:
		// The members drain what they had before they were a gang, or before a restart.
		c.kept, t.seat.hold, t.seat.round = t, leaving, g.round
	}
	if t.seat.hold == leaving {
		if at, has := g.nextStep(); has && c.now >= at {
			g.round++
			g.releasedAt = c.now
			g.tell()
		}
		if t.seat.round != g.round {
			t.seat.round = g.round
			if t.seat.stepsAt(c.now) {
				c.stepMembers(t)
			}
		}
	}
	c.review(t)
}

// leaveToCohort ends what an overlap group has of the GPU as a gang: from now on it has its
// turns with its cohort, each member as any other client.
func (c *GPU) leaveToCohort(t *tenant) {
	s := t.seat
	if s.hold == nothing && !s.due && s.gang.phase == resting {
		return
	}
	if c.kept == t {
		c.revokeTenant(t, &c.open, ModeChange)
		c.kept = nil
	}
	s.take(nothing)
	s.gang.enter(resting)
	c.review(t)
}

// mustYield says whether the GPU is kept for a gang, and a gang that was called
// earlier has come to this GPU since.
func (c *GPU) mustYield(t *tenant) bool {
	first := c.upNext()
	return t.seat.hold == kept && t.seat.gang.phase == called && first != nil && first.seat.isCalled() &&
		first.seat.gang.ticket < t.seat.gang.ticket
}

// stop ends the turn of the gang that has this GPU, on all its GPUs.
func (c *GPU) stop(t *tenant, why RevokeReason) {
	g := t.seat.gang
	t.seat.hold, t.seat.round = leaving, g.round
	c.revokeTenant(t, &c.open, why)
	if g.phase == running || g.phase == called {
		g.enter(stopping)
	}
	c.review(t)
}

// stepMembers lets the members that have drained and wait make one call each.
func (c *GPU) stepMembers(t *tenant) {
	var stepped []*client
	for _, cl := range slices.Clone(t.crew) {
		if cl.in != &t.queue || cl.cut {
			continue
		}
		g := c.give(cl, c.unqueueForGrant(cl))
		g.graceFrom = t.seat.gang.stoppedAt // all steps are one drain
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

// upNext returns the tenant that has the GPU next: a gang that is called, else the
// tenant that is behind the others.
func (c *GPU) upNext() *tenant {
	var first *tenant
	for _, t := range c.ganged {
		if t.seat.isCalled() && c.kept != t && (first == nil || t.seat.gang.ticket < first.seat.gang.ticket) {
			first = t
		}
	}
	if first == nil {
		first = c.inTurn()
	}
	return first
}

// setAside notes that the turn of a gang has come on this GPU, if a gang is next. Others
// go before it until its turn has come on all its GPUs.
func (c *GPU) setAside() bool {
	t := c.upNext()
	if t == nil || !t.byGang() || t.seat.gang.phase != wanted {
		return false
	}
	t.seat.due = true
	t.seat.gang.advance()
	c.review(t)
	return true
}

// passOver returns the tenant that gets the GPU when it is free.
func (c *GPU) passOver() *tenant {
	for c.setAside() {
	}
	return c.upNext()
}

// keep keeps the free GPU for a gang that is called, or runs elsewhere.
func (c *GPU) keep(t *tenant) {
	c.bill(t) // fenced members may have used up its credit since it was called
	c.kept = t
	t.seat.take(kept)
	t.seat.gang.advance()
	c.review(t)
}

// restoreGang lets a gang go on that held before a restart: it runs, and its members
// are lost. If others held as well, those were no turns, and the gang drains.
func (c *GPU) restoreGang(t *tenant) {
	switch {
	case c.effective != Exclusive, c.inCohort(t):
	case c.kept != nil && c.kept != t:
		c.stop(c.kept, GangTurn)
	case t.seat == nil || c.kept == t:
	case c.closingBatch > t.batch || c.open.n > 0 || c.holdOff != 0:
		if t.seat.gang.phase == running {
			t.seat.gang.enter(stopping)
		}
	case t.seat.gang.phase == resting || t.seat.gang.phase == running:
		c.kept, t.seat.hold = t, playing
		if t.seat.gang.phase == resting {
			t.seat.gang.enter(running)
		}
	}
}

// awaited returns a lost member of the gang, which may go on when it is back; nil:
// there is none.
func (t *tenant) awaited() *client {
	for _, cl := range t.crew {
		if cl.grant != nil && cl.grant.state == lost {
			return cl
		}
	}
	return nil
}

// alone says whether only the gang is on the GPU that is kept for it.
func (c *GPU) alone(t *tenant) bool {
	return c.open.n+c.closingBatch == t.batch && c.latency.n == 0 && c.urgent.top() == nil && c.holdOff == 0
}

// grantGang grants the members of the gang that has its turn: all of them when it
// begins, and later those that ask.
func (c *GPU) grantGang() {
	t := c.kept
	if t == nil || t.seat.gang.phase != running || !c.alone(t) {
		return
	}
	if t.seat.hold == kept {
		t.seat.take(playing)
		t.vt = max(t.vt, c.virtualNow()-int64(c.quantum)*int64(c.active+1)) // see setActive
		for _, cl := range slices.Clone(t.crew) {
			// One without a place would wait for it, also when it is of no gang any more.
			if !t.overlaps() && cl.connected && cl.in == nil && cl.grant == nil && !cl.stranded {
				c.request(cl)
			}
		}
	}
	for t.seat.hold == playing && t.queue.n > 0 {
		c.grant(t.queue.head)
	}
}

// byGang says whether the tenant's turns are those of its gang.
func (t *tenant) byGang() bool { return t.seat != nil && t.counts() }

// What a gang sees of this GPU.

func (t *tenant) gpu() string          { return t.core.gpu }
func (t *tenant) counts() bool         { return t.core.effective == Exclusive && !t.core.inCohort(t) }
func (t *tenant) asks() bool           { return t.queue.n > 0 }
func (t *tenant) live() bool           { return t.batch > 0 }
func (t *tenant) broke() bool          { return t.capped }
func (t *tenant) alone() bool          { return t.core.alone(t) }
func (t *tenant) grace() time.Duration { return t.core.grace }

func (t *tenant) calls() bool {
	cl := t.queue.head
	for cl != nil && cl.cut {
		cl = cl.next
	}
	return cl != nil
}

func (t *tenant) manned() bool {
	return slices.ContainsFunc(t.crew, func(cl *client) bool { return cl.connected && (cl.grant == nil || cl.grant.state != fenced) })
}

func (t *tenant) drains() (since Time, ok bool) {
	for _, cl := range t.crew {
		if cl.grant.closes() {
			since, ok = max(since, cl.grant.revokedAt), true
		}
	}
	return since, ok
}

// sit is for the tenant of a gang that has its first client, and unsit for one that
// has lost its last.
func (c *GPU) sit(t *tenant) {
	name := t.name
	if t.overlaps() {
		name += "\x00" + c.gpu // its clients on another GPU are another group
	}
	t.seat = c.gangs.sit(name, t.overlaps(), t)
	c.ganged = append(c.ganged, t)
}

func (c *GPU) unsit(t *tenant) {
	if c.kept == t {
		c.kept = nil
	}
	c.ganged = slices.Delete(c.ganged, slices.Index(c.ganged, t), slices.Index(c.ganged, t)+1)
	t.seat.leave()
	t.seat = nil
}

// reshare is SetShare. It may make the tenant's clients members of a gang, or end that.
func (c *GPU) reshare(account string, s Share) {
	if t := c.tenants[account]; t != nil && s.Crew() == "" {
		c.setShare(t, s)
		if t.share.Priority == Batch {
			c.revokeTenant(t, &c.latency, PriorityUsedUp) // nothing else would end these grants
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
				c.askBack(cl.grant) // the grant was given to another tenant
			}
		}
		c.join(cl, t)
		cl.share = clampShare(s)
		c.setShare(t, s)
		c.stand(cl)
	}
}

// checkGangs checks for whom the GPU is kept, and who is granted together.
func (c *GPU) checkGangs() error {
	if c.kept != nil && (c.effective != Exclusive || c.kept.seat == nil || c.kept.seat.hold == nothing || c.kept.clients == 0) {
		return fmt.Errorf("the GPU is kept for nobody: %s", c.kept.displayName())
	}
	for _, t := range c.ganged {
		if t.seat == nil || !slices.Contains(t.seat.gang.seats, t.seat) || c.tenants[t.name] != t || len(t.crew) != t.clients || t.clients == 0 {
			return fmt.Errorf("tenant %s: %d clients, %d in its crew", t.displayName(), t.clients, len(t.crew))
		}
		if t.seat.hold != nothing && c.kept != t {
			return fmt.Errorf("tenant %s says it has the GPU", t.displayName())
		}
	}
	if c.effective != Exclusive {
		return nil
	}
	for _, t := range c.ganged {
		o := c.kept
		switch {
		case c.inCohort(t) && (t.seat.hold != nothing || t.seat.due || t.seat.gang.phase != resting):
			return fmt.Errorf("overlap group %s has the GPU, phase %d, hold %d, and is of a cohort", t.displayName(), t.seat.gang.phase, t.seat.hold)
		case t.open > 0 && t.seat.hold != playing && !c.inCohort(t):
			return fmt.Errorf("gang %s: %d grants without a turn", t.displayName(), t.open)
		case o != nil && o != t && t.seat.gang.phase == called && t.seat.isCalled() && o.seat.gang.phase == called && o.seat.gang.ticket > t.seat.gang.ticket:
			return fmt.Errorf("the GPU is kept for ticket %d, and ticket %d is called", o.seat.gang.ticket, t.seat.gang.ticket)
		}
	}
	for cl := c.open.head; cl != nil; cl = cl.next {
		if c.open.n > 1 && (c.kept == nil || cl.tenant != c.kept) && !(cl.grant.shared && c.inCohort(cl.tenant)) || c.kept != nil && (cl.tenant != c.kept || c.kept.seat.hold != playing) {
			return fmt.Errorf("two holders: %d grants are open, that of client %d not by its gang's turn", c.open.n, cl.id)
		}
	}
	if t := c.kept; t != nil && t.seat.gang.phase == running && t.queue.n > 0 && c.alone(t) {
		return fmt.Errorf("%d clients of the gang that has the GPU wait", t.queue.n)
	}
	return nil
}
