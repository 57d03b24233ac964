// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// maxLate is how late a Step may be, after its Deadline, for the time before it
// to count.
const maxLate = 100 * time.Millisecond

// fencedLook is the time between two Steps, at most, while a grant is fenced.
// Nothing is due then, but its tenant pays, and is not to pay for the time that
// the scheduler was stopped.
const fencedLook = time.Second

// standStill has the time since the latest Step not count, if nobody was there
// when something was due: the machine was suspended, or the scheduler stopped.
// Else holders would owe hours to the others, and those that drained would be
// fenced although they had no time for it.
func (c *Core) standStill(now Time) {
	at, ok := c.Deadline()
	if !ok || now.Sub(at) <= maxLate {
		return
	}
	d := now.Sub(c.now)
	for _, l := range [...]*list{&c.open, &c.latency, &c.closing} {
		for cl := l.head; cl != nil; cl = cl.next {
			cl.since, cl.revokedAt = cl.since.Add(d), cl.revokedAt.Add(d)
			cl.runFrom = cl.runFrom.Add(d)
			cl.base = cl.base.Add(d)
		}
	}
	for _, cl := range c.moves {
		cl.movingSince, cl.movedAt = cl.movingSince.Add(d), cl.movedAt.Add(d)
	}
	for _, t := range c.tenants {
		if t.notBefore != 0 {
			t.notBefore = t.notBefore.Add(d)
		}
		if t.open+t.closing+t.fenced > 0 {
			t.billedAt = t.billedAt.Add(d)
		}
		if t.place == throttled {
			c.throttled.fix(t)
		}
	}
	for _, cl := range c.pausing {
		cl.idleSince = cl.idleSince.Add(d)
	}
	c.owedUntil, c.sparedUntil = c.owedUntil.Add(d), c.sparedUntil.Add(d)
	if c.holdOff != 0 {
		c.holdOff = c.holdOff.Add(d)
	}
	c.claimsUntil = c.claimsUntil.Add(d)
	c.auto.since = c.auto.since.Add(d)
	if c.auto.until != 0 {
		c.auto.until = c.auto.until.Add(d)
	}
}
