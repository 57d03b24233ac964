// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// client is what the core knows of one process.
type client struct {
	id        base.ClientID
	account   string // as in Attach
	share     Share  // its account's, as told; Weight 0: not told
	tenant    *tenant
	connected bool
	want      bool   // it has a grant, and has asked for the next one
	seq       uint64 // of its request

	standing bool // it has no grant, and was told that it may go ahead, see Stand

	grant *grant // nil: none

	// Memory; see moving.go.
	away     bool // some of its memory is not on the GPU
	stranded bool // there is no place on the GPU for its memory
	later    bool // it wants a grant as soon as there is a place

	// Whether it does anything, see suspendIdle.
	calledAt base.Time // at that time it still made calls
	quiet    bool      // it is told to leave when it has nothing to do

	// Its pauses.
	idleSince base.Time // since then it has no grant and wants none
	pausing   bool      // it gave the GPU back because it had nothing to do
	pauses    timeslice.Pauses

	told  Notice        // what its page says
	slice time.Duration // the GPU's own time slice, as it was told; 0: the driver's

	controls Controls  // what it has proved; Client 0: nothing yet
	wanted   bool      // it has wanted the GPU over this connection
	wantedAt base.Time // first
	progress timeslice.Progress
	tallied  tallied // in GPU.tally

	waitingSince base.Time
	limitedThen  time.Duration // account.limitedFor at that time
	longestWait  time.Duration
	held         time.Duration // the GPU, under grants that are over
	grants       uint64
	preemptions  uint64 // grants that ended with work left
	cut          bool   // the latest one did

	prev, next *client // in the list that it is in
	in         *list
}

func (c *GPU) attach(ev Attach) {
	if ev.Client == 0 {
		panic("sched: attach of client 0")
	}
	t := c.tenantOf(ev.Tenant, ev.Client, ev.Share)
	cl := c.clients[ev.Client]
	if cl == nil {
		cl = &client{id: ev.Client, idleSince: c.now}
		cl.progress.StartTurns(c.now)
		c.enlist(cl)
	}
	cl.account = ev.Tenant
	c.attachMemory(cl, ev)
	cl.calledAt = c.now
	c.lookForIdle()
	if cl.tenant != nil && cl.tenant != t && (cl.tenant.slot != nil || t.isGang()) && cl.grant != nil {
		c.askBack(cl.grant) // the grant was given to another tenant
	}
	c.join(cl, t)
	if cl.grant != nil && cl.grant.state == lost && !c.inCohort(t) {
		cl.grant.shared = false // a restart did not know whose it is
	}
	cl.share = clampShare(ev.Share)
	changed := t.share != cl.share
	c.setShare(t, ev.Share)
	if !cl.connected {
		cl.connected = true
		c.connected++
	}
	cl.told = Notice{Client: cl.id} // a new page says nothing
	cl.slice, c.slices.stale = 0, true
	cl.controls, cl.wanted = Controls{}, false
	if ev.Held != 0 {
		c.wantsGPU(cl)
	}
	c.slices.ever = c.slices.ever || t.share.Priority == Latency
	cl.standing, cl.want = false, false
	cl.stranded, cl.later = false, false // its place is looked for again
	c.goOn(cl, ev)
	cl.cut = ev.Cut && cl.grant == nil
	if ev.Want {
		c.request(cl)
	}
	if changed {
		c.standAll(t)
	} else {
		c.stand(cl)
	}
	c.addUp(cl)
}

// goOn compares the grant that a client says it has with the one that it was given.
func (c *GPU) goOn(cl *client, ev Attach) {
	switch {
	case ev.Held == 0:
		// The release was lost with the old connection, or the grant never
		// reached the client.
		if cl.grant != nil {
			c.endGrant(cl, EndLost)
		}
		if !ev.Want {
			c.unqueue(cl)
		}
	case cl.grant != nil && ev.Held == cl.grant.epoch && c.adoptable(cl.grant):
		c.adopt(cl.grant)
	case cl.grant != nil:
		// The grant was revoked, or the client names another epoch. It sees a
		// word that is not its epoch, drains, and releases the epoch it named.
		cl.grant.epoch = ev.Held
		c.askBack(cl.grant)
	default:
		c.claim(cl, ev.Held)
	}
}

