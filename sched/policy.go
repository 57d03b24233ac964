// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// The policy. The functions here run at the end of each Step, and leave nothing
// undone that is due.

// fenceOverdue fences what did not drain within its grace period.
func (c *Core) fenceOverdue() {
	if c.holdOff != 0 && c.now >= c.holdOff {
		c.holdOff = 0
	}
	for cl := c.closing.head; cl != nil && c.now >= cl.grant.graceFrom.Add(c.grace); cl = c.closing.head {
		c.fence(cl.grant)
	}
}

func (c *Core) fence(g *grant) {
	c.become(g, fenced)
	c.counters.Fences++
	c.do(Fence{g.client.id, g.epoch, g.claimed})
}

// unthrottle lets tenants go on that have credit again.
func (c *Core) unthrottle() {
	for t := c.throttled.top(); t != nil && c.now >= t.backAt(); t = c.throttled.top() {
		c.bill(t) // not what was expected, if other grants of it run
		if t.credit >= t.slice() || !t.limited() {
			t.capped = false
		}
		c.review(t)
	}
}

// turnOver returns when the turn of the holder ends; false if it has no end as
// things are.
func (c *Core) turnOver() (Time, bool) {
	cl, next := c.open.head, c.upNext()
	if c.effective != Exclusive || next == nil {
		return 0, false
	}
	if cl == nil {
		if c.kept == nil || c.kept.seat.hold != playing {
			return 0, false
		}
		if cl = c.kept.awaited(); cl == nil {
			return c.now, true // nobody of it is left here
		}
	}
	g := cl.grant
	if g.state == paused || g.move.on {
		return 0, false
	}
	if next.seat.isCalled() {
		if c.kept == nil {
			return c.now, true // its virtual time makes up for it
		}
		end := g.runFrom.Add(c.minTurn() - g.ran) // gangs do not stop each other all the time
		if next.comesFromAway() {
			end = max(end, c.owedUntil)
		}
		return end, true
	}
	turn := c.turn(cl.tenant)
	switch lead, part := g.startVT-next.vt, c.part(cl.tenant); {
	case lead > 0 && next != cl.tenant:
		turn = max(turn-time.Duration(scale(lead, part, one)), min(turn, c.minTurn()))
	case lead < 0 && c.active == 2 && c.exact > 0:
		// The other one is next even if this one is behind it after its turn.
		left := time.Duration(scale(-lead, part, one)) - turn
		turn += min(max(left, 0), turn)
	}
	end := g.runFrom.Add(turn - g.ran)
	if next.comesFromAway() {
		end = max(end, c.owedUntil)
	}
	return end, true
}

// lookWhoIsOut notes whether latency tenants keep others from the GPU, which is
// what their patience is spent on.
func (c *Core) lookWhoIsOut() {
	kept := c.latency.n > 0 && c.effective == Exclusive && (c.open.n > 0 || c.upNext() != nil || c.kept != nil)
	if kept == c.keptOut {
		return
	}
	for cl := c.latency.head; cl != nil; cl = cl.next {
		c.bill(cl.tenant)
	}
	c.keptOut = kept
}

// revokeOverdue asks grants back whose time is over.
func (c *Core) revokeOverdue() {
	c.revokeStalled()
	for i := 0; i < len(c.metered); i++ {
		t := c.metered[i]
		c.bill(t)
		switch {
		case t.limited() && t.credit <= 0:
			if c.kept == t {
				c.stop(t, LimitReached)
			}
			c.revokeTenant(t, &c.open, LimitReached)
			c.revokeTenant(t, &c.latency, LimitReached)
			c.standAll(t)
			i = -1 // the list has changed
		case t.demoted && c.keptOut && c.holds(t, &c.latency):
			c.revokeTenant(t, &c.latency, PriorityUsedUp)
			c.standAll(t)
			i = -1
		}
	}
	for at, over := c.turnOver(); over && c.now >= at; at, over = c.turnOver() {
		if c.setAside() {
			continue // it has to wait for other GPUs, or is before all now
		}
		next := c.upNext()
		why := QuantumOver
		if next.seat != nil {
			why = GangTurn
		}
		if c.kept != nil {
			c.stop(c.kept, why)
		} else {
			c.revoke(c.open.head.grant, why)
		}
	}
}

