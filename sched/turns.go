// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"container/heap"
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
	here, away := c.ready.top(), c.nextAway()
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
			return c.turnOverWithout(next), true
		}
	}
	g := cl.grant
	if g.state == paused || g.move.on && !c.movesAgain(cl.tenant) {
		return 0, false
	}
	if next.slot.IsCalled() {
		switch {
		case c.kept == nil && c.comesFromAway(next):
			return max(c.now, c.leastUntil), true // who has moved in just now did not do so for nothing
		case c.kept == nil, c.kept.slot.MakesWay(next.slot):
			return c.now, true // the virtual time of the holder makes up for it
		}
		end := c.turnFrom(g).Add(c.minTurn()) // or gangs would stop each other all the time
		if c.comesFromAway(next) {
			end = max(end, c.owedUntil)
		}
		return max(end, c.kept.slot.Binds()), true
	}
	turn := c.turn(cl.tenant)
	switch lead, part := g.startVT-next.VT(), c.turnPart(cl.tenant); {
	case lead > 0 && next != cl.tenant:
		turn = max(turn-time.Duration(base.Scale(lead, part, account.One)), min(turn, c.minTurn()))
	case next.byGang() && -lead > int64(c.quantum)*int64(c.active+1): // its turns are longer, for what moving takes elsewhere
		turn = max(turn, min(time.Duration(base.Scale(-lead, part, account.One)), easyStretch))
	case lead < 0 && c.exact > 0 && (c.active == 2 || !c.cohort.on):
		// Another tenant is next even if this one is behind it after its turn.
		left := time.Duration(base.Scale(-lead, part, account.One)) - turn
		turn += min(max(left, 0), turn)
	}
	end := c.turnFrom(g).Add(turn)
	if c.comesFromAway(next) {
		end = max(end, c.owedUntil)
	}
	if c.kept != nil {
		end = max(end, c.kept.slot.Binds())
	}
	if g.shared && c.closingBatch > 0 { // others of its cohort may not be back since a restart
		end = max(end, c.auto.keepUntil)
	}
	return end, true
}

// turnFrom returns when the turn of a holder began, as if it had not been interrupted: that of a gang when all its ranks
// had their memory.
func (c *GPU) turnFrom(g *grant) base.Time {
	from := g.runFrom.Add(-g.ran)
	if c.kept != nil {
		from = max(from, c.kept.slot.SettledAt())
	}
	return from
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

// together grants every request at once, in concurrent mode: clients share the GPU by
// the driver's own time slices.
func together() policy {
	return policy{grant: func(c *GPU) {
		for c.effective == Concurrent && c.ready.top() != nil {
			c.grant(c.ready.top().queue.head)
		}
	}}
}

// limits revokes the grants of a tenant that has used up its limit. When it has credit
// for a slice, it waits for its turn again.
func limits() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			for _, t := range c.metered {
				e.Either(c.creditEnds(t))
			}
			if t := c.throttled.top(); t != nil {
				e.Either(t.backAt(), true)
			}
			return e.At, e.OK
		},
		revoke: func(c *GPU) {
			c.unthrottle()
			c.revokeLimited()
		},
	}
}

// unthrottle lets tenants wait for their turns again that have credit.
func (c *GPU) unthrottle() {
	for t := c.throttled.top(); t != nil && c.now >= t.backAt(); t = c.throttled.top() {
		c.bill(t) // other grants of the tenant may have used credit meanwhile
		if t.limited() {
			t.Uncap(t.slice())
		} else {
			t.DropLimit()
		}
		c.review(t)
	}
}

// revokeLimited asks back the grants of tenants without credit.
func (c *GPU) revokeLimited() {
	c.looked += 2 * uint64(len(c.metered)) // here, and for the deadline
	var out []*tenant
	for _, t := range c.metered {
		if c.bill(t); t.Credit() <= 0 && c.now >= t.limitFrom {
			out = append(out, t)
		}
	}
	for _, t := range out {
		if c.kept == t {
			c.stop(t, LimitReached)
		}
		c.review(t) // it may wait, and only its fenced processes have used the credit
	}
	c.revokeAll(out, LimitReached, &c.open, &c.latency)
}

// revokeAll asks back what tenants have in lists, and tells their clients whether they may go ahead.
func (c *GPU) revokeAll(of []*tenant, why RevokeReason, lists ...*list) {
	if len(of) == 0 {
		return
	}
	theirs := map[*tenant]bool{}
	for _, t := range of {
		theirs[t] = true
	}
	for _, l := range lists {
		c.looked += uint64(l.n)
		for cl := l.head; cl != nil; {
			next := cl.next
			if theirs[cl.tenant] {
				c.revoke(cl.grant, why)
			}
			cl = next
		}
	}
	for _, cl := range c.inOrder() {
		if theirs[cl.tenant] {
			c.stand(cl)
		}
	}
}

// creditEnds returns when the tenant's grants will have used up its credit; false if
// never.
func (c *GPU) creditEnds(t *tenant) (base.Time, bool) {
	if !t.limited() {
		return 0, false // as most: the rates need not be known
	}
	at, ok := t.CreditEnds(c.now, c.limitRatesOf(t))
	return max(at, t.limitFrom), ok
}

