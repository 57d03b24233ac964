// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// README's example: a tenant with a limit of 25 % beside one without gets that part and
// waits for the rest, as the status shows. It waits for its limit, the other for it.
func TestGotAndWaited(t *testing.T) {
	c := New(Config{})
	now := base.Time(0)
	waits, limited := map[string]time.Duration{}, map[string]time.Duration{}
	var step func(ev base.Event)
	step = func(ev base.Event) {
		for _, a := range c.Step(now, ev) {
			if a, ok := a.(Grant); ok {
				waits[a.Tenant] += a.Waited
				limited[a.Tenant] += a.Limited
			}
			if a, ok := a.(Revoke); ok { // the client releases, and wants the GPU again
				defer step(Request{Client: a.Client})
				defer step(Release{Client: a.Client, Epoch: a.Epoch, Reason: Revoked})
			}
		}
	}
	step(Attach{Client: 1, Tenant: "limited", Share: Share{Limit: 25}, Want: true})
	step(Attach{Client: 2, Tenant: "free", Want: true})
	for now < base.Time(20*time.Second) {
		at, ok := c.Deadline()
		if !ok {
			t.Fatalf("nothing is to come at %v", time.Duration(now))
		}
		now = max(at, now)
		step(Tick{})
		for _, s := range c.Snapshot(now).Tenants { // at each moment, whoever is kept away by its limit
			if want := map[string]int{"limited": 250, "free": 750}[s.Tenant]; s.Promised != want {
				t.Fatalf("after %v %s is due %d permille, want %d", time.Duration(now), s.Tenant, s.Promised, want)
			}
		}
	}
	if w, l := waits["limited"], limited["limited"]; l < w*8/10 || l > w || w < 10*time.Second || limited["free"] != 0 {
		t.Errorf("the limited tenant waited %v, %v of that for its limit; the other for one: %v", w, l, limited["free"])
	}
	for _, s := range c.Snapshot(now).Tenants {
		want, waited := 250, 750
		if s.Tenant == "free" {
			want, waited = 750, 250
		}
		if p50, p99 := s.Waits.Percentile(50), s.Waits.Percentile(99); s.Waits.Count() == 0 || s.Waits.Count() > s.Grants || p50 > p99 || p99 < s.RecentWait/2 || p99 > s.RecentWait*9/8 {
			t.Errorf("%s: %d waits, p50 %v, p99 %v, of %d grants; the longest %v", s.Tenant, s.Waits.Count(), p50, p99, s.Grants, s.RecentWait)
		}
		if abs(s.Got-want) > 30 || abs(s.Waited-waited) > 30 || s.RecentWait <= 0 || s.RecentWait > time.Second {
			t.Errorf("%s got %d permille and waited %d, want about %d and %d; longest wait %v", s.Tenant, s.Got, s.Waited, want, waited, s.RecentWait)
		}
	}
}

func abs(n int) int { return max(n, -n) }
