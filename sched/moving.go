// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
	"github.com/nvshare/nvshare/sched/residency"
)

// A client that has memory away moves it onto the GPU when it is granted, before its gate opens. That
// time is not billed, and the turn begins when the client is ready. If nothing is moved for a grace
// period, and others wait, the grant is asked back; if other tenants do, this one waits for as long, at most.
//
// Moving takes no more than its share of the time: after a client has moved in, nobody is granted for
// some time that would have to move, while there are clients that need not. When all of them pause,
// others may have the GPU if moving pays (see Pauses).

// setAway says whether a client has memory that is not on the GPU, so that it has to
// move it there before it can go on under a grant.
func (c *GPU) setAway(cl *client, away bool) {
	cl.away = away
	c.review(cl.tenant)
	c.stand(cl)
}

// setStranded takes a client that has no place on the GPU out of the queue, or back in.
func (c *GPU) setStranded(cl *client, on bool) {
	cl.stranded = on
	waits, since, limited := cl.in == &cl.tenant.queue || cl.later, cl.waitingSince, cl.limitedThen
	c.unqueue(cl)
	if waits {
		c.request(cl)
		cl.waitingSince, cl.limitedThen = since, limited
	}
}

// nextOf returns the client of a waiting tenant that is granted next: the one that asked
// first, or, while nobody is to move, the first whose memory is on the GPU.
func (c *GPU) nextOf(t *tenant) *client {
	if c.now < c.owedUntil {
		return c.nearest(t)
	}
	return t.queue.head
}

// nearest returns the first client in the tenant's queue whose memory is on the GPU, or
// the first of all if that of none is; nil: none waits.
func (c *GPU) nearest(t *tenant) *client {
	for cl := t.queue.head; cl != nil; cl = cl.next {
		if !cl.away {
			return cl
		}
		c.looked++
	}
	return t.queue.head
}

// comesFromAway says whether the tenant's next client has to move memory first.
func (c *GPU) comesFromAway(t *tenant) bool {
	cl := c.nextOf(t)
	return cl != nil && cl.away
}

// allAway says whether each of the tenant's clients that wait has to move memory first.
func (c *GPU) allAway(t *tenant) bool {
	cl := c.nearest(t)
	return cl != nil && cl.away
}

// transfers is what a core knows of moving memory on its GPU.
type transfers struct {
	moves       []*grant      // whose clients move memory
	putOff      []*tenant     // whose grants were asked back because they did not get on
	owedUntil   base.Time     // nobody moves before, if others can work
	leastUntil  base.Time     // the same, by the share alone, or the quantum
	sparedUntil base.Time     // the free GPU is not given before to those that have to move
	fillTook    time.Duration // about what moving takes
	fills       int           // how often memory was moved in
	linkRate    float64       // the fastest fill, bytes a second
	pausing     []*client     // that gave the GPU back because they had nothing to do
}

// move is the moving of memory under a grant.
type move struct {
	on    bool          // it moves, and its gate is not open yet
	since base.Time     // while on
	at    base.Time     // of the latest piece, while on
	took  time.Duration // before since
	ready bool          // it has opened its gate after it moved
}

// startMoving is for a grant that begins.
func (c *GPU) startMoving(g *grant) {
	switch t := g.client.tenant; {
	case g.client.away && g.kind == turnGrant:
		c.beginMoving(g)
	case c.now >= c.owedUntil:
		t.stretch = 0
	}
}

func (c *GPU) beginMoving(g *grant) {
	g.ran, g.runFrom = c.ranAt(g), c.now
	g.move.on, g.move.since, g.move.at = true, c.now, c.now
	c.moves = append(c.moves, g)
}

// stopMoving puts what moving took into its accounts. The grant is not counted.
func (c *GPU) stopMoving(g *grant) {
	if !g.move.on {
		return
	}
	took := c.now.Sub(g.move.since)
	g.move.on = false
	g.move.took += took
	g.client.tenant.moved += took
	g.runFrom = c.now
	c.moves = slices.DeleteFunc(c.moves, func(o *grant) bool { return o == g })
	if t := g.client.tenant; t == c.kept {
		t.slot.Settle(!slices.ContainsFunc(c.moves, func(o *grant) bool { return o.client.tenant == t }))
	}
}

// thereMayBeRoom lets those try again whose grants were asked back because they did
// not get on.
func (c *GPU) thereMayBeRoom() {
	for _, t := range c.putOff {
		if t.notBefore = 0; c.tenants[t.key] == t {
			c.review(t)
		}
	}
	c.putOff = c.putOff[:0]
}

