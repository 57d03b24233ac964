// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
)

// latencyTenants grants at once to tenants that want the GPU briefly, and shuts the gates
// of the others meanwhile. All of them together have half of the time in which others want
// the GPU. Then they wait until they may have it again, or nobody else wants it.
func latencyTenants() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			for _, t := range c.metered {
				if t.share.Priority == Latency && c.holds(t, &c.latency) && c.keptOut {
					e.Either(c.patienceEnds(t))
				}
			}
			for _, t := range c.spent.items {
				e.Either(c.patienceBack(t))
				e.Either(c.pool.wantedAt.Add(shortPause), c.active == 0)
			}
			return e.At, e.OK
		},
		revoke: func(c *GPU) {
			c.lookWhoIsOut()
			c.revokeDemoted()
			c.letBack()
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
	pooled    // the sums
	patience  time.Duration
	filled    int64 // of the own patience of one that is promised nothing, so far, percent of nanoseconds
	countedAt base.Time
	rate      int       // by which patience changes, percent of the time
	wantedAt  base.Time // at that time others still wanted the GPU
}

// pooled is how a tenant counts for what latency tenants may have together.
type pooled struct {
	tenants  int // with priority latency, and clients
	requests int // what these are promised, percent
	promised int // what batch tenants are promised that want the GPU
}

// pools says how the tenant counts, as things are.
func (t *tenant) pools() pooled {
	switch {
	case t.clients > 0 && t.share.Priority == Latency:
		return pooled{tenants: 1, requests: t.share.Request}
	case t.clients > 0 && t.wants():
		return pooled{promised: t.share.Request}
	}
	return pooled{}
}

// countPooled counts a tenant anew.
func (c *GPU) countPooled(t *tenant) {
	now := t.pools()
	if now == t.pooled {
		return
	}
	c.countPatience()
	p := &c.pool
	p.tenants += now.tenants - t.pooled.tenants
	p.requests += now.requests - t.pooled.requests
	p.promised += now.promised - t.pooled.promised
	t.pooled = now
	c.countPatience()
}

// percent is the part of the time that latency tenants may have together: half of what is
// promised to nobody else, or what they are promised.
func (p *latencyPool) percent() int {
	return min(max(account.PatiencePercent*(100-p.promised)/100, p.requests, 1), 100)
}

// each is the part of that which each has, beyond what it is promised.
func (p *latencyPool) each() int { return max(p.percent()-p.requests, 0) / max(p.tenants, 1) }

// filledNow is latencyPool.filled now.
func (c *GPU) filledNow() int64 {
	return c.pool.filled + max(int64(c.now-c.pool.countedAt), 0)*int64(c.pool.each())
}

// wantedByOthers says whether batch tenants have the GPU in turns, or wait for theirs, or
// latency tenants do that whom latency grants keep out.
func (c *GPU) wantedByOthers() bool {
	return c.active > c.activeLatency || c.active > 0 && c.latency.n > 0
}

// unwanted says whether nobody wants the GPU in turns, and not just for a moment: a latency
// tenant that is let in then makes the next one wait for its drain.
func (c *GPU) unwanted() bool { return c.active == 0 && c.now >= c.pool.wantedAt.Add(shortPause) }

// commonPatience returns what is left of the common patience now.
func (c *GPU) commonPatience() time.Duration {
	p := &c.pool
	dt := max(c.now.Sub(p.countedAt), 0)
	return min(max(p.patience+dt*time.Duration(p.rate)/100, -account.PatienceOwed), account.PatienceMax)
}

// countPatience brings the common patience up to now, and notes how it changes from now on.
// While latency tenants have the GPU and nobody waits for it, it stays as it is.
func (c *GPU) countPatience() {
	p := &c.pool
	p.patience, p.filled, p.countedAt = c.commonPatience(), c.filledNow(), c.now
	p.rate = p.percent()
	switch {
	case c.keptOut:
		p.rate -= 100
	case c.effective == Exclusive && c.latencyRuns() && c.spent.top() == nil:
		p.rate = 0
	}
}

// patienceEnds returns when a tenant that keeps others out is out of patience; false if
// never.
func (c *GPU) patienceEnds(t *tenant) (base.Time, bool) {
	own, ends := t.PatienceEnds(c.now, t.share.Request+c.pool.each())
	rate := time.Duration(-c.pool.rate)
	if !ends || rate <= 0 {
		return 0, false
	}
	return max(own, c.now.Add((max(c.commonPatience(), 0)*100+rate-1)/rate)), true
}

// patienceBack returns when a tenant that is out of patience has enough of it again; false
// if never, as things are.
func (c *GPU) patienceBack(t *tenant) (base.Time, bool) {
	var e base.Earliest
	full := func(from base.Time, left time.Duration, percent int) {
		rate := time.Duration(percent)
		if rate > 0 {
			e.Either(from.Add(((account.PatienceMax/2-left)*100+rate-1)/rate), true)
		}
	}
	full(c.now, c.commonPatience(), c.pool.rate)
	if t.open+t.closing == 0 {
		full(c.now, t.Patience(), t.share.Request+c.pool.each())
	}
	return e.At, e.OK
}

// latencyRuns says whether a latency tenant has the GPU, and more than short time slices
// of it.
func (c *GPU) latencyRuns() bool {
	h := c.open.head
	return c.latency.n > 0 || c.closing.n > c.closingBatch || h != nil && h.tenant.share.Priority == Latency && !h.grant.move.on
}

// lookWhoIsOut notes whether latency tenants have the GPU while others want it. That uses up
// their patience.
func (c *GPU) lookWhoIsOut() {
	if c.active > 0 {
		c.pool.wantedAt = c.now
	}
	kept := c.effective == Exclusive && c.wantedByOthers() && c.latencyRuns()
	if kept != c.keptOut {
		for _, l := range []*list{&c.latency, &c.closing, &c.open} {
			for cl := l.head; cl != nil; cl = cl.next {
				c.bill(cl.tenant)
			}
		}
		c.keptOut = kept
	}
	c.countPatience()
}

// revokeDemoted asks back the latency grants of tenants without patience.
func (c *GPU) revokeDemoted() {
	for i := 0; i < len(c.metered) && c.keptOut; i++ {
		t := c.metered[i]
		c.bill(t)
		if t.Demoted() && c.holds(t, &c.latency) {
			c.revokeTenant(t, &c.latency, PriorityUsedUp)
			c.standAll(t)
			i = -1 // the list has changed
		}
	}
}

// letBack ends the wait of tenants that have patience again, or whom nobody keeps out.
func (c *GPU) letBack() {
	for i := 0; i < len(c.spent.items); i++ {
		t := c.spent.items[i]
		c.bill(t)
		if !t.Demoted() || c.unwanted() {
			c.review(t)
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
		t.share.Priority == Latency && !t.Demoted() && !t.Capped() && !cl.away
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
