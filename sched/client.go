// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"time"
)

// client is what the core knows of one process.
type client struct {
	id        ClientID
	account   string // as in Attach
	tenant    *tenant
	connected bool
	want      bool   // has a grant, and asked for the next one already
	seq       uint64 // of its request

	standing bool // has no grant, and was told that it may go ahead, see Stand

	// The grant; epoch is 0 if it has none, and the rest then means nothing.
	epoch     Epoch
	since     Time
	latency   bool // given to a latency tenant, beside others
	paused    bool // gate shut for the moment, by a latency grant
	revoked   bool // asked back, or never ours to adopt
	claimed   bool // the client says so; there is no record of it
	fenced    bool
	base      Time // end of grace = base + Core.grace; while in closing
	revokedAt Time
	ran       time.Duration // of its turn, up to runFrom
	runFrom   Time          // means nothing while paused
	startVT   int64         // of the tenant, when it began

	// Memory; see moving.go.
	away        bool          // it has some that is not on the GPU
	moving      bool          // under its grant, and its gate is not open yet
	movingSince Time          // means nothing else
	movedAt     Time          // the latest piece
	ready       bool          // it has opened its gate after that
	moved       time.Duration // under this grant, up to movingSince
	stranded    bool          // there is no place for it
	later       bool          // it wants a grant once there is

	// Its pauses; see pause.go.
	idleSince Time // it has no grant and wants none, from then on
	pausing   bool // by itself
	pauses    [pausesKept]time.Duration
	nPauses   int // ever

	told Notice // what its page says

	waitingSince Time
	longestWait  time.Duration
	held         time.Duration // under grants that have ended
	grants       uint64

	prev, next *client // within in
	in         *list
}

func (c *Core) attach(ev Attach) {
	if ev.Client == 0 {
		panic("sched: attach of client 0")
	}
	t := c.tenantOf(ev.Tenant, ev.Client, ev.Share)
	cl := c.clients[ev.Client]
	if cl == nil {
		cl = &client{id: ev.Client, idleSince: c.now}
		c.clients[ev.Client] = cl
	}
	cl.account, cl.away = ev.Tenant, ev.Away
	if cl.tenant != nil && cl.tenant != t && (cl.tenant.gang != nil || t.isGang()) && cl.epoch != 0 && !cl.fenced {
		cl.revoked, cl.revokedAt = true, c.now // it was given to it as another
		c.startClosing(cl)
	}
	c.join(cl, t)
	changed := t.share != clampShare(ev.Share)
	c.setShare(t, ev.Share)
	if !cl.connected {
		cl.connected = true
		c.connected++
	}
	cl.told = Notice{Client: cl.id} // a new page says nothing
	cl.standing = false
	cl.want = false
	cl.stranded, cl.later = false, false // it is tried again

	switch {
	case ev.Held == 0:
		// It does not hold what we thought: the release was lost with the
		// old connection, or the grant never reached it.
		if cl.epoch != 0 {
			c.endGrant(cl, EndLost)
		}
		if !ev.Want {
			c.unqueue(cl)
		}
	case ev.Held == cl.epoch && c.adoptable(cl):
		c.adopt(cl)
	case cl.epoch != 0:
		// Revoked, or it names another epoch than ours. It sees a word that
		// is not its epoch, drains, and releases the epoch it named.
		cl.epoch = ev.Held
		if !cl.revoked {
			cl.revoked, cl.revokedAt = true, c.now
		}
		c.startClosing(cl)
	default:
		c.claim(cl, ev.Held)
	}
	if ev.Want {
		c.request(cl)
	}
	if changed {
		c.standAll(t)
	} else {
		c.stand(cl)
	}
}

// adoptable says whether a client that is back may go on under its grant.
func (c *Core) adoptable(cl *client) bool {
	if cl.revoked || cl.fenced {
		return false
	}
	if c.effective == Concurrent || c.adoptsLatency(cl) {
		return true
	}
	if c.holdOff != 0 {
		return false // others may be on the GPU that are not recorded, from when all could be
	}
	if cl.tenant.gang != nil {
		return cl.tenant.hold == playing && cl.tenant.gang.phase == running
	}
	// After a restart several may be recorded that held at the same time, or
	// that were next; who really holds is known only when all are back.
	others := c.open.n + c.closingBatch
	if !cl.latency {
		others-- // itself
	}
	// A lost holder is not revoked by the clock, there is nobody to tell. It
	// is now; or cutting the connection would buy another grace period.
	next := c.inTurn()
	return others == 0 && c.kept == nil && (next == nil || next.place == afar && c.now < c.owedUntil || c.ranAt(cl) < c.turn(cl.tenant))
}

// adoptsLatency says whether a grant that is adopted is a latency one: after a
// restart that is known by the tenant's share alone.
func (c *Core) adoptsLatency(cl *client) bool {
	return c.effective == Exclusive && (cl.latency || cl.tenant.share.Priority == Latency && !cl.tenant.demoted)
}