func (c *Core) holds(t *tenant, l *list) bool {
	for cl := l.head; cl != nil; cl = cl.next {
		if cl.tenant == t {
			return true
		}
	}
	return false
}

func (c *Core) revokeTenant(t *tenant, l *list, why RevokeReason) {
	for cl := l.head; cl != nil; {
		next := cl.next
		if cl.tenant == t {
			c.revoke(cl.grant, why)
		}
		cl = next
	}
}

func (c *Core) revoke(g *grant, why RevokeReason) {
	c.become(g, draining)
	c.counters.Revokes++
	c.do(Revoke{Client: g.client.id, Epoch: g.epoch, Grace: c.grace, Waiters: c.waiting, Why: why})
}

// chooseNext decides, while the holder drains, who is granted next, so that all
// that can be done before it has drained is done then.
func (c *Core) chooseNext() {
	if next := c.upNext(); c.next != nil && (c.open.n > 0 || c.kept != nil || !c.next.tenant.takesTurn() || next != nil && next.seat.isCalled()) {
		c.next = nil // not any more
	}
	if c.open.n == 0 && c.closingBatch > 0 {
		c.reserve()
	}
}

// reserve makes the one whose turn it is as of now the next one, with an epoch.
func (c *Core) reserve() {
	if c.next != nil || c.effective != Exclusive || c.kept != nil {
		return
	}
	t := c.passOver()
	if t == nil || t.seat != nil || t.place == afar && c.spared() {
		return
	}
	c.next = t.queue.head
	c.nextEpoch = c.takeEpoch()
}

// pauseOrResume shuts the holder's gate while latency tenants are on the GPU or
// about to be, and opens it when they have gone.
func (c *Core) pauseOrResume() {
	cl := c.open.head
	if cl == nil || c.effective != Exclusive {
		return
	}
	come := c.latency.n > 0 || c.urgent.top() != nil && c.holdOff == 0
	for ; cl != nil; cl = cl.next { // several only of a gang
		switch {
		case come && cl.grant.state == granted:
			c.become(cl.grant, paused)
			c.do(Pause{cl.id})
		case !come && cl.grant.state == paused:
			c.resume(cl.grant)
		}
	}
}

func (c *Core) resume(g *grant) {
	c.become(g, granted)
	c.do(Resume{g.client.id, g.epoch})
}

// grantNext grants to those whose turn it is, if the GPU is free for them.
func (c *Core) grantNext() {
	for t := c.urgent.top(); t != nil && c.holdOff == 0; t = c.urgent.top() {
		c.pauseOrResume() // time may have made it urgent just now
		c.grant(t.queue.head)
	}
	for c.effective == Concurrent && c.ready.top() != nil {
		c.grant(c.ready.top().queue.head)
	}
	for c.free() {
		t := c.passOver()
		if t == nil || c.effective != Exclusive || t.place == afar && c.spared() {
			break
		}
		switch cl := c.next; {
		case t.seat != nil:
			c.keep(t)
		case cl != nil && cl.tenant.takesTurn():
			c.grant(cl)
		default:
			c.grant(t.queue.head)
		}
	}
	c.grantGang()
}

// free says whether an exclusive grant may be given.
func (c *Core) free() bool {
	return c.open.n == 0 && c.latency.n == 0 && c.closingBatch == 0 && c.holdOff == 0 && c.kept == nil
}

