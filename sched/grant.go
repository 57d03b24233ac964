// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
)

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

// grantState is where a grant is in its life; gpu.go draws the way. The states
// are in the order of that way: a grant may skip some, and goes back only from
// paused or lost to granted.
type grantState uint8

const (
	over     grantState = iota // not given yet, released, or reclaimed
	granted                    // the gate is open, or opens when the client's memory is on the GPU
	paused                     // the gate is shut while latency grants are there; submitted work goes on
	lost                       // the connection is lost; the client may go on when it is back
	draining                   // asked back, or not to be gone on with: the client drains and releases
	fenced                     // not released in time; others are granted
)

// grantKind says what a grant keeps others from.
type grantKind uint8

const (
	turnGrant    grantKind = iota // the GPU, in its turn; in concurrent mode and by time slices, the GPU together with the others
	latencyGrant                  // given to a latency tenant beside others, whose gates are shut
	besideGrant                   // given to a latency tenant beside others, whose time slices are short; see tenantsBeside
)

// grant is the permission of one client to submit work, from the moment in which
// it is given, claimed or restored until it is over.
type grant struct {
	client  *client
	epoch   base.Epoch
	kind    grantKind
	state   grantState
	claimed bool // the client says so; there is no record of it
	shared  bool // it is a turn of the cohort, in which others may hold too
	off     bool // it is fenced, and the client is kept off the GPU from outside
	alone   bool // it is a turn: nobody else has had the GPU since the grant
	cut     bool // it began with work that an earlier one had left

	since     base.Time
	revokedAt base.Time     // while draining or fenced
	graceFrom base.Time     // the end of grace is a grace period later; while lost or draining
	ran       time.Duration // of its turn, up to runFrom
	runFrom   base.Time
	startVT   int64 // of the tenant, when its turn began

	move move
}

// grants are those of a GPU that are not over.
type grants struct {
	open         list // gate open or paused, in the order of their grants
	latency      list // the same, of latency grants
	beside       list // the same, of beside grants
	closing      list // draining or lost, the earliest end of grace first
	closingBatch int  // of closing, those that are turns
	fenced       int  // grants that are fenced, and not released yet
	keptOut      bool // latency grants keep batch tenants from the GPU

	kept    *tenant   // the gang that has the GPU, or is about to; see package gang
	holdOff base.Time // no exclusive grant before; 0: none

	// Who is granted when the holder has released, if nothing happens to it
	// before, and under which epoch: decided, and recorded, while it drains.
	next      *client
	nextEpoch base.Epoch
}

// holds says whether the client may submit work, now or after a pause.
func (g *grant) holds() bool { return g != nil && (g.state == granted || g.state == paused) }

// closes says whether the grant is on its way back, and not fenced.
func (g *grant) closes() bool { return g != nil && (g.state == lost || g.state == draining) }

// revoked says whether the client must not go on under it.
func (g *grant) revoked() bool { return g.state == draining || g.state == fenced }

// listOf returns the list of the grants of that state and kind, nil: there is none.
func (gs *grants) listOf(state grantState, kind grantKind) *list {
	switch {
	case state == lost || state == draining:
		return &gs.closing
	case state == over || state == fenced:
		return nil
	case kind == latencyGrant:
		return &gs.latency
	case kind == besideGrant:
		return &gs.beside
	}
	return &gs.open
}

func (c *GPU) become(g *grant, to grantState) { c.change(g, to, g.kind) }

// change is the one function that changes the state or the kind of a grant: it
// bills the tenant, lists the grant, counts it, and reviews the tenant. A grant
// that is over, and begins lost or draining, brings its graceFrom.
func (c *GPU) change(g *grant, to grantState, kind grantKind) {
	cl, from := g.client, g.state
	c.bill(cl.tenant)
	c.count(g, -1)
	if to != granted && to != paused {
		c.stopMoving(g)
	}
	g.ran, g.runFrom = c.ranAt(g), c.now
	old, in := cl.in, c.listOf(to, kind)
	if old == &c.closing && g.kind == turnGrant {
		c.closingBatch--
	}
	if old != in {
		if old != nil {
			old.remove(cl)
		}
		if in == &c.closing && from != over {
			g.graceFrom = c.now
			if to == draining {
				g.graceFrom = c.now.Add(-c.lessGrace(cl.tenant))
			}
		}
	}
	wasRevoked := g.revoked()
	g.state, g.kind = to, kind
	if g.revoked() && !wasRevoked {
		g.revokedAt = c.now
	}
	switch {
	case old == in || in == nil:
	case in == &c.closing:
		in.insert(cl)
	default:
		in.push(cl)
	}
	if in == &c.closing && kind == turnGrant {
		c.closingBatch++
	}
	c.count(g, +1)
	c.review(cl.tenant)
}

