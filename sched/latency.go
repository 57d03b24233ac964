// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// latencyTenants grants at once to tenants that want the GPU briefly, and shuts the gates
// of the others meanwhile. All of them together have half of the time in which others want
// the GPU. Then they wait until they may have it again, or nobody else wants it.
func latencyTenants() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			for cl := c.latency.head; cl != nil && c.keptOut; cl = cl.next {
				if cl.tenant.open > 0 {
					e.Either(c.patienceEnds(cl.tenant))
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
	wantedAt  base.Time // if nobody wants the GPU in turns, since when; else an earlier time
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

// nobodyFor returns when tenants need not stay away any more for the sake of others: when nobody has wanted the GPU for
// a grace period. A pause of theirs is no reason. false: nobody stays away, or there are others.
func (c *GPU) nobodyFor() (base.Time, bool) {
	return c.pool.wantedAt.Add(c.grace), len(c.putOff) > 0 && c.active == 0
}

// lookWhoIsOut notes whether latency tenants have the GPU while others want it. That uses up
// their patience.
func (c *GPU) lookWhoIsOut() {
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
	if !c.keptOut {
		return
	}
	c.looked += 2 * uint64(c.latency.n) // here, and for the deadline
	var out []*tenant
	for cl := c.latency.head; cl != nil; cl = cl.next {
		if c.bill(cl.tenant); cl.tenant.Demoted() {
			out = append(out, cl.tenant)
		}
	}
	c.revokeAll(out, PriorityUsedUp, &c.latency)
}

// letBack ends the wait of tenants that have patience again, or whom nobody keeps out.
func (c *GPU) letBack() {
	c.looked += 2 * uint64(len(c.spent.items))
	for _, t := range slices.Clone(c.spent.items) {
		c.bill(t)
		if !t.Demoted() || c.unwanted() {
			c.review(t)
		}
	}
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

// tenantsBeside lets latency tenants run beside the holder, whose gate stays open, where the time
// slices of all others can be set: these are so short (LatencySlice) that a latency tenant's kernels
// run at once. Its grant stays, so that no message is on the way of a request.
//
// Where shims say that latency tenants use more than they may have together, the rest is taken from
// their patience, and they have latency grants, which are billed exactly, for a time that doubles; or
// by time slices, slices of a smaller part.
func tenantsBeside() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) { return c.besides.from, c.besides.blocked },
		revoke: func(c *GPU) {
			c.lookBeside()
			c.endBeside()
		},
	}
}

const (
	besideWindow = time.Second // of looking at what latency tenants use
	// They have no beside grants after one in which that was too much, for a time that
	// doubles, and is as at first after so long without.
	besidePause, maxBesidePause = 5 * time.Second, 2 * time.Minute
	besideForgets               = 5 * time.Minute
)

// besides is what a GPU knows of latency tenants beside others.
type besides struct {
	short    bool      // the time slices of all others can be set
	lookedAt base.Time // when that was found

	since   base.Time // start of the window
	use     int       // permille of the GPU that tenants with beside grants used in the latest one
	blocked bool      // they used too much
	from    base.Time // until then
	pause   time.Duration
	part    int // permille of the GPU that is theirs by time slices meanwhile
}

// lookBeside looks whether the time slices of all others can be set.
func (c *GPU) lookBeside() {
	b := &c.besides
	if b.blocked && c.now >= b.from {
		c.block(false)
		b.since = c.now
		for _, t := range c.tenants {
			t.looks, t.hot = 0, 0
		}
	}
	if !c.slices.ever || !c.slices.stale && c.now.Sub(b.lookedAt) < besideWindow {
		return
	}
	b.lookedAt, b.short = c.now, true
	for _, cl := range c.inOrder() {
		proving := cl.controls.Client == 0 && c.now.Sub(cl.wantedAt) < proofPatience
		if cl.shares() && cl.tenant.share.Priority != Latency && !proving && c.notSliceable(cl).Why != reasonNone {
			b.short = false
			return
		}
	}
}

// block has latency tenants run beside others no more, or again. By time slices those of all change
// with it, so what was measured so far is no measure of what comes.
func (c *GPU) block(blocked bool) {
	c.besides.blocked, c.slices.stale = blocked, true
	if !c.sliced() {
		return
	}
	for _, cl := range c.inOrder() {
		cl.progress.StartWindow()
	}
	c.auto.startWindow(c.now)
}

