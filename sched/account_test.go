// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
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
		{256, 3 * 365 * day, base.MostScaled}, // more than fits
	} {
		c := New(Config{Mode: Concurrent})
		for id := range test.clients {
			c.Step(0, Attach{Client: base.ClientID(id + 1), Tenant: "t", Want: true})
		}
		// A snapshot bills a copy; a step, the account.
		if got := c.Snapshot(base.Time(test.after)).Tenants[0].Used; got != test.want {
			t.Errorf("%d open grants after %v: used %v, want %v", test.clients, test.after, got, test.want)
		}
		c.Step(base.Time(test.after), Release{Client: 1, Epoch: 1, Reason: Idle})
		if got := c.tenants[keyOf("t", 0, Share{})].Used(); got != test.want {
			t.Errorf("%d open grants, one released after %v: used %v, want %v", test.clients, test.after, got, test.want)
		}
	}
}
