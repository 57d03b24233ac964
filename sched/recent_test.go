// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

// README's example: a tenant with a limit of 25 % beside one without gets that part and
// waits for the rest, as the status shows. It waits for its limit, the other for it.
func TestGotAndWaited(t *testing.T) {
	c := New(Config{})
	now := Time(0)
	waits, limited := map[string]time.Duration{}, map[string]time.Duration{}
	var step func(ev Event)
	step = func(ev Event) {
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
	for now < Time(20*time.Second) {
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

// What tenants are due adds up to the whole GPU, unless all are at their limits.
func TestDues(t *testing.T) {
	for _, tc := range []struct {
		name string
		all  []Share
		idle *Share // of one that wants nothing now
		want []int  // permille, the idle one's last
	}{
		{"alone", []Share{{}}, nil, []int{1000}},
		{"alone with a limit", []Share{{Limit: 25}}, nil, []int{250}},
		{"two", []Share{{}, {}}, nil, []int{500, 500}},
		{"two and an idle one", []Share{{}, {}}, &Share{}, []int{500, 500, 333}},
		{"a limit below its part", []Share{{Limit: 25}, {}}, nil, []int{250, 750}},
		{"a limit above its part", []Share{{Limit: 60}, {}}, nil, []int{500, 500}},
		{"limits that leave something", []Share{{Limit: 25}, {Limit: 30}}, nil, []int{250, 300}},
		{"what one leaves brings no other above its limit", []Share{{Limit: 10}, {Limit: 40}, {}}, nil, []int{100, 400, 500}},
		{"a promise and weights", []Share{{Request: 40}, {Weight: 200}, {Weight: 300}}, nil, []int{500, 200, 300}},
		{"an idle one with a limit", []Share{{}}, &Share{Limit: 20}, []int{1000, 200}},
		{"all is promised", []Share{{Request: 60}, {Request: 40}, {}}, nil, []int{600, 400, 0}},
	} {
		var d dues
		for _, s := range tc.all {
			d.wanting = append(d.wanting, &tenant{share: clampShare(s), active: true})
		}
		d.share()
		of := d.wanting
		if tc.idle != nil {
			of = append(of[:len(of):len(of)], &tenant{share: clampShare(*tc.idle)})
		}
		for i, u := range of {
			if got := d.permille(u); abs(got-tc.want[i]) > 1 {
				t.Errorf("%s: %d is due %d permille, want %d", tc.name, i, got, tc.want[i])
			}
		}
	}
}
