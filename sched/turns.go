// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
)

const (
	// The more a tenant is ahead of those that wait, the shorter is its turn, down
	// to this part of the quantum.
	minTurnPart = 8

	// maxRound is how long a round of turns may take where shares are to be exact,
	// unless the quantum is longer.
	maxRound = 250 * time.Millisecond
)

// turns gives the GPU to one tenant, or gang, after the other. The one that is behind
// in virtual time is next.
func turns() policy {
	return policy{
		due:    (*GPU).turnOver,
		revoke: (*GPU).endTurns,
		grant: func(c *GPU) {
			for c.effective == Exclusive && c.free() && c.grantTurn() {
			}
		},
	}
}

// endTurns asks back the grants of the holder whose turn is over.
func (c *GPU) endTurns() {
	for at, over := c.turnOver(); over && c.now >= at; at, over = c.turnOver() {
		if c.park() {
			continue // the gang waits for other GPUs, or is called and before all now
		}
		why := QuantumOver
		if c.upNext().byGang() {
			why = GangTurn
		}
		if c.kept != nil {
			c.stop(c.kept, why)
			continue
		}
		for c.open.n > 0 { // several are of the cohort
			c.revoke(c.open.head.grant, why)
		}
	}
}

// grantTurn gives the free GPU to the next tenant; false if nobody gets it now.
func (c *GPU) grantTurn() bool {
	t := c.passOver()
	if t == nil || t.place == deferred && c.spared() {
		return false
	}
	switch cl := c.next; {
	case t.byGang():
		c.keep(t)
	case cl != nil && cl.tenant.takesTurn():
		c.grant(cl)
	default:
		c.grant(c.nextOf(t))
	}
	return true
}

// inTurn returns the next of the tenants that wait for their turns; nil: none.
func (c *GPU) inTurn() *tenant {
	here, away := c.ready.top(), c.deferred.top()
	switch {
	case away == nil:
		return here
	case here == nil, c.now >= c.owedUntil && behind(away, here):
		return away
	}
	return here
}

// takesTurn says whether the tenant waits for its turn.
func (t *tenant) takesTurn() bool { return t.place == ready || t.place == deferred }

// turnOver returns when the turn of the holder ends; false if nothing ends it as things
// are.
func (c *GPU) turnOver() (base.Time, bool) {
	cl, next := c.open.head, c.upNext()
	if c.effective != Exclusive || next == nil {
		return 0, false
	}
	if cl == nil {
		if c.kept == nil || c.kept.slot.Hold() != gang.Playing {
			return 0, false
		}
		if cl = c.kept.awaited(); cl == nil {
			return c.now, true // no member of the gang is left
		}
	}
	g := cl.grant
	if g.state == paused || g.move.on {
		return 0, false
	}
	if next.slot.IsCalled() {
		if c.kept == nil || c.kept.slot.MakesWay(next.slot) {
			return c.now, true // the virtual time of the holder makes up for it
		}
		end := g.runFrom.Add(c.minTurn() - g.ran) // or gangs would stop each other all the time
		if c.comesFromAway(next) {
			end = max(end, c.owedUntil)
		}
		return end, true
	}
	turn := c.turn(cl.tenant)
	switch lead, part := g.startVT-next.VT(), c.turnPart(cl.tenant); {
	case lead > 0 && next != cl.tenant:
		turn = max(turn-time.Duration(base.Scale(lead, part, account.One)), min(turn, c.minTurn()))
	case lead < 0 && c.exact > 0 && (c.active == 2 || !c.cohort.on):
		// Another tenant is next even if this one is behind it after its turn.
		left := time.Duration(base.Scale(-lead, part, account.One)) - turn
		turn += min(max(left, 0), turn)
	}
	end := g.runFrom.Add(turn - g.ran)
	if c.comesFromAway(next) {
		end = max(end, c.owedUntil)
	}
	if g.shared && c.closingBatch > 0 { // others of its cohort may not be back since a restart
		end = max(end, c.auto.keepUntil)
	}
	return end, true
}

// turn returns how long a tenant may hold the GPU while others wait.
func (c *GPU) turn(t *tenant) time.Duration {
	n := int64(max(c.active, 1))
	round := int64(c.quantum) * n
	if c.exact > 0 {
		round = min(round, max(int64(c.quantum), int64(maxRound)))
	}
	// What is due to tenants that their limits keep away now is no part of the round.
	here := max(min(c.duesNow().here, account.One), account.MinPart)
	d := time.Duration(base.Scale(round, min(c.turnPart(t), here), here))
	return max(d.Round(c.quantum/1000), c.minTurn()) // parts are not exact
}

func (c *GPU) minTurn() time.Duration { return max(MinQuantum, c.quantum/minTurnPart) }

// virtualNow returns the virtual time of the tenant that is behind the others. It is
// the virtual time of the GPU, and never runs backwards.
func (c *GPU) virtualNow() int64 {
	v := int64(0)
	any := false
	least := func(t *tenant) {
		if !any || t.VT() < v {
			v, any = t.VT(), true
		}
	}
	if c.effective == Exclusive {
		for _, l := range []*list{&c.open, &c.closing} {
			for cl := l.head; cl != nil; cl = cl.next {
				if cl.grant.kind == turnGrant {
					c.bill(cl.tenant)
					least(cl.tenant)
				}
			}
		}
	}
	for _, h := range []*tenantHeap{&c.ready, &c.deferred} {
		if t := h.top(); t != nil {
			least(t)
		}
	}
	if any {
		c.vtime = max(c.vtime, v)
	}
	return c.vtime
}

// chooseNext decides, while the holder drains, who is granted next: recording that takes
// time, which the drain hides.
func (c *GPU) chooseNext() {
	if next := c.upNext(); c.next != nil && (c.open.n > 0 || c.kept != nil || !c.next.tenant.takesTurn() || next != nil && next.slot.IsCalled()) {
		c.next = nil // another one is next now
	}
	if c.open.n == 0 && c.closingBatch > 0 {
		c.reserve()
	}
}

// reserve chooses the client whose turn it is now as the next one, with an epoch.
func (c *GPU) reserve() {
	if c.next != nil || c.effective != Exclusive || c.kept != nil {
		return
	}
	t := c.passOver()
	if t == nil || t.byGang() || t.place == deferred && c.spared() {
		return
	}
	c.next = c.nextOf(t)
	c.nextEpoch = c.takeEpoch()
}

// free says whether an exclusive grant may be given.
func (gs *grants) free() bool {
	return gs.open.n == 0 && gs.latency.n == 0 && gs.closingBatch == 0 && gs.holdOff == 0 && gs.kept == nil
}
