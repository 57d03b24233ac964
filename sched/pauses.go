// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

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
		pause := c.now.Sub(cl.idleSince)
		cl.pauses.Note(pause)
		cl.progress.HadPause(pause)
		c.addUp(cl)
		c.forgetPause(cl)
		if pause > longIdle {
			cl.tenant.restedAt = c.now
		}
	}
	if cl.away {
		c.owedUntil = min(c.owedUntil, max(c.leastUntil, c.now.Add(c.bears(cl.tenant))))
	}
}

func (c *GPU) forgetPause(cl *client) {
	if cl.pausing {
		cl.pausing = false
		c.pausing = slices.DeleteFunc(c.pausing, func(o *client) bool { return o == cl })
	}
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
