// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// latencyTenants grants at once to tenants that want the GPU briefly, and shuts the gates
// of the others meanwhile. A tenant that keeps others out for too long takes turns.
func latencyTenants() policy {
	return policy{
		due: func(c *GPU) (Time, bool) {
			var e earliest
			for _, t := range c.metered {
				if t.share.Priority == Latency && t.open > 0 && c.keptOut {
					e.either(c.patienceEnds(t))
				}
			}
			return e.at, e.ok
		},
		revoke: func(c *GPU) {
			c.lookWhoIsOut()
			c.revokeDemoted()
		},
		grant: func(c *GPU) {
			c.pauseOrResume()
			for t := c.urgent.top(); t != nil && c.holdOff == 0; t = c.urgent.top() {
				c.pauseOrResume() // the tenant may have become urgent just now
				c.grant(c.nearest(t))
			}
		},
	}
}

// latencyPool is what the latency tenants of a GPU have of patience in common.
type latencyPool struct {
	tenants   int // with clients
	requests  int // the sum of what they are promised, percent
	patience  time.Duration
	countedAt Time
}

// percent is the part of the time for which latency tenants may keep others out together.
func (p *latencyPool) percent() int { return min(max(patiencePercent, p.requests), 100) }

// partOf returns the part of that which is a tenant's own.
func (p *latencyPool) partOf(s Share) int {
	return max(p.percent()/max(p.tenants, 1), s.Request)
}

// commonPatience returns what is left of the common patience now.
func (c *GPU) commonPatience() time.Duration {
	p := &c.pool
	dt := max(c.now.Sub(p.countedAt), 0)
	left := p.patience + dt*time.Duration(p.percent())/100
	if c.keptOut {
		left -= dt
	}
	return min(max(left, -patienceMax), patienceMax) // what tenants used of their own is owed first
}

// countPatience brings the common patience up to now. It comes before any change of what
// it is counted by.
func (c *GPU) countPatience() {
	c.pool.patience, c.pool.countedAt = c.commonPatience(), c.now
}

// patienceEnds returns when a tenant that keeps others out is out of patience; false if
// never.
func (c *GPU) patienceEnds(t *tenant) (Time, bool) {
	own, ends := c.usedUp(t, t.patience, c.pool.partOf(t.share), 1000)
	rate := time.Duration(100 - c.pool.percent())
	if !ends || rate == 0 {
		return 0, false
	}
	return max(own, c.now.Add((max(c.commonPatience(), 0)*100+rate-1)/rate)), true
}

// lookWhoIsOut notes whether latency tenants keep others from the GPU. That uses up their
// patience.
func (c *GPU) lookWhoIsOut() {
	kept := c.latency.n > 0 && c.effective == Exclusive && (c.open.n > 0 || c.upNext() != nil || c.kept != nil)
	if kept == c.keptOut {
		return
	}
	for cl := c.latency.head; cl != nil; cl = cl.next {
		c.bill(cl.tenant)
	}
	c.countPatience()
	c.keptOut = kept
}

// revokeDemoted asks back the latency grants of tenants without patience.
func (c *GPU) revokeDemoted() {
	for i := 0; i < len(c.metered) && c.keptOut; i++ {
		t := c.metered[i]
		c.bill(t)
		if t.demoted && c.holds(t, &c.latency) {
			c.revokeTenant(t, &c.latency, PriorityUsedUp)
			c.standAll(t)
			i = -1 // the list has changed
		}
	}
}

func (c *GPU) holds(t *tenant, l *list) bool {
	for cl := l.head; cl != nil; cl = cl.next {
		if cl.tenant == t {
			return true
		}
	}
	return false
}

// pauseOrResume shuts the holder's gate while latency tenants are on the GPU or about to
// come, and opens the gate when they have gone.
func (c *GPU) pauseOrResume() {
	cl := c.open.head
	if cl == nil || c.effective != Exclusive {
		return
	}
	comes := c.urgent.top()
	come := c.latency.n > 0 || comes != nil && c.holdOff == 0 && !c.mayBeBeside(comes)
	for ; cl != nil; cl = cl.next { // several only if they are of a gang
		switch {
		case come && cl.grant.state == granted:
			c.become(cl.grant, paused)
			cl.grant.alone = false
			c.do(Pause{cl.id})
		case !come && cl.grant.state == paused:
			c.resume(cl.grant)
		}
	}
}

func (c *GPU) resume(g *grant) {
	c.become(g, granted)
	c.do(Resume{g.client.id, g.epoch})
}

// stand tells a client whether it may go ahead, if that has changed.
func (c *GPU) stand(cl *client) {
	t := cl.tenant
	on := cl.connected && cl.grant == nil && cl.in == nil && c.effective == Exclusive && c.holdOff == 0 &&
		t.share.Priority == Latency && !t.demoted && !t.capped && !cl.away
	if on != cl.standing && cl.connected && cl.grant == nil {
		cl.standing = on
		c.do(Stand{cl.id, on})
	}
}

func (c *GPU) standAll(t *tenant) {
	for _, cl := range c.inOrder() {
		if cl.tenant == t {
			c.stand(cl)
		}
	}
}
