// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// latencyHasGPU says whether a latency tenant has a grant of whatever kind.
func latencyHasGPU(c *GPU) bool {
	for _, cl := range c.clients {
		if cl.tenant.share.Priority == Latency && (cl.grant.holds() || cl.grant.closes()) {
			return true
		}
	}
	return false
}

// saturated drives a GPU with clients that want it without a pause, and drain for so long when
// they are asked to go. It returns the part of the time that each tenant had, after ten seconds,
// and the part in which a latency tenant had the GPU.
func saturated(t *testing.T, tenants map[string]Share, drain time.Duration) (got map[string]float64, latency float64) {
	t.Helper()
	c := New(Config{})
	now, end := base.Time(0), base.Time(10*time.Second)
	var drains []Revoke // in the order of their ends
	var ends []base.Time
	step := func(ev base.Event) {
		for _, a := range c.Step(now, ev) {
			if r, ok := a.(Revoke); ok {
				drains, ends = append(drains, r), append(ends, now.Add(drain))
			}
		}
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
	}
	for i, name := range slices.Sorted(maps.Keys(tenants)) {
		step(Attach{Client: base.ClientID(i + 1), Tenant: name, Share: tenants[name], Want: true})
	}
	var had time.Duration
	run := func() {
		for now < end {
			at, ok := c.Deadline()
			if !ok {
				at = end
			}
			if len(ends) > 0 {
				at = min(at, ends[0])
			}
			at = min(at, end)
			if latencyHasGPU(c) {
				had += at.Sub(now)
			}
			now = at
			if len(ends) > 0 && ends[0] <= now {
				r := drains[0]
				drains, ends = drains[1:], ends[1:]
				step(Release{Client: r.Client, Epoch: r.Epoch, Reason: Revoked})
				step(Request{r.Client})
			} else {
				step(Tick{})
			}
		}
	}
	used := func() map[string]time.Duration {
		of := map[string]time.Duration{}
		for _, ts := range c.Snapshot(now).Tenants {
			of[ts.Tenant] = ts.Used
		}
		return of
	}
	run()
	before := used()
	end, had = end.Add(20*time.Second), 0
	run()
	got = map[string]float64{}
	for name, d := range used() {
		got[name] = (d - before[name]).Seconds() / 20
	}
	return got, had.Seconds() / 20
}

// However many latency tenants there are, and whatever else the GPU has, they have half of it
// together while others want it, or what they are promised.
func TestLatencyTenantsHaveHalf(t *testing.T) {
	greedy, batch := Share{Priority: Latency}, Share{}
	promised := func(percent int) Share { return Share{Priority: Latency, Request: percent} }
	for name, test := range map[string]struct {
		tenants map[string]Share
		want    float64
	}{
		"one beside one":                   {map[string]Share{"a": greedy, "b": batch}, 0.5},
		"one beside two":                   {map[string]Share{"a": greedy, "b": batch, "c": batch}, 0.5},
		"one beside a limit and another":   {map[string]Share{"a": greedy, "b": batch, "c": {Limit: 25}}, 0.5},
		"two beside one":                   {map[string]Share{"a": greedy, "a2": greedy, "b": batch}, 0.5},
		"five beside two":                  {map[string]Share{"a": greedy, "a2": greedy, "a3": greedy, "a4": greedy, "a5": greedy, "b": batch, "c": batch}, 0.5},
		"a large weight":                   {map[string]Share{"a": {Priority: Latency, Weight: 1000}, "b": batch}, 0.5},
		"a promise":                        {map[string]Share{"a": promised(70), "b": batch}, 0.7},
		"a promise beside one without":     {map[string]Share{"a": promised(40), "a2": greedy, "b": batch}, 0.5},
		"a limit of the latency tenant":    {map[string]Share{"a": {Priority: Latency, Limit: 20}, "b": batch}, 0.2},
		"one beside a request":             {map[string]Share{"a": greedy, "b": {Request: 60}}, 0.2},
		"one beside a request and another": {map[string]Share{"a": greedy, "b": {Request: 60}, "c": batch}, 0.2},
	} {
		for _, drain := range []time.Duration{0, 2 * time.Millisecond, 30 * time.Millisecond} {
			got, latency := saturated(t, test.tenants, drain)
			t.Logf("%s, drains of %v: %.3f: %v", name, drain, latency, got)
			if math.Abs(latency-test.want) > 0.01 {
				t.Errorf("%s, drains of %v: latency tenants have %.3f of the time, want %.2f: %v", name, drain, latency, test.want, got)
			}
		}
	}
}