// stand tells a client whether it may go ahead, if that has changed.
func (c *Core) stand(cl *client) {
	t := cl.tenant
	on := cl.connected && cl.grant == nil && cl.in == nil && c.effective == Exclusive && c.holdOff == 0 &&
		t.share.Priority == Latency && !t.demoted && !t.capped && !cl.away
	if on != cl.standing && cl.connected && cl.grant == nil {
		cl.standing = on
		c.do(Stand{cl.id, on})
	}
}

func (c *Core) standAll(t *tenant) {
	for _, cl := range c.inOrder() {
		if cl.tenant == t {
			c.stand(cl)
		}
	}
}

func (c *Core) grant(cl *client) {
	t := cl.tenant
	cl.standing = false // the grant says what holds now
	latency := t.place == urgent
	if c.effective == Exclusive && !latency && !c.free() && (c.kept != t || t.seat.hold != playing || !c.alone(t)) {
		panic("sched: two holders")
	}
	gr := c.give(cl, c.unqueueForGrant(cl))
	waited := c.now.Sub(cl.waitingSince)
	cl.longestWait = max(cl.longestWait, waited)
	t.longestWait = max(t.longestWait, waited)
	cl.grants++
	t.grants++
	c.counters.Grants++
	first := c.open.head
	if latency {
		gr.kind = latencyGrant
	}
	c.startMoving(gr)
	c.become(gr, granted)
	g := Grant{
		Client: cl.id, Tenant: t.displayName(), Epoch: gr.epoch, Waited: waited,
		Concurrent: latency || c.effective == Concurrent, Latency: latency, Moving: gr.move.on,
	}
	if !latency {
		gr.startVT = t.vt
		if first != nil && c.effective == Exclusive { // of a gang, whose turn it is already
			gr.ran, gr.startVT = c.ranAt(first.grant), first.grant.startVT
		}
		if c.effective == Exclusive {
			g.Quantum = c.turn(t)
		}
	}
	// A latency grant is not waited for by anybody, so it need not outlive a
	// restart: it is recorded when it has been given, see settle. Its epoch
	// must not be one that a restart would use again, see takeEpoch.
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

// unqueueForGrant takes a client out of its queue and returns the epoch of its
// grant: the one that was chosen for it, or the next.
func (c *Core) unqueueForGrant(cl *client) Epoch {
	chosen := c.next == cl
	c.unqueue(cl)
	if chosen {
		return c.nextEpoch
	}
	return c.takeEpoch()
}

// settle brings what was persisted and what the pages say up to date.
func (c *Core) settle() {
	c.chooseNext()
	if r := c.record(); r != c.persisted {
		c.persist(r)
	}
	c.noticeAll()
}

// record returns what a restart would have to know now.
func (c *Core) record() Persist {
	p := Persist{Epoch: c.epoch, Unrecorded: c.holdOff != 0}
	if c.open.n+c.latency.n+c.closing.n >= MaxRecorded {
		p.Unrecorded = true
		return p
	}
	n := 0
	for _, l := range [...]*list{&c.open, &c.latency, &c.closing} {
		for cl := l.head; cl != nil; cl = cl.next {
			if !cl.grant.claimed {
				p.Holders[n] = Holder{cl.id, min(cl.grant.epoch, c.epoch)} // a client may say any
				n++
			}
		}
	}
	if c.next != nil {
		p.Holders[n] = Holder{c.next.id, c.nextEpoch}
	}
	return p
}

// covers says whether a restart that knows p knows all that is in q.
func covers(p, q Persist) bool {
	if p.Epoch < q.Epoch || q.Unrecorded && !p.Unrecorded {
		return false
	}
	if p.Unrecorded {
		return true
	}
	for _, h := range q.Holders {
		if h.Client == 0 {
			break
		}
		found := false
		for _, g := range p.Holders {
			found = found || g == h
		}
		if !found {
			return false
		}
	}
	return true
}

func (c *Core) persist(p Persist) {
	c.persisted = p
	c.do(p)
}
