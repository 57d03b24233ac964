// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

// Whatever a tenant holds, and however long nothing happens, it is billed for the time of its open
// grants: exactly, as far as that fits.
func TestBillsLongTimes(t *testing.T) {
	const day = 24 * time.Hour
	for _, test := range []struct {
		clients int
		after   time.Duration
		want    time.Duration
	}{
		{1, 10*time.Second + 1, 10*time.Second + 1},
		{30, 3*day + 7, 90*day + 210},
		{30, 4*day + 7, 120*day + 210},
		{1, 110 * day, 110 * day},
		{256, 3 * 365 * day, mostScaled}, // more than fits
	} {
		c := New(Config{Mode: Concurrent})
		for id := range test.clients {
			c.Step(0, Attach{Client: ClientID(id + 1), Tenant: "t", Want: true})
		}
		// A snapshot bills a copy; a step, the account.
		if got := c.Snapshot(Time(test.after)).Tenants[0].Used; got != test.want {
			t.Errorf("%d open grants after %v: used %v, want %v", test.clients, test.after, got, test.want)
		}
		c.Step(Time(test.after), Release{Client: 1, Epoch: 1, Reason: Idle})
		if got := c.tenants["t"].used; got != test.want {
			t.Errorf("%d open grants, one released after %v: used %v, want %v", test.clients, test.after, got, test.want)
		}
	}
}

// The sum of many bills stays at what fits; the credit of a tenant with a limit fills again.
func TestBillsMoreThanFits(t *testing.T) {
	a := account{}
	r := rates{open: 4096, gets: 1000, own: 1000, fenced: 4096, closing: 4096, part: minPart, share: clampShare(Share{Limit: 10}), slice: maxSlice}
	now := Time(0)
	for range 10 {
		before := a
		now = now.Add(20 * 365 * 24 * time.Hour)
		a.bill(now, r)
		if a.used < before.used || a.used <= 0 || a.credit != -maxDebt || a.vt < before.vt {
			t.Fatalf("after %v: used %v, credit %v, virtual time %d; before: %v, %v, %d", time.Duration(now), a.used, a.credit, a.vt, before.used, before.credit, before.vt)
		}
	}
	r.open, r.fenced, r.closing = 0, 0, 0
	a.bill(now.Add(20*365*24*time.Hour), r)
	if a.credit != maxSlice {
		t.Errorf("with nothing used for 20 years the credit is %v, want %v", a.credit, maxSlice)
	}
}
