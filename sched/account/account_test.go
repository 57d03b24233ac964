// SPDX-License-Identifier: Apache-2.0

package account

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// The sum of many bills stays at what fits; the credit of a tenant with a limit fills again.
func TestBillsMoreThanFits(t *testing.T) {
	a := Account{}
	r := Rates{Open: 4096, Gets: 1000, Own: 1000, Fenced: 4096, Closing: 4096, Part: MinPart, Limit: 10, Slice: MaxSlice}
	now := base.Time(0)
	for range 10 {
		before := a
		now = now.Add(20 * 365 * 24 * time.Hour)
		a.Bill(now, r)
		if a.used < before.used || a.used <= 0 || a.credit != -maxDebt || a.vt < before.vt {
			t.Fatalf("after %v: used %v, credit %v, virtual time %d; before: %v, %v, %d", time.Duration(now), a.used, a.credit, a.vt, before.used, before.credit, before.vt)
		}
	}
	r.Open, r.Fenced, r.Closing = 0, 0, 0
	a.Bill(now.Add(20*365*24*time.Hour), r)
	if a.credit != MaxSlice {
		t.Errorf("with nothing used for 20 years the credit is %v, want %v", a.credit, MaxSlice)
	}
}