// movesOn says that a client has not opened its gate under its grant, perhaps after its
// connection was lost and made anew, and whether it has moved another piece.
func (c *GPU) movesOn(cl *client, epoch base.Epoch, piece bool) {
	if !cl.grant.holds() || cl.grant.kind != turnGrant || cl.grant.epoch != epoch {
		return
	}
	switch g := cl.grant; {
	case g.move.on:
		if piece {
			g.move.at = c.now
		}
	case g.move.took == 0 || g.move.ready: // it opened its gate at once, or has; what it reports now is no fill
	default:
		c.recount(g, func() { c.beginMoving(g) })
	}
}

// isReady says that all the memory of a client is on the GPU, and its gate open: its
// turn begins. Copied is how much it moved since the grant, if that is known.
func (c *GPU) isReady(cl *client, epoch base.Epoch, copied uint64, known bool) {
	if cl.grant == nil || cl.grant.epoch != epoch {
		return
	}
	cl.away = false
	g, t := cl.grant, cl.tenant
	if !g.move.on {
		return
	}
	again := c.movesAgain(t)
	c.recount(g, func() { c.stopMoving(g) })
	g.ran, g.startVT = 0, t.VT()
	g.move.ready = true
	if !again {
		c.owe(t, g.move.took)
	}
	c.noteFill(copied, known, g.move.took)
	c.review(t)
}

// stalledMoves asks back the grants of clients that do not get their memory, and says
// when others may move.
func stalledMoves() policy {
	return policy{due: (*GPU).movingDeadline, revoke: (*GPU).revokeStalled}
}

func (c *GPU) movingDeadline() (base.Time, bool) {
	var e base.Earliest
	if c.isWaitedFor() {
		for _, g := range c.moves {
			e.Either(c.givesUp(g), true)
		}
	}
	if c.deferred.top() != nil && c.effective == Exclusive {
		e.Either(c.owedUntil, c.owedUntil > c.now)
		e.Either(c.sparedUntil, c.free() && c.sparedUntil > c.now)
		if due := c.dueGang(); due != nil {
			e.Either(c.heldFor(due), c.heldFor(due) > c.now)
		}
	}
	e.Either(c.nobodyFor())
	return e.At, e.OK
}

// isWaitedFor says whether somebody waits for the GPU: a gang whose turn has come too,
// which is in no queue. In concurrent mode nobody does, but in the Step in which it is granted.
func (c *GPU) isWaitedFor() bool {
	return c.effective == Exclusive && (c.waiting > 0 || c.upNext() != nil)
}

// othersWait says whether another tenant waits for the GPU, as isWaitedFor has it.
func (c *GPU) othersWait(t *tenant) bool {
	next := c.upNext()
	return c.waiting > t.summed.waiting || next != nil && next != t
}

// maxFill is how long a client may move while others wait: nothing shows from outside whether it does what it says. The
// memory of any GPU is there in less.
const maxFill = 5 * time.Minute

// givesUp returns when a client has not moved anything for too long, or moves for too long.
func (c *GPU) givesUp(g *grant) base.Time {
	if g.client.stranded {
		return c.asideAt(g)
	}
	return min(g.move.at.Add(c.grace), g.overlong(c.grace))
}

// overlong returns when a client has moved for too long in all under its grant.
func (g *grant) overlong(grace time.Duration) base.Time {
	return g.move.since.Add(max(maxFill, grace) - g.move.took)
}

// asideAt returns when the grant of a client is asked back that has no place now: at once, but for work that
// was cut, which goes on meanwhile.
func (c *GPU) asideAt(g *grant) base.Time {
	if g.cut {
		return g.since.Add(c.minTurn())
	}
	return g.since
}

// revokeStalled asks back the grants of clients that do not get their memory.
func (c *GPU) revokeStalled() {
	if at, ok := c.nobodyFor(); ok && c.now >= at {
		c.thereMayBeRoom()
	}
	for _, g := range slices.Clone(c.moves) {
		if !c.isWaitedFor() || !g.move.on || c.now < c.givesUp(g) {
			continue
		}
		t := g.client.tenant
		c.bill(t)
		if c.now >= g.overlong(c.grace) { // it had the GPU for that time, whatever it did
			t.SetVT(t.VT() + base.Scale(int64(c.now.Sub(g.move.since)), account.One, max(c.turnPart(t), 1)))
			c.review(t)
		}
		if !g.client.stranded && c.othersWait(t) { // a stranded client tries again when there is a place
			t.notBefore = c.now.Add(min(c.now.Sub(g.move.since), maxStretch))
			if !slices.Contains(c.putOff, t) {
				c.putOff = append(c.putOff, t)
			}
		}
		c.revokeInVain(g)
	}
}

