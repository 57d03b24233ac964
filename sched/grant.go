// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// grantState is where a grant is in its life; doc.go draws the way. The states
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
	besideGrant                   // given to a latency tenant beside others, whose time slices are short; see beside.go
)

// grant is the permission of one client to submit work, from the moment in which
// it is given, claimed or restored until it is over.
type grant struct {
	client  *client
	epoch   Epoch
	kind    grantKind
	state   grantState
	claimed bool // the client says so; there is no record of it
	shared  bool // it is a turn of the cohort, in which others may hold too
	off     bool // it is fenced, and the client is kept off the GPU from outside
	alone   bool // it is a turn: nobody else has had the GPU since the grant

	since     Time
	revokedAt Time          // while draining or fenced
	graceFrom Time          // the end of grace is a grace period later; while lost or draining
	ran       time.Duration // of its turn, up to runFrom
	runFrom   Time
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

	kept    *tenant // the gang that has the GPU, or is about to; see package gang
	holdOff Time    // no exclusive grant before; 0: none

	// Who is granted when the holder has released, if nothing happens to it
	// before, and under which epoch: decided, and recorded, while it drains.
	next      *client
	nextEpoch Epoch
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

// become changes the state of a grant.
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
func (c *GPU) give(cl *client, epoch Epoch) *grant {
	cl.grant = &grant{client: cl, epoch: epoch, since: c.now, runFrom: c.now, graceFrom: c.now}
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
