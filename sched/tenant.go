// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
)

// place is where a waiting tenant stands.
type place uint8

const (
	nowhere   place = iota // it does not wait
	ready                  // it waits for its turn
	deferred               // it waits for its turn, and then has memory to move first
	urgent                 // it is to be let in at once
	spent                  // it waits until it may be, as latency tenants have had their part
	throttled              // it waits until its limit allows a grant
	parked                 // it waits for its gang
)

// queues holds the tenants with waiting clients.
type queues struct {
	ready, deferred, urgent, spent, throttled tenantHeap
	seq                                       uint64 // of the latest request
}

func newQueues() queues {
	return queues{
		ready: tenantHeap{less: behind}, deferred: tenantHeap{less: behind},
		urgent: tenantHeap{less: before}, spent: tenantHeap{less: before}, throttled: tenantHeap{less: backFirst},
	}
}

// tenant is the clients whose time is counted together.
type tenant struct {
	key     tenantKey
	share   Share // clamped
	clients int   // with and without connections
	queue   list  // its clients that wait for a grant

	place place
	pos   int // in that place's heap

	account.Account
	open      int // grants that run: gate open, not paused
	closing   int // grants that drain or are lost
	fenced    int
	beside    int       // beside grants whose gate is open
	batch     int       // live grants that are turns
	active    bool      // it counts among those that want the GPU
	restsFrom base.Time // it was active until then
	summed    sums      // in roster.sums

	gets        int           // permille of the GPU, while clients share it by time slices, or under beside grants
	looks, hot  int           // of a latency tenant: how often it was looked whether the GPU had work of it, and had
	sliceFactor float64       // by which its slices are shortened; 0: 1
	processes   int           // its clients that share the GPU, see tally
	gained      float64       // of the GPU in the latest window of slices, see measure
	fed         fed           // see feds
	notBefore   base.Time     // no grant before; see moving.go
	limitFrom   base.Time     // its limit ends no grant before
	moved       time.Duration // moving memory, which is not in used
	slow        time.Duration // that its latest drain took too long, see noteDrain
	slowAt      base.Time     // when that ended
	stretch     time.Duration // its slices are at least that long, because of what moving took
	restedAt    base.Time     // its latest long pause ended; 0: it had none; see pauses.go
	grants      uint64
	longestWait time.Duration
	recentWait  account.Peak
	waits       *account.Lately // for grants; nil: it had none

	// If the tenant is a gang; else the slot is nil.
	core    *GPU
	slot    *gang.Slot
	members []*client // its clients

	metered    int    // index in roster.metered, -1: none
	pooled     pooled // as counted in GPU.pool
	filled     int64  // latencyPool.filled when the tenant was last billed
	remembered bool

	apart   bool      // it never has its turn together with others, see cohort.go
	closeTo base.Time // it is apart until then, see apartFor
	use     int       // permille of the time of its open gate that its limit is charged, in a cohort; 0: all of it
	other   bool      // it does something else than in its turns, as of the latest report
}

func clampShare(s Share) Share {
	s.Limit = base.Clamp(s.Limit, 0, 100)
	s.Request = base.Clamp(s.Request, 0, 100)
	if s.Weight <= 0 {
		s.Weight = DefaultWeight
	}
	s.Weight = min(s.Weight, MaxWeight)
	s.Priority = min(s.Priority, Latency)
	if s.Group() != "" {
		s.Priority = Batch // a rank that waits for others is not let in alone
	}
	return s
}

// limited says whether the share has a limit that means anything.
func (s Share) limited() bool { return s.Limit > 0 && s.Limit < 100 }

func (t *tenant) limited() bool { return t.share.limited() }

// slice is what a tenant with a limit gets at once if nobody else wants it.
func (t *tenant) slice() time.Duration {
	return account.Slice(t.share.Limit, t.stretch)
}

// tenantKind says what the clients of a tenant have in common.
type tenantKind uint8

const (
	alone     tenantKind = iota // it is one client that named no tenant
	gangOf                      // a gang
	overlapOf                   // an overlap group
	named                       // the tenant that they named
)

