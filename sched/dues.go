// SPDX-License-Identifier: Apache-2.0

package sched

import "github.com/nvshare/nvshare/sched/account"

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
