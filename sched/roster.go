// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// Clients and tenants in order, what is known of all of them in sums, and what tenants are due.

// roster is the tenants of a GPU.
type roster struct {
	tenants    map[tenantKey]*tenant
	byKey      []*tenant // the same, in order
	remembered []*tenant // without clients, see leave
	metered    []*tenant // see meter
	ganged     []*tenant // of gangs

	sums         // of all tenants
	vtime  int64 // see virtualNow
	gangVT int64 // the same for gangs

	dueCache dueCache // see duesNow
}

// tally is what is known of all clients that want their part of the GPU, in sums: each Step asks for
// them, and a pass over all clients would make each Step as dear as they are many.
type tally struct {
	may, apart counts // of tenants that may share their turn with others, and of those that may not
	others     int    // clients that get on at another speed than when slices were given up
}

type counts struct {
	clients int           // apart from members of overlap groups
	unknown int           // clients whose speed alone is not known
	round   time.Duration // the sum of their slices
}

// tallied is what one client adds to the tally, and to its tenant's processes.
type tallied struct {
	tenant                        *tenant // nil: it does not share
	apart, member, unknown, other bool
	slice                         time.Duration
}

func (t *tally) add(a tallied, n int) {
	if a.tenant == nil {
		return
	}
	of := &t.may
	if a.apart {
		of = &t.apart
	}
	if !a.member {
		of.clients += n
	}
	if a.unknown {
		of.unknown += n
	}
	if a.other {
		t.others += n
	}
	of.round += a.slice * time.Duration(n)
}

// sum returns the counts of all clients, or of those that may share their turn.
func (t *tally) sum(cohort bool) counts {
	sum := t.may
	if !cohort {
		sum.clients += t.apart.clients
		sum.unknown += t.apart.unknown
		sum.round += t.apart.round
	}
	return sum
}

// addUp brings up to date what a client adds to the tally. It follows each change of whether the
// client shares, of its slice, and of its speed alone.
func (c *GPU) addUp(cl *client) {
	now := c.tallyOf(cl)
	if now == cl.tallied {
		return
	}
	c.tally.add(cl.tallied, -1)
	if t := cl.tallied.tenant; t != nil {
		t.processes--
	}
	c.tally.add(now, +1)
	if t := now.tenant; t != nil {
		t.processes++
	}
	cl.tallied = now
}

// addUpAll is addUp where that changes for many.
func (c *GPU) addUpAll() {
	for _, cl := range c.inOrder() {
		c.addUp(cl)
	}
}

// tallyOf returns what a client is to add.
func (c *GPU) tallyOf(cl *client) tallied {
	if !cl.shares() || c.clients[cl.id] != cl {
		return tallied{}
	}
	rate, _, known := cl.progress.Alone()
	a := tallied{tenant: cl.tenant, apart: cl.tenant.apart, member: cl.tenant.overlaps(), unknown: !known, slice: cl.slice}
	if was := c.auto.gaveUp[cl.id]; known && c.auto.gaveUp != nil {
		a.other = rate > timeslice.Changed*was || was > timeslice.Changed*rate
	}
	return a
}

func idOf(cl *client, id base.ClientID) int { return cmp.Compare(cl.id, id) }

// inOrder returns all clients in the order of their ids.
func (c *GPU) inOrder() []*client {
	c.looked += uint64(len(c.order))
	return slices.Clone(c.order) // some may leave meanwhile
}

// enlist and delist keep the clients in the order of their ids.
func (c *GPU) enlist(cl *client) {
	c.clients[cl.id] = cl
	at, _ := slices.BinarySearchFunc(c.order, cl.id, idOf)
	c.order = slices.Insert(c.order, at, cl)
}

func (c *GPU) delist(cl *client) {
	delete(c.clients, cl.id)
	at, _ := slices.BinarySearchFunc(c.order, cl.id, idOf)
	c.order = slices.Delete(c.order, at, at+1)
	c.addUp(cl)
}

func byKey(t *tenant, key tenantKey) int { return t.key.compare(key) }

// enroll and dropTenant keep the tenants in the order of their keys.
func (r *roster) enroll(t *tenant) {
	r.tenants[t.key] = t
	at, _ := slices.BinarySearchFunc(r.byKey, t.key, byKey)
	r.byKey = slices.Insert(r.byKey, at, t)
}

func (c *GPU) dropTenant(t *tenant) {
	delete(c.tenants, t.key)
	at, _ := slices.BinarySearchFunc(c.byKey, t.key, byKey)
	c.byKey = slices.Delete(c.byKey, at, at+1)
	c.dueCache.stale = true
}

