// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// Pauses. A client that has nothing to do gives the GPU back if somebody waits. All
// that wait may have to move memory first, while the clients whose memory is on the GPU
// have not worked for long enough for that (moving.go). Then the core bets. If the
// client comes back at once, moving was in vain; if it does not, waiting was. The
// client's latest pauses decide: the GPU is kept free for the time that would have been
// best for those pauses, from nothing up to what moving costs. So others work while a
// client pauses for longer than moving takes, and a client that pauses briefly keeps
// its place. Nobody has to know the programs.

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

// beginPause notes that a client gave the GPU back, and endPause that the client wants it
// again.
func (c *GPU) beginPause(cl *client, idle bool) {
	c.forgetPause(cl)
	cl.idleSince = c.now
	if idle && c.effective == Exclusive {
		cl.pausing = true
		c.pausing = append(c.pausing, cl)
	}
}

func (c *GPU) endPause(cl *client) {
	if cl.pausing {
		cl.pauses.Note(c.now.Sub(cl.idleSince))
		cl.progress.HadPause(c.now.Sub(cl.idleSince))
		c.addUp(cl)
		c.forgetPause(cl)
	}
}

func (c *GPU) forgetPause(cl *client) {
	if cl.pausing {
		cl.pausing = false
		c.pausing = slices.DeleteFunc(c.pausing, func(o *client) bool { return o == cl })
	}
}

// PatientIdle is how long a client with Notice.Patient is idle before it gives the GPU
// back.
const PatientIdle = 20 * time.Millisecond

// patient says whether a holder is to keep the GPU over short pauses: all that wait have
// to move first, and must not yet, and most of the holder's pauses are short. To give the
// GPU back and get it again costs some 0.2 ms each time. Beside a cohort a holder with a
// limit may be as well, see staysInTurn.
func (c *GPU) patient(cl *client) bool {
	if c.cohort.on && cl.in == &c.open && cl.tenant.limited() && cl.tenant.apart {
		return cl.staysInTurn()
	}
	if cl.in != &c.open || c.effective != Exclusive || c.now >= c.owedUntil ||
		c.ready.top() != nil || c.urgent.top() != nil || c.latency.n > 0 || cl.tenant.limited() {
		return false
	}
	return cl.pauses.Below(PatientIdle) > timeslice.PausesKept/2
}

// longIdle is the least idle time of a client that is not expected back soon.
const longIdle = time.Second

// sleeps says whether a client has been idle for longer than its pauses are.
func (c *GPU) sleeps(cl *client) bool {
	if cl.in != nil || cl.grant != nil {
		return false
	}
	return c.now.Sub(cl.idleSince) > 2*cl.pauses.Longest(longIdle/2)
}

// later says whether a client is expected to use the GPU later than another one, as
// things are: its memory is the first to make room. Those that have been idle for the
// longest time come last, and before them those that are next by their virtual time;
// who is let in at once comes first.
func (c *GPU) later(a, b base.ClientID) bool {
	x, y := c.clients[a], c.clients[b]
	if p, q := c.lateness(x), c.lateness(y); p != q {
		return p > q
	}
	switch {
	case x == nil:
		return a > b
	case c.sleeps(x) && x.idleSince != y.idleSince:
		return x.idleSince < y.idleSince
	case x.tenant.VT() != y.tenant.VT():
		return x.tenant.VT() > y.tenant.VT()
	case (x.in == nil) != (y.in == nil):
		return x.in == nil
	case x.seq != y.seq:
		return x.seq > y.seq
	}
	return a > b
}

func (c *GPU) lateness(cl *client) int {
	switch {
	case cl == nil:
		return 3
	case cl.tenant.share.Priority == Latency:
		return 0
	case c.sleeps(cl):
		return 2
	}
	return 1
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