func (c *Core) adopt(cl *client) {
	latency := c.adoptsLatency(cl)
	ran := c.ranAt(cl)
	c.unlist(cl)
	cl.latency, cl.paused = latency, false
	cl.ran, cl.runFrom = ran, c.now
	if latency {
		c.enlist(cl, &c.latency)
	} else {
		c.enlist(cl, &c.open)
	}
	c.do(Adopt{cl.id, cl.epoch})
	c.notice(cl)
}

// claim takes note of a grant the core has no record of. The client will
// drain and release it; nothing is granted meanwhile, for a grace period at
// most. Only after a restart that lost what was persisted can that be honest,
// so late claims block nobody: else a process could keep the GPU from others
// by making claims for ever.
func (c *Core) claim(cl *client, held Epoch) {
	c.unqueue(cl)
	cl.epoch = held
	cl.since = c.now
	cl.revokedAt = c.now
	cl.ran, cl.runFrom = 0, c.now
	cl.revoked = true
	cl.claimed = true
	cl.latency, cl.paused = false, false
	if c.now < c.claimsUntil {
		c.startClosing(cl)
	} else {
		c.fence(cl)
	}
}

func (c *Core) request(cl *client) {
	c.endPause(cl)
	switch {
	case cl.epoch != 0:
		cl.want = true
	case cl.stranded:
		if !cl.later {
			cl.later, cl.waitingSince = true, c.now
		}
	case cl.in == nil:
		c.bill(cl.tenant)
		cl.waitingSince = c.now
		c.seq++
		cl.seq = c.seq
		cl.tenant.queue.push(cl)
		c.review(cl.tenant)
	}
}

// unqueue takes a client that waits, if it does, out of its tenant's queue.
func (c *Core) unqueue(cl *client) {
	cl.later = false
	if cl.in != &cl.tenant.queue {
		return
	}
	c.bill(cl.tenant)
	cl.in.remove(cl)
	c.review(cl.tenant)
	if c.next == cl {
		c.next = nil
	}
}

func (c *Core) release(ev Release) {
	cl := c.clients[ev.Client]
	if cl == nil || ev.Epoch == 0 || ev.Epoch != cl.epoch {
		if ev.Epoch != 0 || ev.Reason != Exit {
			c.counters.StaleReleases++
		}
		if cl != nil && ev.Reason == Exit {
			cl.want = false
			c.unqueue(cl)
		}
		return
	}
	how := EndRevoked
	if cl.in == &c.open || cl.in == &c.latency {
		how = EndIdle
		if !cl.paused {
			c.do(Close{cl.id})
		}
	}
	if ev.Reason == Exit {
		how = EndExit
	}
	want := cl.want && ev.Reason != Exit
	if how != EndExit && !want {
		c.beginPause(cl, how == EndIdle)
	}
	c.endGrant(cl, how)
	switch {
	case !cl.connected:
		c.forget(cl)
	case want:
		c.request(cl)
	}
	c.stand(cl)
}

func (c *Core) lost(id ClientID) {
	cl := c.clients[id]
	if cl == nil || !cl.connected {
		return
	}
	cl.connected = false
	c.connected--
	cl.want = false
	if cl.epoch == 0 {
		c.forget(cl)
		return
	}
	if cl.in == &c.open || cl.in == &c.latency {
		if !cl.paused {
			c.do(Close{id})
		}
		c.startClosing(cl)
	}
}

func (c *Core) gone(id ClientID) {
	cl := c.clients[id]
	if cl == nil {
		return
	}
	if cl.epoch != 0 {
		if !cl.fenced {
			c.counters.Reclaims++
		}
		c.endGrant(cl, EndDeath)
	}
	if cl.connected {
		c.connected--
	}
	c.forget(cl)
}

// forget removes a client without a grant.
func (c *Core) forget(cl *client) {
	c.unqueue(cl)
	c.forgetPause(cl)
	delete(c.clients, cl.id)
	c.leave(cl)
}

func (c *Core) restore(ev Restore) {
	until := c.now.Add(c.quantum + c.grace)
	c.epoch = max(c.epoch, ev.Epoch)
	if ev.Client == 0 {
		c.holdOff = max(c.holdOff, until)
	} else {
		if c.connected != 0 || c.clients[ev.Client] != nil || ev.Epoch == 0 {
			panic(fmt.Sprintf("sched: %v: needs an epoch, and comes before any other event", ev))
		}
		cl := &client{id: ev.Client}
		if ev.Gang != "" {
			cl.account = ev.Tenant // others belong to nobody until they are back
		}
		c.clients[cl.id] = cl
		c.join(cl, c.tenantOf("", cl.id, Share{Gang: ev.Gang}))
		cl.epoch, cl.since, cl.runFrom, cl.base = ev.Epoch, c.now, c.now, until.Add(-c.grace)
		c.enlist(cl, &c.closing)
		c.restoreGang(cl.tenant)
	}
	c.persisted = c.record() // that is where the event came from
}