// sums are what a tenant adds to those of its GPU, or these.
type sums struct {
	waiting int // clients that wait, and may be granted
	exact   int // tenants with clients and with a limit or a request

	// Tenants that are active, and what their shares say.
	active, requests, weights, limited, activeLatency int
}

func (s *sums) add(o sums, n int) {
	s.waiting += n * o.waiting
	s.exact += n * o.exact
	s.active += n * o.active
	s.requests += n * o.requests
	s.weights += n * o.weights
	s.limited += n * o.limited
	s.activeLatency += n * o.activeLatency
}

// sums returns what the tenant is to add, as things are.
func (t *tenant) sums() (s sums) {
	if t.takesTurn() || t.place == urgent || t.place == spent {
		s.waiting = max(t.queue.n, 1) // members of its gang may wait on other GPUs
	}
	if t.clients > 0 && (t.limited() || t.share.Request > 0) {
		s.exact = 1
	}
	if t.active {
		s.active, s.requests, s.weights = 1, t.share.Request, t.share.Weight
		if t.limited() {
			s.limited = 1
		}
		if t.share.Priority == Latency {
			s.activeLatency = 1
		}
	}
	return s
}

// sumUp brings the sums up to date with a tenant that has changed.
func (r *roster) sumUp(t *tenant) {
	if now := t.sums(); now != t.summed {
		r.sums.add(t.summed, -1)
		r.sums.add(now, +1)
		t.summed = now
	}
}

// dueCache is what the tenants of a GPU are due, as of the latest look.
type dueCache struct {
	account.Dues
	here   int64 // the dues of those that no limit keeps away at this moment, of one
	cohort int64 // the dues of those of these that are of the cohort, of one
	stale  bool
}

// claim is what the tenant's share says of its part.
func (t *tenant) claim() account.Claim {
	c := account.Claim{Request: t.share.Request, Weight: t.share.Weight}
	if t.limited() {
		c.Limit = t.share.Limit
	}
	return c
}

// dues works out what tenants are due.
func (c *GPU) dues() account.Dues {
	var claims []account.Claim
	for _, t := range c.tenants {
		if t.wants() {
			claims = append(claims, t.claim())
		}
	}
	return account.NewDues(claims)
}

// wants says whether the tenant counts among those that want the GPU.
func (t *tenant) wants() bool { return t.active || t.place == throttled }

// duesNow returns what dues are now. Where limits count they are worked out again when a tenant
// or a share has changed.
func (c *GPU) duesNow() *dueCache {
	d := &c.dueCache
	switch {
	case c.limited == 0 && c.throttled.top() == nil && !c.cohort.on: // this costs the same beside any number of tenants
		d.Unlimited(c.requests, c.weights)
		d.here, d.stale = account.One, true
	case d.stale:
		c.looked += uint64(len(c.tenants))
		*d = dueCache{Dues: c.dues()}
		for _, t := range c.tenants {
			if t.active {
				d.here += d.Of(t.claim())
				if !t.apart {
					d.cohort += d.Of(t.claim())
				}
			}
		}
	}
	return d
}

// part returns the part of the GPU by which a tenant's virtual time passes, of one.
func (c *GPU) part(t *tenant) int64 { return c.duesNow().Part(t.claim(), t.wants()) }

// virtualNow returns the virtual time of the tenant that is behind the others. It is
// the virtual time of the GPU, and never runs backwards. For gangs there is another one, gangTime: those that wait
// for other GPUs count there, so that no gang loses what it is behind. Others gain nothing by a gang that waits.
func (c *GPU) virtualNow() int64 {
	v := int64(0)
	any := false
	least := func(t *tenant) {
		if !any || t.VT() < v {
			v, any = t.VT(), true
		}
	}
	if c.effective == Exclusive {
		for _, l := range []*list{&c.open, &c.closing} {
			for cl := l.head; cl != nil; cl = cl.next {
				if cl.grant.kind == turnGrant {
					c.bill(cl.tenant)
					least(cl.tenant)
				}
			}
		}
	}
	for _, h := range []*tenantHeap{&c.ready, &c.deferred} {
		if t := h.top(); t != nil {
			least(t)
		}
	}
	if any {
		c.vtime = max(c.vtime, v)
	}
	for _, t := range c.ganged {
		if t.place == parked {
			least(t)
		}
	}
	if any {
		c.gangVT = max(c.gangVT, v)
	}
	return c.vtime
}

// gangTime is virtualNow for gangs.
func (c *GPU) gangTime() int64 {
	c.virtualNow()
	return c.gangVT
}
