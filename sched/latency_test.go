// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"testing"
	"time"
)

// greedy drives a GPU with clients that want it without a pause, and release it at once
// when they are asked to. It returns the share of the time that each tenant had.
func greedy(t *testing.T, tenants map[string]Share, total time.Duration) map[string]float64 {
	t.Helper()
	c := New(Config{})
	now := Time(0)
	var step func(Event)
	step = func(ev Event) {
		var then []Event
		for _, a := range c.Step(now, ev) {
			if r, ok := a.(Revoke); ok {
				then = append(then, Release{Client: r.Client, Epoch: r.Epoch, Reason: Revoked}, Request{r.Client})
			}
		}
		for _, ev := range then {
			step(ev)
		}
	}
	id := ClientID(0)
	for _, name := range []string{"batch", "l1", "l2", "l3", "l4", "l5"} {
		if share, ok := tenants[name]; ok {
			id++
			step(Attach{Client: id, Tenant: name, Share: share, Want: true})
		}
	}
	for now < Time(total) {
		at, ok := c.Deadline()
		if !ok {
			t.Fatal("nothing is due")
		}
		now = at
		step(Tick{})
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]float64{}
	for _, ts := range c.Snapshot(now).Tenants {
		got[ts.Tenant] = ts.Used.Seconds() / total.Seconds()
	}
	return got
}

// However many latency tenants there are, they keep batch tenants out for half of the time
// together. In the other half they take turns like everybody.
func TestLatencyTenantsShareOnePart(t *testing.T) {
	alone := 0.0
	for n := 1; n <= 5; n += 2 {
		tenants := map[string]Share{"batch": {}}
		for i := range n {
			tenants[fmt.Sprintf("l%d", i+1)] = Share{Priority: Latency}
		}
		got := greedy(t, tenants, 20*time.Second)
		// Of the half that latency tenants do not keep to themselves, batch has a turn of
		// each round.
		least := 0.45 / float64(n+1)
		t.Logf("beside %d latency tenants: %v", n, got)
		if got["batch"] < least {
			t.Errorf("beside %d latency tenants the batch tenant has %.3f of the time, want %.3f at least", n, got["batch"], least)
		}
		if n == 1 {
			alone = got["batch"]
		}
	}
	if alone < 0.2 {
		t.Errorf("beside one: %.3f", alone)
	}
}

// A latency tenant keeps the others out for as long as it may, whether or not something else
// has its account brought up to date meanwhile.
func TestPatienceDoesNotDependOnHowOftenItIsCounted(t *testing.T) {
	outAfter := func(every time.Duration) Time {
		c := New(Config{Quantum: 100 * time.Millisecond})
		c.Step(0, Attach{Client: 1, Tenant: "batch", Want: true})
		c.Step(0, Attach{Client: 2, Tenant: "fast", Share: Share{Priority: Latency}, Want: true})
		for now := Time(0); now < Time(2*time.Second); {
			at, ok := c.Deadline()
			if !ok {
				break
			}
			now = min(max(at, now), now.Add(every))
			for _, a := range c.Step(now, Tick{}) {
				if r, ok := a.(Revoke); ok && r.Client == 2 {
					return now
				}
			}
		}
		t.Fatalf("looked at every %v, the latency tenant is never asked to go", every)
		return 0
	}
	want := outAfter(time.Hour)
	for _, every := range []time.Duration{10 * time.Millisecond, 300 * time.Millisecond} {
		if got := outAfter(every); got != want {
			t.Errorf("it is asked to go after %v; looked at every %v, after %v", time.Duration(want), every, time.Duration(got))
		}
	}
}
