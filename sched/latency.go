// SPDX-License-Identifier: Apache-2.0

package sched

// latencyTenants grants at once to tenants that want the GPU briefly, and shuts the gates
// of the others meanwhile. A tenant that keeps others out for too long takes turns.
func latencyTenants() policy {
	return policy{
		due: func(c *GPU) (Time, bool) {
			var e earliest
			for _, t := range c.metered {
				if t.share.Priority == Latency && c.keptOut {
					e.either(c.usedUp(t, t.patience, max(patiencePercent, t.share.Request), 100))
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
				c.grant(t.queue.head)
			}
		},
	}
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
	come := c.latency.n > 0 || c.urgent.top() != nil && c.holdOff == 0
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