// adoptable says whether a client that is back may go on under its grant.
func (c *GPU) adoptable(g *grant) bool {
	if g.revoked() {
		return false
	}
	t := g.client.tenant
	if c.effective == Concurrent || c.adoptedAs(g) == latencyGrant {
		return true
	}
	if c.holdOff != 0 {
		return false // clients that were not recorded may be on the GPU
	}
	if t.byGang() {
		// A tenant that was of a cohort before the restart may be a gang now.
		return t.slot.Hold() == gang.Playing && t.slot.Phase() == gang.Running && c.open.n+c.closingBatch == t.batch
	}
	// After a restart several clients may be recorded: they held at the same
	// time, or were next. Who holds is known only when all are back.
	others := c.open.n + c.closingBatch
	if g.kind == turnGrant {
		others-- // this grant
	}
	if g.shared && c.inCohort(t) && (c.cohortRuns() || c.cohortIsLost()) {
		return true // the others hold, or are not back, so the turn is not over
	}
	// A lost holder is not revoked when its turn is over, as nobody is there to be
	// told. It is revoked now, or cutting the connection would buy a grace period.
	next := c.inTurn()
	return others == 0 && c.kept == nil && (next == nil || next.place == deferred && c.now < c.owedUntil || c.ranAt(g) < c.turn(t))
}

// adoptedAs returns the kind that a grant has when it is adopted: after a restart
// the tenant's share alone says whether it is a latency grant.
func (c *GPU) adoptedAs(g *grant) grantKind {
	t := g.client.tenant
	if c.effective == Exclusive && (g.kind != turnGrant || t.share.Priority == Latency && !t.Demoted()) {
		return latencyGrant
	}
	return turnGrant
}

func (c *GPU) adopt(g *grant) {
	c.recount(g, func() { c.stopMoving(g) }) // it will say again whether it moves memory
	c.change(g, granted, c.adoptedAs(g))
	if c.auto.keepUntil != 0 && g.shared { // how much of the turn was over before the restart is not known
		for cl := c.open.head; cl != nil; cl = cl.next {
			cl.grant.ran, cl.grant.runFrom = 0, c.now
		}
	}
	c.notAlone()
	c.do(Adopt{g.client.id, g.epoch, c.effective == Concurrent, c.effective == Exclusive && g.kind == turnGrant && g.shared})
	c.notice(g.client)
}

// claim takes note of a grant that the core has no record of. The client will drain
// and release it. Nothing is granted meanwhile, for a grace period at most. A claim can
// be honest only after a restart that lost what was persisted. So a claim that comes late,
// or where that is known, blocks nobody; else a process could keep the GPU from others by making claims for ever.
func (c *GPU) claim(cl *client, held base.Epoch) {
	c.unqueue(cl)
	g := c.give(cl, held)
	g.claimed = true
	if c.now < c.claimsUntil {
		c.become(g, draining)
	} else {
		c.fence(g)
	}
}

func (c *GPU) request(cl *client) {
	wakes := c.mode == Auto && c.sleeps(cl)
	c.endPause(cl)
	c.wantsGPU(cl)
	switch {
	case cl.grant != nil:
		cl.want = true
	case cl.stranded:
		if !cl.later {
			cl.later, cl.waitingSince, cl.limitedThen = true, c.now, cl.tenant.LimitedFor()
		}
	case cl.in == nil:
		c.slices.stale = c.slices.stale || wakes
		c.bill(cl.tenant)
		cl.waitingSince, cl.limitedThen = c.now, cl.tenant.LimitedFor()
		c.seq++
		cl.seq = c.seq
		cl.tenant.queue.push(cl)
		c.review(cl.tenant)
	}
}

