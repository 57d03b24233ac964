// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
)

// What a core does for the gangs with clients on its GPU. Package gang has the rules.

// gangTurns keeps the GPU for gangs whose turn has come on all their GPUs.
func gangTurns() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			for _, t := range c.ganged {
				e.Either(t.slot.Due())
			}
			return e.At, e.OK
		},
		revoke: (*GPU).followGangs,
		grant:  (*GPU).grantGang,
	}
}

// followGangs brings all gangs on this GPU to their next phase, and does what that means
// for the GPU.
func (c *GPU) followGangs() {
	for _, t := range c.ganged {
		t.slot.Follow()
		c.follow(t)
	}
}

// follow brings what a gang has of this GPU in line with its phase.
func (c *GPU) follow(t *tenant) {
	s := t.slot
	if c.inCohort(t) {
		c.leaveToCohort(t)
	}
	if !t.Counts() {
		return
	}
	stops := s.Phase() == gang.Stopping
	if s.Hold() == gang.Nothing && stops { // its turn was that of a cohort
		c.revokeTenant(t, &c.open, GangTurn)
	}
	if s.Hold() == gang.Playing && s.Phase() != gang.Running || s.Hold() == gang.Kept && stops {
		c.stop(t, GangTurn)
	}
	stops = s.Phase() == gang.Stopping
	switch {
	case s.Hold() == gang.Leaving && !stops, s.Hold() == gang.Kept && s.Phase() != gang.Called && s.Phase() != gang.Running, c.mustYield(t),
		s.Hold() != gang.Nothing && !t.Manned() && !t.Live():
		c.kept = nil
		s.Free()
	case s.Hold() == gang.Nothing && stops && c.kept == nil && t.batch > 0 && c.open.n == 0 && c.closingBatch == t.batch:
		// The members drain what they had before they were a gang, or before a restart.
		c.kept = t
		s.Drain()
	}
	if s.Step() {
		c.stepMembers(t)
	}
	c.review(t)
}

// leaveToCohort ends what an overlap group has of the GPU as a gang: from now on it has its
// turns with its cohort, each member as any other client.
func (c *GPU) leaveToCohort(t *tenant) {
	if t.slot.IsIdle() {
		return
	}
	if c.kept == t {
		c.revokeTenant(t, &c.open, ModeChange)
		c.kept = nil
	}
	t.slot.Quit()
	c.review(t)
}

// mustYield says whether the GPU is kept for a gang, and a gang that was called
// earlier has come to this GPU since.
func (c *GPU) mustYield(t *tenant) bool {
	first := c.upNext()
	return t.slot.Hold() == gang.Kept && t.slot.Phase() == gang.Called && first != nil && first.slot.IsCalled() && first.slot.Before(t.slot)
}

// stop ends the turn of the gang that has this GPU, on all its GPUs.
func (c *GPU) stop(t *tenant, why RevokeReason) {
	t.slot.Drain()
	c.revokeTenant(t, &c.open, why)
	t.slot.Stop()
	c.review(t)
}

// stepMembers lets the members that have drained and wait make one call each.
func (c *GPU) stepMembers(t *tenant) {
	var stepped []*client
	for _, cl := range slices.Clone(t.members) {
		if cl.in != &t.queue || cl.cut {
			continue
		}
		g := c.give(cl, c.unqueueForGrant(cl))
		g.graceFrom = t.slot.StoppedAt() // all steps are one drain
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
		if t.slot.IsCalled() && c.kept != t && (first == nil || t.slot.Before(first.slot)) {
			first = t
		}
	}
	if first == nil {
		first = c.inTurn()
	}
	return first
}

// park notes that the turn of a gang has come on this GPU, if a gang is next. Others
// go before it until its turn has come on all its GPUs.
func (c *GPU) park() bool {
	t := c.upNext()
	if t == nil || !t.byGang() || t.slot.Phase() != gang.Wanted {
		return false
	}
	t.slot.SetDue()
	c.review(t)
	return true
}

// passOver returns the tenant that gets the GPU when it is free.
func (c *GPU) passOver() *tenant {
	for c.park() {
	}
	return c.upNext()
}

// keep keeps the free GPU for a gang that is called, or runs elsewhere.
func (c *GPU) keep(t *tenant) {
	c.bill(t) // fenced members may have used up its credit since it was called
	c.kept = t
	t.slot.Keep()
	c.review(t)
}

