// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"
)

// Moving memory. A client whose memory is not all on the GPU moves it there when
// it is granted, while its gate is still shut. That time is in an account of its
// own: it is not billed, and the turn begins when the client is ready. If nothing
// is moved for a grace period, and others wait, the grant is asked back, and the
// tenant waits for as long as that took, or until there is room.
//
// Turns are stretched so that moving takes no more than its share of the time. So
// long the holder is told that nobody waits, or a short pause would have it give
// back what was costly to get. But if the tenant has pauses that are longer than what
// moving takes, others may have those: then that holds only until the turn has
// lasted as long as moving took.

// maxStretch bounds how long turns become for what moving took.
const maxStretch = time.Minute

// maxSwapShare leaves half of the time for work.
const maxSwapShare = 50

func clampShareOfSwap(percent int) int { return min(max(percent, 0), maxSwapShare) }

// Active says whether a client has a grant, of whatever state: it may use memory.
func (c *Core) Active(id ClientID) bool {
	cl := c.clients[id]
	return cl != nil && cl.epoch != 0
}

// Grant returns the epoch of a client's grant, 0: it has none, and whether it moves
// memory before its turn begins.
func (c *Core) Grant(id ClientID) (epoch Epoch, moving bool) {
	if cl := c.clients[id]; cl != nil {
		return cl.epoch, cl.moving
	}
	return 0, false
}

func (c *Core) setAway(ev SetAway) {
	cl := c.clients[ev.Client]
	if cl == nil || cl.away == ev.Away {
		return
	}
	cl.away = ev.Away
	c.review(cl.tenant)
	c.stand(cl)
}

// comesFromAway says whether who of the tenant is granted next has to move first.
func (t *tenant) comesFromAway() bool { return t.queue.head != nil && t.queue.head.away }

// startMoving is part of a grant.
func (c *Core) startMoving(cl *client) {
	cl.moved, cl.ready = 0, false
	if cl.away && !cl.latency {
		c.beginMoving(cl)
	} else {
		cl.tenant.stretch = 0
	}
}

func (c *Core) beginMoving(cl *client) {
	cl.moving, cl.movingSince, cl.movedAt = true, c.now, c.now
	c.moves = append(c.moves, cl)
}

// stopMoving puts what moving took into its accounts. The client is not counted.
func (c *Core) stopMoving(cl *client) {
	if !cl.moving {
		return
	}
	took := c.now.Sub(cl.movingSince)
	cl.moving = false
	cl.moved += took
	cl.tenant.moved += took
	cl.runFrom = c.now
	c.moves = slices.DeleteFunc(c.moves, func(o *client) bool { return o == cl })
}

// movesOn is Moving: it goes on, also if its connection was lost meanwhile.
func (c *Core) movesOn(ev Moving) {
	cl := c.clients[ev.Client]
	if cl != nil && ev.Epoch == 0 && cl.tenant.notBefore != 0 {
		cl.tenant.notBefore = 0
		c.review(cl.tenant)
	}
	if cl == nil || cl.epoch == 0 || cl.epoch != ev.Epoch || cl.in != &c.open {
		return
	}
	if cl.moving {
		cl.movedAt = c.now
		return
	}
	if cl.moved == 0 || cl.ready {
		return // it opened its gate at once, or has; what it reports now is no fill
	}
	c.bill(cl.tenant)
	c.count(cl, -1)
	cl.ran = c.ranAt(cl)
	c.beginMoving(cl)
	c.count(cl, +1)
	c.review(cl.tenant)
}

// isReady is Ready.
func (c *Core) isReady(ev Ready) {
	cl := c.clients[ev.Client]
	if cl == nil || cl.epoch == 0 || cl.epoch != ev.Epoch {
		return
	}
	cl.away = false
	if !cl.moving {
		return
	}
	t := cl.tenant
	c.bill(t)
	c.count(cl, -1)
	c.stopMoving(cl)
	c.count(cl, +1)
	cl.ran, cl.startVT = 0, t.vt
	cl.ready = true
	t.stretch, t.movedLast = c.stretchFor(cl.moved), cl.moved
	c.review(t)
}

// stretchFor is the least turn after moving for so long.
func (c *Core) stretchFor(moved time.Duration) time.Duration {
	if c.swapShare == 0 {
		return 0
	}
	moved = min(moved, maxStretch)
	return min(moved*time.Duration(100-c.swapShare)/time.Duration(c.swapShare), maxStretch)
}

// paysBack says whether a holder has not had as much of its turn yet as moving
// took before it.
func (c *Core) paysBack(cl *client) bool {
	if c.effective != Exclusive || cl.in != &c.open || c.swapShare == 0 {
		return false
	}
	return cl.moving || c.ranAt(cl) < cl.tenant.payBack(cl.moved)
}

// payBack is how long a holder is to work before it hears that somebody waits.
func (t *tenant) payBack(moved time.Duration) time.Duration {
	if t.pauses {
		return min(moved, t.stretch)
	}
	return t.stretch
}

// pausesFrom notes that the tenant gave the GPU back, and pausedUntil that it wants
// it again. If that takes long it has pauses in which others can have the GPU; if it
// gave it back by itself and comes soon, it has not.
func (t *tenant) pausesFrom(now Time, idle bool) {
	if t.movedLast != 0 {
		t.pausedAt, t.idle = now, idle
	}
}

func (t *tenant) pausedUntil(now Time) {
	if t.pausedAt != 0 {
		long := now.Sub(t.pausedAt) >= t.movedLast
		t.pauses = long || t.pauses && !t.idle
		t.pausedAt = 0
	}
}

// movingDeadline is when something is due because of moving.
func (c *Core) movingDeadline() (at Time, ok bool) {
	earliest := func(t Time) {
		if !ok || t < at {
			at, ok = t, true
		}
	}
	if c.waiting > 0 {
		for _, cl := range c.moves {
			earliest(cl.movedAt.Add(c.grace))
		}
	}
	if cl := c.open.head; cl != nil && c.waiting > 0 && !cl.moving && !cl.paused && c.paysBack(cl) {
		earliest(cl.runFrom.Add(cl.tenant.payBack(cl.moved) - cl.ran))
	}
	return at, ok
}

// revokeStalled asks back the grants of those that do not get their memory.
func (c *Core) revokeStalled() {
	for i := 0; i < len(c.moves) && c.waiting > 0; i++ {
		cl := c.moves[i]
		if c.now < cl.movedAt.Add(c.grace) {
			continue
		}
		t := cl.tenant
		c.bill(t)
		t.notBefore = c.now.Add(min(c.now.Sub(cl.movingSince), maxStretch))
		if c.kept == t && t.hold == playing {
			c.stop(t, MoveStalled)
		} else {
			c.revoke(cl, MoveStalled)
		}
		i = -1
	}
}
