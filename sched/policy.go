// SPDX-License-Identifier: Apache-2.0

package sched

// The policy: round robin, first in, first out, with a time quantum. The
// functions here run at the end of each Step, in this order, and leave nothing
// undone that is due.

// fenceOverdue fences what did not drain within its grace period.
func (c *Core) fenceOverdue() {
	if c.holdOff != 0 && c.now >= c.holdOff {
		c.holdOff = 0
	}
	for cl := c.closing.head; cl != nil && c.now >= cl.base.Add(c.grace); cl = c.closing.head {
		c.fence(cl)
	}
}

func (c *Core) fence(cl *client) {
	c.endLive(cl)
	cl.fenced = true
	cl.revoked = true
	c.counters.Fences++
	c.do(Fence{cl.id, cl.epoch})
}

// grantNext grants to those whose turn it is, if the GPU is free for them.
func (c *Core) grantNext() {
	for c.queue.n > 0 && (c.mode == Concurrent || c.free()) {
		c.grant(c.queue.head)
	}
}

// free says whether an exclusive grant may be given.
func (c *Core) free() bool {
	return c.open.n == 0 && c.closing.n == 0 && c.holdOff == 0
}

func (c *Core) grant(cl *client) {
	if c.mode == Exclusive && !c.free() {
		panic("sched: two holders")
	}
	c.queue.remove(cl)
	c.epoch = NextEpoch(c.epoch)
	cl.epoch = c.epoch
	cl.since = c.now
	cl.longestWait = max(cl.longestWait, c.now.Sub(cl.waitingSince))
	cl.grants++
	c.counters.Grants++
	c.open.push(cl)

	g := Grant{Client: cl.id, Epoch: cl.epoch}
	if c.mode == Concurrent {
		g.Concurrent = true
		c.setConcurrent(cl)
	} else {
		g.Quantum = c.quantum
		c.holder = cl
	}
	c.persist(c.record())
	c.notice(cl) // before the gate opens, so that the page is right when it does
	c.do(g)
}

// revokeOverdue asks the holder's grant back if its quantum is over and
// somebody waits.
func (c *Core) revokeOverdue() {
	cl := c.open.head
	if c.mode == Exclusive && cl != nil && c.queue.n > 0 && c.now >= cl.since.Add(c.quantum) {
		c.revoke(cl)
	}
}

func (c *Core) revoke(cl *client) {
	cl.revoked = true
	c.startClosing(cl)
	c.counters.Revokes++
	c.do(Revoke{Client: cl.id, Epoch: cl.epoch, Grace: c.grace, Waiters: c.queue.n})
}

// settle brings what was persisted and what the pages say up to date.
func (c *Core) settle() {
	if r := c.record(); r != c.persisted {
		c.persist(r)
	}
	// With more holders than two, present is above zero for each of them and
	// waiters is zero, before this Step and after it.
	if c.open.n <= 2 {
		for cl := c.open.head; cl != nil; cl = cl.next {
			c.notice(cl)
		}
	}
}

// record returns what a restart would have to know now.
func (c *Core) record() Persist {
	p := Persist{Epoch: c.epoch, Concurrent: c.concurrent > 0 || c.holdOff != 0}
	if c.holder != nil {
		p.Holder = c.holder.id
	}
	return p
}

func (c *Core) persist(p Persist) {
	c.persisted = p
	c.do(p)
}

// notice tells a client how many others there are, if that has changed.
func (c *Core) notice(cl *client) {
	n := Notice{Client: cl.id, Present: c.connected - 1}
	if c.mode == Exclusive {
		n.Waiters = c.queue.n // concurrently, they wait no longer than this Step
	}
	if n != cl.told {
		cl.told = n
		c.do(n)
	}
}