// restoreGang lets a gang go on that held before a restart: it runs, and its members
// are lost. If others held as well, those were no turns, and the gang drains.
func (c *GPU) restoreGang(t *tenant) {
	switch {
	case c.effective != Exclusive, c.inCohort(t):
	case c.kept != nil && c.kept != t:
		c.stop(c.kept, GangTurn)
	case t.slot == nil || c.kept == t:
	case c.closingBatch > t.batch || c.open.n > 0 || c.holdOff != 0:
		t.slot.Stop()
	case t.slot.Phase() == gang.Resting || t.slot.Phase() == gang.Running:
		c.kept = t
		t.slot.Resume()
	}
}

// awaited returns a lost member of the gang, which may go on when it is back; nil:
// there is none.
func (t *tenant) awaited() *client {
	for _, cl := range t.members {
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
	if t == nil || t.slot.Phase() != gang.Running || !c.alone(t) {
		return
	}
	if t.slot.Hold() == gang.Kept {
		t.slot.Play()
		t.SetVT(max(t.VT(), c.gangTime()-int64(c.quantum)*int64(c.active+1))) // see setActive
		for _, cl := range slices.Clone(t.members) {
			// One without a place would wait for it, also when it is of no gang any more.
			if !t.overlaps() && cl.connected && cl.in == nil && cl.grant == nil && !cl.stranded {
				c.request(cl)
			}
		}
	}
	for t.slot.Hold() == gang.Playing && t.queue.n > 0 {
		c.grant(t.queue.head)
	}
}

// byGang says whether the tenant's turns are those of its gang.
func (t *tenant) byGang() bool { return t.slot != nil && t.Counts() }

// What a gang sees of this GPU.

func (t *tenant) GPU() string          { return t.core.gpu }
func (t *tenant) Counts() bool         { return t.core.effective == Exclusive && !t.core.inCohort(t) }
func (t *tenant) Asks() bool           { return t.queue.n > 0 }
func (t *tenant) Live() bool           { return t.batch > 0 }
func (t *tenant) Broke() bool          { return t.Capped() && !t.core.finishes(t) }
func (t *tenant) Alone() bool          { return t.core.alone(t) }
func (t *tenant) Moves() bool          { return t.core.mem.Overfull() }
func (t *tenant) Grace() time.Duration { return t.core.grace }

func (t *tenant) Calls() bool {
	cl := t.queue.head
	for cl != nil && cl.cut {
		cl = cl.next
	}
	return cl != nil
}

func (t *tenant) Manned() bool {
	return slices.ContainsFunc(t.members, func(cl *client) bool { return cl.connected && (cl.grant == nil || cl.grant.state != fenced) })
}

func (t *tenant) Drains() (since base.Time, ok bool) {
	for _, cl := range t.members {
		if cl.grant.closes() {
			since, ok = max(since, cl.grant.revokedAt), true
		}
	}
	return since, ok
}

// turnOverWithout returns when the turn of the gang that has the GPU is over, no member of which has a grant here: at
// once, unless others work elsewhere.
func (c *GPU) turnOverWithout(next *tenant) base.Time {
	s := c.kept.slot
	if !s.Works() {
		return c.now
	}
	end := s.SettledAt().Add(c.turn(c.kept))
	if c.comesFromAway(next) {
		end = max(end, c.owedUntil)
	}
	return max(end, s.Binds())
}

// Binds has the turn last until those who are about to move in have done so, or are given up, and then as long as
// what that took demands where the next one has to move too.
func (t *tenant) Binds() base.Time {
	c := t.core
	for _, g := range c.moves {
		if g.client.tenant == t && !c.movesAgain(t) {
			return c.givesUp(g)
		}
	}
	next := c.upNext()
	if next == nil {
		next = c.dueGang()
	}
	if c.kept != t || next == nil || !c.comesFromAway(next) {
		return 0
	}
	return c.owedUntil
}

// movesAgain says whether a tenant is a gang whose members had their memory here since its turn began: its turn is
// no longer for what they move now.
func (c *GPU) movesAgain(t *tenant) bool { return c.kept == t && t.slot.HasSettled() }

// nextAway returns the next of those that have to move in. For a while none passes a gang that is behind it and whose
// turn has come here: it would move for nothing, as the gang takes the GPU once its turn has come elsewhere. Other
// gangs only wait.
func (c *GPU) nextAway() *tenant {
	away, due := c.deferred.top(), c.dueGang()
	if away == nil || due == nil || behind(away, due) || c.now >= c.heldFor(due) {
		return away
	}
	away = nil
	for _, t := range c.deferred.items {
		if t.byGang() && (away == nil || behind(t, away)) {
			away = t
		}
	}
	c.looked += uint64(len(c.deferred.items))
	return away
}

// dueGang returns the gang behind the others of those whose turn has come here, but not elsewhere yet; nil: none.
func (c *GPU) dueGang() (due *tenant) {
	for _, t := range c.ganged {
		if t.byGang() && t.slot.IsDue() && (due == nil || behind(t, due)) {
			due = t
		}
	}
	return due
}

// heldFor returns until when nobody moves in before a gang that is due: as long as the turn of one that moves in
// lasts. Elsewhere its turn may not come for minutes, or its limit be used up, while this GPU does nothing.
func (c *GPU) heldFor(due *tenant) base.Time {
	return due.slot.DueSince().Add(c.leastStretch(c.fillTook))
}

// takeSlot is for the tenant of a gang that has its first client, and leaveSlot for one that
// has lost its last.
func (c *GPU) takeSlot(t *tenant) {
	t.slot = c.gangs.Join(t.displayName(), t.overlaps(), t)
	c.ganged = append(c.ganged, t)
}

func (c *GPU) leaveSlot(t *tenant) {
	if c.kept == t {
		c.kept = nil
	}
	c.ganged = slices.Delete(c.ganged, slices.Index(c.ganged, t), slices.Index(c.ganged, t)+1)
	t.slot.Leave()
	t.slot = nil
}

// checkGangs checks for whom the GPU is kept, and who is granted together.
func (c *GPU) checkGangs() error {
	if c.kept != nil && (c.effective != Exclusive || c.kept.slot == nil || c.kept.slot.Hold() == gang.Nothing || c.kept.clients == 0) {
		return fmt.Errorf("the GPU is kept for nobody: %s", c.kept.displayName())
	}
	for _, t := range c.ganged {
		if t.slot == nil || c.tenants[t.key] != t || len(t.members) != t.clients || t.clients == 0 {
			return fmt.Errorf("tenant %s: %d clients, %d of them members", t.displayName(), t.clients, len(t.members))
		}
		if t.slot.Hold() != gang.Nothing && c.kept != t {
			return fmt.Errorf("tenant %s says it has the GPU", t.displayName())
		}
	}
	if c.effective != Exclusive {
		return nil
	}
	for _, t := range c.ganged {
		o := c.kept
		switch {
		case c.inCohort(t) && !t.slot.IsIdle():
			return fmt.Errorf("overlap group %s has the GPU, phase %d, hold %d, and is of a cohort", t.displayName(), t.slot.Phase(), t.slot.Hold())
		case t.open > 0 && t.slot.Hold() != gang.Playing && !c.inCohort(t):
			return fmt.Errorf("gang %s: %d grants without a turn", t.displayName(), t.open)
		case o != nil && o != t && t.slot.Phase() == gang.Called && t.slot.IsCalled() && o.slot.Phase() == gang.Called && t.slot.Before(o.slot):
			return fmt.Errorf("the GPU is kept for gang %s, and gang %s was called before", o.displayName(), t.displayName())
		}
	}
	for cl := c.open.head; cl != nil; cl = cl.next {
		if c.open.n > 1 && (c.kept == nil || cl.tenant != c.kept) && !(cl.grant.shared && c.inCohort(cl.tenant)) || c.kept != nil && (cl.tenant != c.kept || c.kept.slot.Hold() != gang.Playing) {
			return fmt.Errorf("two holders: %d grants are open, that of client %d not by its gang's turn", c.open.n, cl.id)
		}
	}
	if t := c.kept; t != nil && t.slot.Phase() == gang.Running && t.queue.n > 0 && c.alone(t) {
		return fmt.Errorf("%d clients of the gang that has the GPU wait", t.queue.n)
	}
	return nil
}