// count adds a grant to the sums of its tenant, or takes it out again. The tenant
// is billed up to now.
func (c *GPU) count(g *grant, n int) {
	if g == nil {
		return
	}
	t := g.client.tenant
	switch {
	case g.state == fenced && g.off:
	case g.state == fenced:
		t.fenced += n
		c.fenced += n
	case g.closes():
		t.closing += n
	case g.state == granted && g.kind == besideGrant:
		t.beside += n
	case g.state == granted && !g.move.on:
		t.open += n
	}
	if g.kind == turnGrant && (g.holds() || g.closes()) {
		t.batch += n
	}
}

// recount is for changes to a grant, or of its tenant, that move it from one sum to
// another.
func (c *GPU) recount(g *grant, change func()) {
	c.bill(g.client.tenant)
	c.count(g, -1)
	change()
	c.count(g, +1)
	c.review(g.client.tenant)
}

// give makes a grant for a client that has none. It counts from its first change on.
func (c *GPU) give(cl *client, epoch base.Epoch) *grant {
	cl.grant = &grant{client: cl, epoch: epoch, since: c.now, runFrom: c.now, graceFrom: c.now, cut: cl.cut}
	if cl.cut && cl.tenant.Capped() {
		cl.tenant.limitFrom = c.now.Add(c.minTurn()) // it has the GPU for work for which others wait
	}
	cl.cut = false
	c.mem.SetActive(cl.id, true)
	return cl.grant
}

// ranAt returns how much of its turn a grant has had.
func (c *GPU) ranAt(g *grant) time.Duration {
	if g.state == paused || g.move.on {
		return g.ran
	}
	return g.ran + c.now.Sub(g.runFrom)
}

// askBack has a client drain that must not go on under its grant.
func (c *GPU) askBack(g *grant) {
	if !g.revoked() {
		c.become(g, draining)
	}
}

// endGrant takes the client's grant away: released, reclaimed, or never held.
func (c *GPU) endGrant(cl *client, how EndReason) {
	g, t := cl.grant, cl.tenant
	held := c.now.Sub(g.since)
	r := Released{Client: cl.id, Tenant: t.displayName(), Epoch: g.epoch, Reason: how, Held: held, Fenced: g.state == fenced, Claimed: g.claimed}
	if g.revoked() {
		r.Drained = c.now.Sub(g.revokedAt)
		c.bill(t)
		c.noteDrain(g)
	}
	if cl.in == &c.open || cl.in == &c.closing {
		c.spare()
		c.reserve() // those who wait go before it, should it want another one at once
	}
	c.become(g, over)
	r.Moved = g.move.took
	cl.held += held
	cl.grant, cl.idleSince = nil, c.now
	c.mem.Released(cl.id, r.Moved)
	cl.want = false
	if t.slot != nil {
		t.slot.Released()
	}
	if t.limited() {
		t.Settle(t.slice(), c.tuning)
	}
	c.review(t)
	c.do(r)
}

// A tenant that drains slowly keeps the others waiting. What its latest drain took beyond
// drainAllowance is taken off the grace of its next one, of which minGracePart is left at
// least; and it is billed in full, whatever Tuning.DropTail forgives. So a tenant cannot
// use up nearly all its grace each time: with a grace of 10 s, drains of up to 5 s are
// never fenced, and of several longer ones each second one is.
const (
	// drainAllowance is what a drain may take: 2 ms, after which a shim that can takes its
	// work off the GPU, and time for its threads to run on a busy machine.
	drainAllowance = 50 * time.Millisecond
	minGracePart   = 8
)

// lessGrace is what a drain of the tenant has less than a grace period.
func (c *GPU) lessGrace(t *tenant) time.Duration {
	return min(t.slow, c.grace-c.grace/minGracePart)
}