// tenantKey names a tenant of a GPU.
type tenantKey struct {
	kind   tenantKind
	name   string        // of the gang, of the overlap group, or as named
	client base.ClientID // that is alone
}

// keyOf returns the key of a client's tenant.
func keyOf(name string, id base.ClientID, share Share) tenantKey {
	switch {
	case share.Gang != "":
		return tenantKey{kind: gangOf, name: share.Gang}
	case share.Overlap != "":
		return tenantKey{kind: overlapOf, name: share.Overlap}
	case name == "":
		return tenantKey{kind: alone, client: id}
	}
	return tenantKey{kind: named, name: name}
}

func (k tenantKey) compare(o tenantKey) int {
	return cmp.Or(cmp.Compare(k.kind, o.kind), cmp.Compare(k.name, o.name), cmp.Compare(k.client, o.client))
}

func (t *tenant) displayName() string {
	if t.key.kind == alone {
		return "client " + strconv.FormatUint(uint64(t.key.client), 10)
	}
	return t.key.name
}

// isGang says whether the tenant's clients are granted together. An overlap group is a gang
// with clients on one GPU, which do not depend on each other.
func (t *tenant) isGang() bool { return t.key.kind == gangOf || t.overlaps() }

func (t *tenant) overlaps() bool { return t.key.kind == overlapOf }

// tenantOf returns a client's tenant, and makes it if there is none.
func (c *GPU) tenantOf(name string, id base.ClientID, share Share) *tenant {
	key := keyOf(name, id, share)
	t := c.tenants[key]
	if t == nil {
		t = &tenant{key: key, share: clampShare(share), filled: c.filledNow(), metered: -1, core: c}
		t.apart = t.share.exclusive() || t.limited()
		t.Account = account.New(c.now, c.virtualNow(), t.slice())
		c.enroll(t)
	}
	return t
}

// join makes a client one of a tenant's clients, with its grant or its request.
func (c *GPU) join(cl *client, t *tenant) {
	if cl.tenant == t {
		return
	}
	old := cl.tenant
	waits := old != nil && cl.in == &old.queue
	if waits {
		old.queue.remove(cl)
		if c.next == cl {
			c.next = nil
		}
	}
	if old != nil {
		c.tellAll = true // what holders are told depends on their tenants' limits and gangs
		c.bill(old)
		c.count(cl.grant, -1)
		c.quit(cl)
	}
	c.bill(t)
	cl.tenant, cl.limitedThen = t, t.LimitedFor()
	c.slices.stale = true
	c.addUp(cl)
	t.clients++
	t.remembered = false
	if t.isGang() {
		t.members = append(t.members, cl)
		if t.slot == nil {
			c.takeSlot(t)
		}
	}
	c.count(cl.grant, +1)
	if waits {
		c.seq++
		cl.seq = c.seq
		t.queue.push(cl)
	}
	if old != nil {
		c.review(old)
		c.abandon(old)
	}
	c.review(t)
}

// leave takes a client from its tenant for good.
func (c *GPU) leave(cl *client) {
	c.quit(cl)
	c.review(cl.tenant)
	c.abandon(cl.tenant)
}

// quit counts a client out of its tenant. Where it alone brought the share of a gang or an overlap
// group, that has the share of a client that stays.
func (c *GPU) quit(cl *client) {
	t := cl.tenant
	t.clients--
	t.members = slices.DeleteFunc(t.members, func(o *client) bool { return o == cl })
	if slices.ContainsFunc(t.members, func(o *client) bool { return o.share == t.share }) {
		return
	}
	for _, o := range slices.Backward(t.members) {
		if o.share.Weight != 0 {
			c.setShare(t, o.share)
			return
		}
	}
}

// abandon forgets a tenant that has no clients, at once or later.
func (c *GPU) abandon(t *tenant) {
	if t.clients > 0 {
		return
	}
	if t.slot != nil {
		c.leaveSlot(t)
		c.review(t)
	}
	if t.key.kind == alone {
		c.dropTenant(t)
	} else if !t.remembered {
		// As a new tenant it would lose its debt, or its lead over the others.
		t.remembered = true
		c.remembered = append(c.remembered, t)
	}
}