// A latency tenant beside one with a limit leaves it that, and has the rest: while the limit keeps
// that tenant away nobody else wants the GPU.
func TestLatencyTenantBesideALimit(t *testing.T) {
	got, latency := saturated(t, map[string]Share{"a": {Priority: Latency}, "b": {Limit: 25}}, 0)
	if math.Abs(got["b"]-0.25) > 0.01 || latency < 0.73 {
		t.Errorf("beside a latency tenant, which has %.3f, the tenant with a limit of 25 %% has %.3f", latency, got["b"])
	}
}

// A latency tenant with short requests is let in at once, also beside one that saturates the GPU.
func TestShortRequestsBesideAGreedyLatencyTenant(t *testing.T) {
	g := &autoGPU{t: t, c: New(Config{}), n: 3, now: base.Time(time.Hour)}
	g.step(Attach{Client: 1, Tenant: "greedy", Share: Share{Priority: Latency}, Want: true})
	g.step(Attach{Client: 2, Want: true})
	g.step(Attach{Client: 3, Tenant: "short", Share: Share{Priority: Latency}})
	for range 1000 {
		g.step(Request{3})
		if g.c.clients[3].grant == nil {
			t.Fatalf("a request waits, %v after the begin", time.Duration(g.now)-time.Hour)
		}
		for range 10 {
			g.now = g.now.Add(time.Millisecond)
			g.step(Tick{})
			if gr := g.c.clients[3].grant; gr != nil {
				g.step(Release{Client: 3, Epoch: gr.epoch, Reason: Idle})
			}
		}
	}
}

// A latency tenant that is out of patience has the GPU when nobody else wants it, also between two
// requests of others that leave longer pauses than a drain is worth; and when these are back it goes.
func TestLatencyTenantUsesPauses(t *testing.T) {
	g := &autoGPU{t: t, c: New(Config{}), n: 2, now: base.Time(time.Hour)}
	g.step(Attach{Client: 1, Tenant: "l", Share: Share{Priority: Latency}, Want: true})
	g.step(Attach{Client: 2, Want: true})
	for range 5 {
		g.now = g.now.Add(100 * time.Millisecond)
		g.step(Tick{})
	}
	if g.c.clients[1].grant != nil || g.c.clients[2].grant == nil {
		t.Fatal("the latency tenant is not out of patience")
	}
	g.now = g.now.Add(10 * time.Millisecond) // it has the GPU, and nothing happens
	g.step(Release{Client: 2, Epoch: g.c.clients[2].grant.epoch, Reason: Idle})
	g.now = g.now.Add(shortPause / 2)
	g.step(Tick{})
	if g.c.clients[1].grant != nil {
		t.Error("it is let in between two requests of another tenant")
	}
	g.letIn(1)
	g.step(Request{2})
	if g.c.clients[1].grant != nil || g.c.clients[2].grant == nil {
		t.Error("it has the GPU while another tenant wants it")
	}
}

// A latency tenant keeps the others out for as long as it may, whether or not something else
// has its account brought up to date meanwhile.
func TestPatienceDoesNotDependOnHowOftenItIsCounted(t *testing.T) {
	outAfter := func(every time.Duration) base.Time {
		c := New(Config{Quantum: 100 * time.Millisecond})
		c.Step(0, Attach{Client: 1, Tenant: "batch", Want: true})
		c.Step(0, Attach{Client: 2, Tenant: "fast", Share: Share{Priority: Latency}, Want: true})
		for now := base.Time(0); now < base.Time(2*time.Second); {
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