// heldOn is for a client that could not use the GPU in the latest time under its grant. If others of its tenant
// could, they did.
func (c *GPU) heldOn(g *grant, late time.Duration) {
	t := g.client.tenant
	if t.open+t.closing != 1 || g.state != granted && g.state != draining {
		return
	}
	c.bill(t)
	t.Refund(min(late, c.now.Sub(g.since)), c.limitRatesOf(t))
	c.review(t)
}

// noteDrain is for a grant that ends after it was asked back. The tenant is billed up to now.
func (c *GPU) noteDrain(g *grant) {
	t := g.client.tenant
	t.slow, t.slowAt = max(c.now.Sub(g.revokedAt)-drainAllowance, 0), c.now
	if forgiven := t.slow * time.Duration(c.tuning.DropTail) / 100; forgiven > 0 && g.state == draining {
		t.Charge(c.now, forgiven, c.ratesOf(t))
		if t.inHeap() {
			c.heap(t.place).fix(t)
		}
	}
}

// gracePeriods fences the grants that are not released in time. It also ends the time
// after a restart in which unknown clients may hold.
func gracePeriods() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			if cl := c.closing.head; cl != nil {
				e.Either(cl.grant.graceFrom.Add(c.grace), true)
			}
			e.Either(c.holdOff, c.holdOff != 0)
			return e.At, e.OK
		},
		revoke: (*GPU).fenceOverdue,
	}
}

// fenceOverdue fences the grants whose grace period is over.
func (c *GPU) fenceOverdue() {
	if c.holdOff != 0 && c.now >= c.holdOff {
		c.holdOff = 0
	}
	for cl := c.closing.head; cl != nil && c.now >= cl.grant.graceFrom.Add(c.grace); cl = c.closing.head {
		c.fence(cl.grant)
	}
}

func (c *GPU) fence(g *grant) {
	c.become(g, fenced)
	c.counters.Fences++
	c.do(Fence{g.client.id, g.epoch, g.claimed})
}

// What outlives a restart of the caller: the epochs that were given, and who holds a
// grant or may be given one.

// unrecorded is more than the number of latency grants of one Step. They are given
// before they are recorded, so their epochs may have been used before a restart.
const unrecorded = 10_000

// records are what was handed out as a Persist, and the epochs after that.
type records struct {
	epoch     base.Epoch // of the latest grant, or of the next one if that is fixed
	restarted bool       // no epoch was given out yet since a restart, see takeEpoch
	persisted Persist
}

func newRecords(last base.Epoch, way Way) records {
	return records{epoch: last, restarted: last != 0, persisted: Persist{Epoch: last, Way: way}}
}

// takeEpoch returns the epoch of the next grant.
func (r *records) takeEpoch() base.Epoch {
	if r.restarted {
		r.restarted = false
		r.epoch += unrecorded
	}
	r.epoch = base.NextEpoch(r.epoch)
	return r.epoch
}

// settle brings up to date what was persisted and what the pages say.
func (c *GPU) settle() {
	c.chooseNext()
	if r := c.record(); r != c.persisted {
		c.persist(r)
	}
	c.noticeAll()
}

// record returns what a restart would have to know now.
func (c *GPU) record() Persist {
	p := Persist{Epoch: c.epoch, Unrecorded: c.holdOff != 0, Way: c.wayNow()}
	if c.open.n+c.latency.n+c.beside.n+c.closing.n >= MaxRecorded {
		p.Unrecorded = true
		return p
	}
	n := 0
	for _, l := range [...]*list{&c.open, &c.latency, &c.beside, &c.closing} {
		for cl := l.head; cl != nil; cl = cl.next {
			if cl.grant.claimed { // under any epoch that the client likes
				p.Unrecorded = true
			} else {
				p.Holders[n] = Holder{cl.id, min(cl.grant.epoch, c.epoch), cl.grant.shared || cl.grant.kind != turnGrant} // a client may claim any epoch
				n++
			}
		}
	}
	if c.next != nil {
		p.Holders[n] = Holder{c.next.id, c.nextEpoch, c.inCohort(c.next.tenant)}
	}
	return p
}

// covers says whether p says all that q says.
func covers(p, q Persist) bool {
	if p.Epoch < q.Epoch || q.Unrecorded && !p.Unrecorded {
		return false
	}
	return p.Unrecorded || !slices.ContainsFunc(q.Holders[:], func(h Holder) bool { return h.Client != 0 && !slices.Contains(p.Holders[:], h) })
}

func (c *GPU) persist(p Persist) {
	c.persisted = p
	c.do(p)
}