// unqueue takes a client out of its tenant's queue, if it waits.
func (c *GPU) unqueue(cl *client) {
	if cl.later || cl.in == &cl.tenant.queue {
		cl.later, cl.idleSince = false, c.now
	}
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

func (c *GPU) withdraw(cl *client, exits bool) {
	cl.want = false
	if exits {
		cl.cut = false
		c.mem.SetCut(cl.id, false)
	}
	c.unqueue(cl)
}

func (c *GPU) release(ev Release) {
	cl := c.clients[ev.Client]
	if cl == nil || cl.grant == nil || ev.Epoch != cl.grant.epoch {
		c.counters.StaleReleases++
		if cl != nil && ev.Reason == Exit {
			c.withdraw(cl, true)
		}
		return
	}
	how := EndRevoked
	if cl.grant.holds() {
		how = EndIdle
		if cl.grant.state == granted {
			c.do(Close{cl.id})
		}
	}
	if ev.Preempted {
		how = EndPreempted
		cl.preemptions++
		c.counters.Preemptions++
	}
	if ev.Reason == Exit {
		how = EndExit
	}
	want := (cl.want || ev.Preempted) && ev.Reason != Exit
	if how != EndExit && !want {
		c.beginPause(cl, how == EndIdle)
	}
	if g := cl.grant; g.alone && how != EndExit {
		cl.progress.HadTurn(ev.Calls, c.ranAt(g))
		c.addUp(cl)
		c.auto.turnEnded = c.now
	}
	cut := ev.Preempted && ev.Reason != Exit
	c.mem.SetCut(cl.id, cut)
	c.endGrant(cl, how)
	cl.cut = cut
	switch {
	case !cl.connected:
		c.forget(cl)
	case want:
		c.request(cl)
	}
	c.stand(cl)
}

func (c *GPU) lost(id base.ClientID) {
	cl := c.clients[id]
	if cl == nil || !cl.connected {
		return
	}
	cl.connected = false
	c.connected--
	c.addUp(cl)
	c.slices.stale = true
	cl.want = false
	if cl.grant == nil {
		c.forget(cl)
		return
	}
	if cl.grant.holds() {
		if cl.grant.state == granted {
			c.do(Close{id})
		}
		c.become(cl.grant, lost)
	}
}

func (c *GPU) gone(id base.ClientID) {
	defer c.mem.Drop(id)
	cl := c.clients[id]
	if cl == nil {
		return
	}
	if cl.grant != nil {
		if cl.grant.state != fenced {
			c.counters.Reclaims++
		}
		c.endGrant(cl, EndDeath)
	}
	if cl.connected {
		c.connected--
	}
	c.slices.stale = true
	c.forget(cl)
}

// exec is for a process that has lost its connection and runs another program: nothing is left
// of what the earlier one did on the GPU.
func (c *GPU) exec(id base.ClientID) {
	c.mem.Drop(id)
	switch cl := c.clients[id]; {
	case cl == nil:
	case cl.connected:
		cl.idleSince = c.now
	default:
		c.endGrant(cl, EndLost)
		c.forget(cl)
	}
}

// forget removes a client that has no grant.
func (c *GPU) forget(cl *client) {
	c.unqueue(cl)
	c.forgetPause(cl)
	c.mem.Forget(cl.id)
	c.delist(cl)
	c.leave(cl)
}

func (c *GPU) restore(ev Restore) {
	if c.connected != 0 || c.clients[ev.Client] != nil || ev.Client == 0 || ev.Epoch == 0 {
		panic(fmt.Sprintf("sched: %v: needs a client and an epoch, and comes before any other event", ev))
	}
	c.resumeWay()
	cl := &client{id: ev.Client}
	share := Share{Gang: ev.Gang, Overlap: ev.Overlap}
	if share.Group() != "" {
		cl.account = ev.Tenant // a client without these has no tenant until it is back
	}
	c.enlist(cl)
	c.join(cl, c.tenantOf("", cl.id, share))
	g := c.give(cl, ev.Epoch)
	g.graceFrom, g.shared = c.now.Add(c.quantum), ev.Shared && c.cohort.on
	c.become(g, lost)
	c.restoreGang(cl.tenant)
	c.restored(ev.Epoch)
}

func (c *GPU) restoreUnknown(ev RestoreUnknown) {
	c.resumeWay()
	c.holdOff = max(c.holdOff, c.now.Add(c.quantum+c.grace))
	c.claimsUntil = c.holdOff
	c.restored(ev.Epoch)
}

// restored keeps an epoch from being given out again.
func (c *GPU) restored(epoch base.Epoch) {
	c.epoch = max(c.epoch, epoch)
	c.persisted = c.record() // what the event says was persisted
	c.gangs.Await()
}

// A client that has not used the GPU for Memory.SuspendAfter, or for the time of its tenant, is
// suspended. A client alone keeps its grant, so a holder that has made no calls for a while is told
// to leave once it has nothing to do: only the client knows whether a kernel still runs.

// A holder without calls for an idlePart of its time, and for quietLeast, is told to leave.
// Clients report calls once a second.
const (
	idlePart   = 16
	quietLeast = 2 * time.Second
)

// lookForIdle has idle clients looked for in this Step.
func (c *GPU) lookForIdle() {
	if c.SuspendsIdle() {
		c.idle = base.Earliest{At: c.now, OK: true}
	}
}

// startWork is for a client that is granted.
func (c *GPU) startWork(cl *client) {
	cl.quiet, cl.calledAt = false, c.now
	if after := c.mem.IdleTime(cl.id); after > 0 && c.idle.OK {
		c.idle.Either(cl.quietAt(after), true)
	}
}

// quietAt returns when a holder has made no calls for long.
func (cl *client) quietAt(after time.Duration) base.Time {
	return cl.calledAt.Add(max(after/idlePart, quietLeast))
}

func (c *GPU) called(id base.ClientID) {
	if cl := c.clients[id]; cl != nil {
		cl.calledAt = c.now
		c.tellToLeave(cl, false)
	}
}

// tellToLeave tells a holder whether to give the GPU back when it has nothing to do,
// though nobody waits.
func (c *GPU) tellToLeave(cl *client, on bool) {
	if cl.quiet == on {
		return
	}
	cl.quiet = on
	if cl.grant.holds() {
		c.notice(cl)
	}
}

// idleClients suspends clients that have been idle for their time.
func idleClients() policy {
	return policy{
		due:    func(c *GPU) (base.Time, bool) { return c.idle.At, c.idle.OK },
		revoke: (*GPU).suspendIdle,
	}
}

// suspendIdle looks at all clients, and says when to look again. A client that does
// anything meanwhile only becomes idle later.
func (c *GPU) suspendIdle() {
	if !c.idle.OK || c.now < c.idle.At {
		return
	}
	var next base.Earliest
	for _, cl := range c.inOrder() {
		after := c.mem.IdleTime(cl.id)
		if after == 0 {
			continue
		}
		at := c.now.Add(after)
		switch {
		case cl.grant.holds() && !cl.quiet && cl.tenant.slot == nil:
			if quiet := cl.quietAt(after); quiet > c.now {
				at = min(at, quiet)
			} else {
				c.tellToLeave(cl, true)
			}
		case cl.grant == nil && cl.in == nil && !cl.later:
			if idle := cl.idleSince.Add(after); idle > c.now {
				at = idle
			} else {
				c.mem.SuspendIdle(cl.id)
			}
		}
		next.Either(at, true)
	}
	c.idle = next
}