// maxRemembered is how many tenants without clients are remembered.
const maxRemembered = 1024

// forgetTenants forgets tenants whose clients are gone and that owe nothing.
func (c *GPU) forgetTenants() {
	for len(c.remembered) > 0 {
		t := c.remembered[0]
		if t.remembered && len(c.remembered) <= maxRemembered {
			c.bill(t)
			if t.VT() > c.vtime || t.limited() && t.Credit() < t.slice() {
				if len(c.remembered) > 1 {
					c.remembered = append(c.remembered[1:], t)
				}
				return
			}
		}
		c.remembered = c.remembered[1:]
		if t.remembered {
			t.remembered = false
			c.dropTenant(t)
		}
	}
}

// bill charges a tenant for the time since it was last billed.
func (c *GPU) bill(t *tenant) {
	if c.now <= t.BilledAt() {
		return
	}
	vt := t.VT()
	t.Bill(c.now, c.ratesOf(t))
	t.filled = c.filledNow()
	if t.VT() != vt && c.inCohort(t) {
		c.cohort.vt = max(c.cohort.vt, t.VT())
	}
	if t.VT() != vt && t.takesTurn() {
		c.heap(t.place).fix(t)
	}
	if t.place == throttled {
		c.throttled.fix(t) // its other grants have cost it time
	}
}

// ratesOf returns at which rates a tenant is billed as things are.
func (c *GPU) ratesOf(t *tenant) account.Rates {
	r := c.limitRatesOf(t)
	if t.share.Priority == Latency {
		if has := t.open+t.closing > 0 && c.effective == Exclusive; !has || c.keptOut {
			r.Patience = time.Duration(c.filledNow()-t.filled+int64(c.now-t.BilledAt())*int64(t.share.Request)) / 100
			r.KeepsOut = has
		}
		r.Common = c.commonPatience()
	}
	if t.batch > 0 && t.open+t.closing > 0 {
		r.Part = c.turnPart(t)
	}
	return r
}

// limitRatesOf returns what of that says how its limit is charged.
func (c *GPU) limitRatesOf(t *tenant) account.Rates {
	r := account.Rates{
		Open: t.open, Closing: t.closing, Fenced: t.fenced,
		Latency: t.share.Priority == Latency, Slice: t.slice(), Waits: t.queue.n > 0 || t.batch > t.open+t.closing, Tuning: c.tuning,
		Gets: 1000, Own: 1000,
	}
	if t.limited() {
		r.Limit = t.share.Limit
	}
	switch {
	case c.sliced():
		r.Open, r.Gets = min(t.open, 1), t.gets
	case t.beside > 0 && t.open == 0:
		r.Open, r.Gets = 1, t.gets
	case t.batch > 0:
		r.Gets = 1000 - c.besides.use
	}
	if h := c.open.head; c.inCohort(t) && (h == nil || h.tenant != t || h.grant.shared) { // else its turn is from before the cohort
		r.Open, r.Own, r.Use = min(t.open, 1), t.gets, t.use
		r.Closing = min(t.closing, 1-r.Open)
	}
	if t.overlaps() { // its clients have the GPU once, all together
		r.Open, r.Fenced = min(t.open, 1), min(t.fenced, 1)
		r.Closing = min(t.closing, 1-r.Open)
	}
	return r
}

// setActive says whether a tenant counts among those that want the GPU.
func (c *GPU) setActive(t *tenant, active bool) {
	if t.active == active {
		return
	}
	if active {
		least := c.virtualNow() - int64(c.quantum)*int64(c.active+1)
		own := least
		if t.byGang() || c.now.Sub(t.restsFrom) < c.quantum { // it was gone for a moment, and loses nothing
			own = c.gangTime() - int64(c.quantum)*int64(c.active+1)
		}
		t.SetVT(max(t.VT(), own))
		c.cohort.vt = max(c.cohort.vt, least)
	} else {
		c.bill(t) // while it still counts
		c.pool.wantedAt, t.restsFrom = c.now, c.now
	}
	t.active, c.dueCache.stale = active, true
	c.sumUp(t)
	if c.active == 0 {
		c.vtime, c.gangVT = max(c.vtime, t.VT()), max(c.gangVT, t.VT()) // or the next tenant would be ahead by all the time that this one had alone
	}
}