// spends says whether the tenant's grants use up its credit, at whose end they are asked back, or its
// place among those who wait is lost.
func (t *tenant) spends() bool {
	return t.limited() && (t.open > 0 || t.fenced > 0 && (t.takesTurn() || t.place == urgent))
}

// meter keeps the list of such tenants.
func (c *GPU) meter(t *tenant) {
	want := t.spends()
	switch {
	case want && t.metered < 0:
		t.metered = len(c.metered)
		c.metered = append(c.metered, t)
	case !want && t.metered >= 0:
		last := c.metered[len(c.metered)-1]
		c.metered[t.metered] = last
		last.metered = t.metered
		c.metered = c.metered[:len(c.metered)-1]
		t.metered = -1
	}
}

// backAt returns when a throttled tenant has credit for a slice again.
func (t *tenant) backAt() base.Time {
	if !t.limited() || !t.Capped() {
		return max(t.BilledAt(), t.notBefore) // its limit was taken away just now, or something else keeps it waiting
	}
	return max(t.notBefore, t.Account.BackAt(t.share.Limit, t.slice()))
}

// tenantHeap orders the tenants of one place. A tenant is in one at most.
type tenantHeap struct {
	items []*tenant
	less  func(a, b *tenant) bool
}

func (h *tenantHeap) top() *tenant {
	if len(h.items) == 0 {
		return nil
	}
	return h.items[0]
}

func (h *tenantHeap) push(t *tenant)   { heap.Push((*byLess)(h), t) }
func (h *tenantHeap) remove(t *tenant) { heap.Remove((*byLess)(h), t.pos) }
func (h *tenantHeap) fix(t *tenant)    { heap.Fix((*byLess)(h), t.pos) }
func (h *tenantHeap) reorder()         { heap.Init((*byLess)(h)) }

// byLess is a tenantHeap for package heap alone.
type byLess tenantHeap

func (h *byLess) Len() int           { return len(h.items) }
func (h *byLess) Less(i, j int) bool { return h.less(h.items[i], h.items[j]) }
func (h *byLess) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	h.items[i].pos, h.items[j].pos = i, j
}
func (h *byLess) Push(x any) {
	t := x.(*tenant)
	t.pos = len(h.items)
	h.items = append(h.items, t)
}
func (h *byLess) Pop() any {
	last := len(h.items) - 1
	t := h.items[last]
	h.items[last] = nil
	h.items = h.items[:last]
	return t
}

// before says which of two waiting tenants asked first.
func before(a, b *tenant) bool { return a.first() < b.first() }

func (t *tenant) first() uint64 {
	if t.queue.head == nil {
		return 0 // it is about to leave its place, or is a gang whose clients wait on other GPUs
	}
	return t.queue.head.seq
}

func behind(a, b *tenant) bool { return a.VT() < b.VT() || a.VT() == b.VT() && before(a, b) }

func backFirst(a, b *tenant) bool {
	x, y := a.backAt(), b.backAt()
	return x < y || x == y && before(a, b)
}

// list is a doubly linked list through the clients themselves: a client leaves the
// middle of it in constant time, without a search.
type list struct {
	head, tail *client
	n          int
}

// push appends a client that is in no list.
func (l *list) push(cl *client) { l.insertAfter(l.tail, cl) }

// insert puts a client with a grant, which is in no list, behind those whose grace period began earlier. It
// begins at the insertion, except for restored grants, those of StepOne, and tenants whose latest drain was slow
// (lessGrace): these pass others that drain.
func (l *list) insert(cl *client) {
	at := l.tail
	for at != nil && at.grant.graceFrom > cl.grant.graceFrom {
		at = at.prev
	}
	l.insertAfter(at, cl)
}

func (l *list) insertAfter(at, cl *client) {
	if cl.in != nil {
		panic("sched: client is in a list already")
	}
	cl.in = l
	l.n++
	cl.prev = at
	if at != nil {
		cl.next, at.next = at.next, cl
	} else {
		cl.next, l.head = l.head, cl
	}
	if cl.next != nil {
		cl.next.prev = cl
	} else {
		l.tail = cl
	}
}

// remove takes out a client that is in this list.
func (l *list) remove(cl *client) {
	if cl.in != l {
		panic("sched: client is not in the list")
	}
	if cl.prev != nil {
		cl.prev.next = cl.next
	} else {
		l.head = cl.next
	}
	if cl.next != nil {
		cl.next.prev = cl.prev
	} else {
		l.tail = cl.prev
	}
	cl.prev, cl.next, cl.in = nil, nil, nil
	l.n--
}

// spare decides, when the GPU becomes free, for how long it is not given to those that
// would have to move.
func (c *GPU) spare() {
	c.sparedUntil = c.now
	if c.now >= c.owedUntil {
		return
	}
	cost := c.moveCost()
	for _, cl := range c.pausing {
		if !cl.away && cl.connected {
			c.sparedUntil = max(c.sparedUntil, c.now.Add(cl.pauses.WorthWaiting(c.now.Sub(cl.idleSince), cost)))
		}
	}
}

// spared says whether a free GPU is not given yet to those that would have to move.
func (c *GPU) spared() bool {
	return c.now < c.owedUntil && c.now < c.sparedUntil
}
