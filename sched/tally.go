// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

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