// review puts a tenant in its place after anything about it has changed.
func (c *GPU) review(t *tenant) {
	c.bill(t)
	to := c.placeOf(t)
	c.setActive(t, to == ready || to == deferred || to == parked || t.batch > 0 || t.open > 0 && c.effective == Concurrent)
	c.keepUp(t)
	c.put(t, to)
	c.meter(t)
	c.sumUp(t)
	c.countPooled(t)
}

// placeOf returns where a tenant is to wait.
func (c *GPU) placeOf(t *tenant) place {
	switch {
	case t.queue.n == 0 && !t.proxy():
		return nowhere
	case t.byGang() && t.slot.Parked():
		return parked
	case t.Capped() && !c.finishes(t), t.notBefore > c.now:
		return throttled
	case t.Demoted() && c.effective == Exclusive && !c.unwanted():
		return spent
	case c.effective != Exclusive:
		return ready
	case c.allAway(t):
		return deferred
	case t.share.Priority == Latency:
		return urgent
	}
	return ready
}

// put moves a tenant to a place, or anew to its place in the order of that.
func (c *GPU) put(t *tenant, to place) {
	c.dueCache.stale = c.dueCache.stale || (t.place == throttled) != (to == throttled)
	if t.inHeap() && t.place == to {
		c.heap(to).fix(t)
		return
	}
	if t.inHeap() {
		c.heap(t.place).remove(t)
	}
	if t.place = to; t.inHeap() {
		c.heap(to).push(t)
	}
}

// proxy says whether the tenant wants its turn because members of its gang on other
// GPUs do.
func (t *tenant) proxy() bool {
	return t.slot != nil && t.slot.Wants()
}

func (t *tenant) inHeap() bool { return t.place != nowhere && t.place != parked }

func (q *queues) heap(p place) *tenantHeap {
	switch p {
	case ready:
		return &q.ready
	case deferred:
		return &q.deferred
	case urgent:
		return &q.urgent
	case spent:
		return &q.spent
	}
	return &q.throttled
}

// setShare changes what a tenant may have.
func (c *GPU) setShare(t *tenant, s Share) {
	s = clampShare(s)
	if s == t.share {
		return
	}
	c.bill(t)
	c.tellAll = true // a limit counts as a client that waits, see neighbors in snapshot.go
	had := t.limited()
	t.share = s
	c.sumUp(t)
	c.setApart(t, s.exclusive() || s.limited() && (t.apart || t.use == 0))
	c.slices.stale, c.dueCache.stale = true, true
	c.slices.ever = c.slices.ever || s.Priority == Latency
	if t.limited() {
		t.SetLimit(had, t.slice())
	} else {
		t.DropLimit()
	}
	if s.Priority == Batch {
		t.DropPatience()
	}
	c.review(t)
}

// reshare is SetShare. It may make the tenant's clients members of a gang, or end that.
func (c *GPU) reshare(account string, s Share) {
	if t := c.tenants[keyOf(account, 0, s)]; t != nil && s.Group() == "" {
		c.setShare(t, s)
		if t.share.Priority == Batch {
			c.revokeTenant(t, &c.latency, PriorityUsedUp) // nothing else would end these grants
		}
		c.standAll(t)
	}
	for _, cl := range c.inOrder() {
		if cl.account != account || account == "" {
			continue
		}
		t := c.tenantOf(account, cl.id, s)
		if t != cl.tenant && c.effective == Exclusive {
			switch {
			case cl.grant.holds():
				c.revoke(cl.grant, GangTurn)
			case cl.grant.closes():
				c.askBack(cl.grant) // the grant was given to another tenant
			}
		}
		c.join(cl, t)
		cl.share = clampShare(s)
		c.setShare(t, s)
		c.stand(cl)
	}
}