// revokeInVain asks back a grant with which its client can do nothing.
func (c *GPU) revokeInVain(g *grant) {
	if t := g.client.tenant; c.kept == t && t.slot.Hold() == gang.Playing {
		c.stop(t, MoveStalled)
	} else {
		c.revoke(g, MoveStalled)
	}
}

// Pauses. A client that has nothing to do gives the GPU back if somebody waits. Where all that wait
// have to move first, the core bets: if the client comes back at once, moving was in vain; if it does
// not, waiting was. The GPU is kept free for the time that would have been best for the client's latest
// pauses, from nothing up to what moving costs.

const (
	// slowLink is the speed of most links at least, bytes a second: PCIe 3.0 of 16 lanes.
	slowLink = 12e9
	// slowFills is the number of fills in which a slower link is not believed: while the
	// host memory for what moves out is still being made, moving takes many times longer.
	slowFills = 16
)

// noteFill learns how long moving takes: the longest time, which is forgotten bit by bit.
// Some fills take no time, as those of memory that nobody has touched yet.
func (c *GPU) noteFill(bytes uint64, known bool, took time.Duration) {
	c.fills++
	switch {
	case known && bytes == 0:
		took = 0
	case known && took > 0:
		c.linkRate = max(c.linkRate, float64(bytes)/took.Seconds())
		rate := c.linkRate
		if c.fills <= slowFills {
			rate = max(rate, slowLink)
		}
		took = min(took, time.Duration(float64(bytes)/rate*float64(time.Second)))
	}
	c.fillTook = max(took, c.fillTook-(c.fillTook-took)/4)
}

// moveCost is what moving for a pause costs: another client's memory moves in, and out
// again when the client that paused comes back.
func (tr *transfers) moveCost() time.Duration { return 2 * tr.fillTook }

// What turns and the memory of a GPU have to do with each other.

// forMemory is what memory sees of the turns.
type forMemory struct{ c *GPU }

func (f forMemory) Known(id base.ClientID) bool { return f.c.clients[id] != nil }

func (f forMemory) Connected(id base.ClientID) bool {
	cl := f.c.clients[id]
	return cl != nil && cl.connected
}

func (f forMemory) Later(a, b base.ClientID) bool { return f.c.later(a, b) }

func (f forMemory) SetAway(id base.ClientID, away bool) {
	if cl := f.c.clients[id]; cl != nil && cl.tenant != nil && cl.away != away { // without a tenant it attaches just now
		f.c.setAway(cl, away)
	}
}

func (f forMemory) SetStranded(id base.ClientID, on bool) { f.c.setStranded(f.c.clients[id], on) }

func (f forMemory) Ready(id base.ClientID, epoch base.Epoch, copied uint64, known bool) {
	f.c.isReady(f.c.clients[id], epoch, copied, known)
}

func (f forMemory) MovesOn(id base.ClientID, epoch base.Epoch, piece bool) {
	f.c.movesOn(f.c.clients[id], epoch, piece)
}

func (f forMemory) MovedOut() {
	for _, g := range f.c.moves {
		g.move.at = f.c.now
	}
}

func (f forMemory) MayBeRoom() { f.c.thereMayBeRoom() }

// attachMemory takes in the memory of a client that attaches.
func (c *GPU) attachMemory(cl *client, ev Attach) {
	cl.away = c.mem.Attach(residency.Client{
		ID: cl.id, Tenant: ev.Tenant, Gang: ev.Share.Group(), CanMove: ev.CanMove, Again: ev.Again, Cut: ev.Cut, Granted: cl.grant != nil,
	})
}

// restoreMemory takes in the memory of a client that was here before a restart.
func (c *GPU) restoreMemory(ev residency.RestoreMemory) {
	cl := c.clients[ev.Client]
	c.mem.Restore(ev, cl != nil && cl.grant != nil)
}

// strandedMemory lets those go on that have a place again, or are to try, and puts those aside who wait for
// others' work.
func strandedMemory() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			e.Either(c.mem.Due())
			for _, g := range c.heldBehind() {
				e.Either(c.asideAt(g), true)
			}
			return e.At, e.OK
		},
		revoke: func(c *GPU) {
			c.mem.PlaceStranded()
			c.mem.PutBehind()
			for _, g := range c.heldBehind() {
				if g.holds() && c.now >= c.asideAt(g) { // its gang may have been stopped just now
					c.revokeInVain(g)
				}
			}
		},
	}
}

