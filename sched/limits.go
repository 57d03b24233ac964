// SPDX-License-Identifier: Apache-2.0

package sched

import "github.com/nvshare/nvshare/sched/base"

// limits revokes the grants of a tenant that has used up its limit. When it has credit
// for a slice, it waits for its turn again.
func limits() policy {
	return policy{
		due: func(c *GPU) (base.Time, bool) {
			var e base.Earliest
			for _, t := range c.metered {
				e.Either(c.creditEnds(t))
			}
			if t := c.throttled.top(); t != nil {
				e.Either(t.backAt(), true)
			}
			return e.At, e.OK
		},
		revoke: func(c *GPU) {
			c.unthrottle()
			c.revokeLimited()
		},
	}
}

// unthrottle lets tenants wait for their turns again that have credit.
func (c *GPU) unthrottle() {
	for t := c.throttled.top(); t != nil && c.now >= t.backAt(); t = c.throttled.top() {
		c.bill(t) // other grants of the tenant may have used credit meanwhile
		if t.limited() {
			t.Uncap(t.slice())
		} else {
			t.DropLimit()
		}
		c.review(t)
	}
}

// revokeLimited asks back the grants of tenants without credit.
func (c *GPU) revokeLimited() {
	for i := 0; i < len(c.metered); i++ {
		t := c.metered[i]
		c.bill(t)
		if !t.limited() || t.Credit() > 0 {
			continue
		}
		if c.kept == t {
			c.stop(t, LimitReached)
		}
		c.revokeTenant(t, &c.open, LimitReached)
		c.revokeTenant(t, &c.latency, LimitReached)
		c.review(t) // it may wait, and only its fenced processes have used the credit
		c.standAll(t)
		i = -1 // the list has changed
	}
}

// creditEnds returns when the tenant's grants will have used up its credit; false if
// never.
func (c *GPU) creditEnds(t *tenant) (base.Time, bool) {
	if !t.limited() {
		return 0, false // as most: the rates need not be known
	}
	return t.CreditEnds(c.now, c.ratesOf(t))
}

// spends says whether the tenant's grants use up its credit or patience, at whose end they are
// asked back, or its place among those who wait is lost.
func (t *tenant) spends() bool {
	return t.open > 0 && (t.limited() || t.share.Priority == Latency) ||
		t.fenced > 0 && t.limited() && (t.takesTurn() || t.place == urgent)
}

// meter keeps the list of such tenants.
func (c *GPU) meter(t *tenant) {
	want := t.spends()
	switch {
	case want && t.metered < 0:
		t.metered = len(c.metered)
		c.metered = append(c.metered, t)
	case !want && t.metered >= 0:
		last := c.metered[len(c.metered)-1]
		c.metered[t.metered] = last
		last.metered = t.metered
		c.metered = c.metered[:len(c.metered)-1]
		t.metered = -1
	}
}

// backAt returns when a throttled tenant has credit for a slice again.
func (t *tenant) backAt() base.Time {
	if !t.limited() || !t.Capped() {
		return max(t.BilledAt(), t.notBefore) // its limit was taken away just now, or something else keeps it waiting
	}
	return max(t.notBefore, t.Account.BackAt(t.share.Limit, t.slice()))
}