// besideAllowed says whether latency tenants may run beside the holder. Memory that does
// not fit must be free to move, which it is not under a grant that stays.
func (c *GPU) besideAllowed() bool {
	return c.besides.short && !c.besides.blocked && c.mode == Auto && c.effective == Exclusive && !c.mem.Overfull()
}

// mayBeBeside says whether the clients of a tenant get beside grants. A limit is held
// exactly, by grants that end when they are not used.
func (c *GPU) mayBeBeside(t *tenant) bool {
	return c.besideAllowed() && t.share.Priority == Latency && !t.Demoted() && !t.limited() && t.slot == nil
}

// endBeside asks back the beside grants of tenants that may not have them any more.
func (c *GPU) endBeside() {
	for cl := c.beside.head; cl != nil; {
		next := cl.next
		c.bill(cl.tenant) // its patience may end
		switch {
		case c.mayBeBeside(cl.tenant):
		case cl.tenant.Demoted():
			c.revoke(cl.grant, PriorityUsedUp)
		default:
			c.revoke(cl.grant, ModeChange)
		}
		cl = next
	}
	if c.beside.n == 0 {
		c.setBesideUse(0)
	}
}

// setBesideUse changes what holders are billed beside latency tenants.
func (c *GPU) setBesideUse(permille int) {
	if c.besides.use == permille {
		return
	}
	for _, t := range c.tenants {
		c.bill(t) // as before, so far
	}
	c.besides.use = permille
}

// noteUseBeside takes note of how often the GPU had work of a latency tenant.
func (c *GPU) noteUseBeside(t *tenant, ev timeslice.Utilization) {
	b := &c.besides
	t.looks += ev.Samples
	t.hot += ev.Busy
	window := c.now.Sub(b.since)
	if window < besideWindow {
		return
	}
	b.since = c.now
	all, use := 0, 0
	for _, t := range c.tenants {
		if t.share.Priority != Latency {
			continue
		}
		permille := 1000 * t.hot / max(t.looks, 1)
		t.looks, t.hot = 0, 0
		all += permille
		if t.beside > 0 {
			c.bill(t)
			t.gets = permille
			use += permille
		}
	}
	c.setBesideUse(min(use, 1000))
	most, long := 10*c.pool.percent(), window > 2*besideWindow // which tells of its end only
	if !long && c.wantedByOthers() {
		c.chargeBeside(window)
	}
	switch {
	case long || all <= most:
		if c.now.Sub(b.from) > besideForgets {
			b.pause = 0
		}
	case !b.blocked && (c.beside.n > 0 || c.sliced()):
		b.pause = min(max(2*b.pause, besidePause), maxBesidePause)
		c.block(true)
		b.from = c.now.Add(b.pause)
		b.part = max(most-int(window*time.Duration(min(all, 1000)-most)/b.pause), most/2)
	}
}

// chargeBeside takes from the patience of latency tenants what they used beside others.
func (c *GPU) chargeBeside(window time.Duration) {
	c.countPatience()
	p := &c.pool
	p.patience = max(p.patience-window*time.Duration(c.besides.use)/1000, -account.PatienceOwed)
	for cl := c.beside.head; cl != nil; cl = cl.next {
		if t := cl.tenant; t.beside > 0 {
			t.SpendPatience(window*time.Duration(t.gets)/time.Duration(1000*t.beside), p.patience)
		}
	}
	for cl := c.latency.head; cl != nil; cl = cl.next { // what is common is gone for those with latency grants, too
		cl.tenant.JudgePatience(p.patience)
	}
}

// lessLatency is by what latency tenants' parts are multiplied where tenants share the GPU
// by slices, so that latency tenants have no more together than they may.
func (c *GPU) lessLatency() float64 {
	var latency, others int64
	for _, t := range c.tenantsInOrder() {
		if t.processes == 0 || c.cohort.on && t.apart {
			continue
		}
		if t.share.Priority == Latency {
			latency += c.part(t)
		} else {
			others += c.part(t)
		}
	}
	most := float64(c.besides.part) / 1000
	if latency == 0 || others == 0 || float64(latency)*(1-most) <= float64(others)*most {
		return 1
	}
	return float64(others) * most / (1 - most) / float64(latency)
}

// crowded says whether several others want the GPU beside a latency tenant. At the same
// time with slices as short as theirs they would hinder each other.
func (c *GPU) crowded() bool {
	batch, latency := 0, false
	if c.pool.tenants == 0 {
		return false
	}
	for _, cl := range c.inOrder() {
		switch {
		case !cl.connected:
		case cl.tenant.share.Priority == Latency:
			latency = true
		case cl.wanted:
			batch++
		}
	}
	return latency && batch > 1
}