// heldBehind returns the grants of clients that wait for others' work, while somebody waits for the GPU.
func (c *GPU) heldBehind() (held []*grant) {
	for _, id := range c.mem.Behind() {
		if cl := c.clients[id]; cl != nil && cl.grant.holds() && c.isWaitedFor() {
			held = append(held, cl.grant)
		}
	}
	return held
}

func (c *GPU) suspend(tenant string) {
	finishing := c.mem.Finishing()
	for _, id := range c.mem.Clients(tenant) {
		if cl := c.clients[id]; c.mem.Suspend(id) && cl != nil && cl.grant.holds() && cl.tenant.slot == nil && !slices.Contains(finishing, id) {
			c.revoke(cl.grant, Suspending)
		}
	}
}

// finishingWork gives clients a grant whose drain was cut and that are to leave the GPU, or to make room: nothing
// of them can move before that work is done. The grant of one that leaves is asked back after a quantum. While
// somebody is to move work is bounded, so what is left gets less with each grant.
func finishingWork() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			for _, id := range c.mem.Finishing() {
				e.Either(c.finishBy(id))
			}
			return e.At, e.OK
		},
		revoke: func(c *GPU) {
			for _, id := range c.mem.Finishing() {
				cl := c.clients[id]
				if cl != nil && cl.connected && cl.tenant.slot == nil && cl.grant == nil && cl.in == nil && !cl.later {
					c.request(cl)
				}
				if cl != nil && cl.tenant.place == throttled {
					c.review(cl.tenant)
				}
				if at, ok := c.finishBy(id); ok && c.now >= at {
					c.revoke(cl.grant, Suspending)
				}
			}
		},
	}
}

// finishes says whether a client of a tenant waits to finish work for which others wait, minutes if its limit held.
// It holds where the tenant has a fenced process, which goes on using up what it may.
func (c *GPU) finishes(t *tenant) bool {
	if t.fenced > 0 {
		return false
	}
	for cl := t.queue.head; cl != nil; cl = cl.next {
		if cl.cut && c.mem.Finishes(cl.id) {
			return true
		}
	}
	return false
}

// finishBy returns when a client that is to leave is to have finished its work; false: it has no grant.
func (c *GPU) finishBy(id base.ClientID) (base.Time, bool) {
	cl := c.clients[id]
	if cl == nil || !c.mem.Leaves(id) || cl.tenant.slot != nil || !cl.grant.holds() || cl.grant.state == paused || cl.grant.move.on {
		return 0, false
	}
	return cl.grant.runFrom.Add(c.quantum - cl.grant.ran), true
}

// resumeTenant has a tenant's memory come back: a client that has memory away, or may have, waits for
// a grant as if it had asked for one. A client without a connection comes back with its own request.
func (c *GPU) resumeTenant(tenant string) {
	for _, id := range c.mem.Clients(tenant) {
		if cl := c.clients[id]; c.mem.Resume(id) && cl != nil && cl.connected && cl.tenant.slot == nil && !cl.grant.holds() {
			c.request(cl)
		}
	}
}

// Unused says whether the GPU has no client, and nobody has memory on it.
func (c *GPU) Unused() bool { return len(c.clients) == 0 && c.mem.Unused() }

// AsksHost says whether what an event does may depend on how much host memory there
// is: then Arenas.Observe comes before its Step.
func (c *GPU) AsksHost(ev base.Event) bool {
	switch ev.(type) {
	case Attach, SetShare:
		return c.Unplaced()
	}
	return c.View.AsksHost(ev)
}

// Left says whether a client is suspended, nothing that can be moved is left of its memory
// on the GPU, and it does not wait to come back.
func (c *GPU) Left(id base.ClientID) bool {
	cl := c.clients[id]
	return cl != nil && c.mem.HasLeft(id) && cl.grant == nil && cl.in == nil && !cl.later
}

// Departed says whether no client of a tenant has a grant, waits for one, or has memory on
// the GPU that can be moved.
func (c *GPU) Departed(tenant string) bool {
	for _, id := range c.mem.Clients(tenant) {
		if cl := c.clients[id]; cl != nil && (cl.grant != nil || cl.in != nil) {
			return false
		}
	}
	return c.mem.Departed(tenant)
}

// IsBack says whether a client of a tenant that was suspended has memory on the GPU, or room for it, since.
func (c *GPU) IsBack(tenant string) bool { return c.mem.IsBack(tenant) }
