// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// newCohort has clients 1, 2 and 3 in a cohort beside client 4, whose tenant "l" has a limit.
// The cohort has the GPU.
func newCohort(t *testing.T) *autoGPU {
	g := newAutoGPU(t, 3)
	g.step(Attach{Client: 4, Tenant: "l", Share: Share{Limit: 30}, Want: true})
	for id := range ClientID(4) {
		g.step(Controls{Client: id + 1, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	g.run(8*time.Second, 1, 1, 1, 1)
	g.is(Exclusive, reasonCohort)
	g.holders(1, 2, 3)
	return g
}

// holders waits, a second at most, until exactly these clients may submit work.
func (g *autoGPU) holders(want ...ClientID) {
	g.t.Helper()
	var got []ClientID
	for range 200 {
		got = slices.Sorted(slices.Values(g.c.open.ids()))
		if slices.Equal(got, want) {
			return
		}
		g.now = g.now.Add(5 * time.Millisecond)
		g.step(Tick{})
	}
	g.t.Fatalf("clients %d hold the GPU, want %d", got, want)
}

// The cohort and the tenant with a limit take turns. The limit is exact, and the others are
// billed for what is left, once.
func TestCohortTakesTurns(t *testing.T) {
	g := newCohort(t)
	g.holders(4)
	g.holders(1, 2, 3)
	before := g.c.Snapshot(g.now)
	g.run(20*time.Second, 1, 1, 1, 1)
	after := g.c.Snapshot(g.now)
	all := time.Duration(0)
	for i, tenant := range after.Tenants {
		used := tenant.Used - before.Tenants[i].Used
		all += used
		want := 20 * time.Second * 7 / 30
		if tenant.Tenant == "l" {
			want = 5 * time.Second // of four that want it: less than the limit allows
		}
		t.Logf("%s: %v", tenant.Tenant, used)
		if tenant.Tenant == "l" && (used < want-want/50 || used > 6*time.Second+200*time.Millisecond) {
			t.Errorf("the limited tenant used %v of 20 s, want %v to 6 s", used, want)
		}
	}
	if all < 19*time.Second || all > 20500*time.Millisecond {
		t.Errorf("%v are billed of 20 s", all)
	}
}

// What a cohort cannot be with ends it, and nobody then holds the GPU beside another one.
func TestWhatEndsACohort(t *testing.T) {
	for name, event := range map[string]Event{
		"its limit is gone":          SetShare{Tenant: "l"},
		"its tenant is a gang":       SetShare{Tenant: "l", Share: Share{Gang: "g", Limit: 30}},
		"its tenant is latency":      SetShare{Tenant: "l", Share: Share{Priority: Latency, Limit: 30}},
		"a latency tenant comes":     Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency}},
		"an overlap group comes":     Attach{Client: 5, Tenant: "m", Share: Share{Overlap: "o"}, Want: true},
		"a gang comes":               Attach{Client: 5, Tenant: "m", Share: Share{Gang: "g"}, Want: true},
		"a driver that refuses":      Controls{Client: 2, Slices: ControlRefused},
		"channels that stay on":      Controls{Client: 2, Slices: ControlWorks, Channels: ControlRefused, Groups: 1},
		"memory is short":            Reserve{Client: 1, Total: 95},
		"the user wants turns":       SetMode{Exclusive},
		"the user wants all at once": SetMode{Concurrent},
	} {
		t.Run(name, func(t *testing.T) {
			g := newCohort(t)
			g.step(event)
			if g.c.cohort.on {
				t.Error("the cohort goes on")
			}
			if n := g.c.open.n; n > 1 && g.c.effective == Exclusive && g.c.kept == nil {
				t.Errorf("%d clients hold the GPU", n)
			}
			g.run(500 * time.Millisecond)
		})
	}
}

// The status says whose fault it is that the others do not share their turns.
func TestWhyNoCohort(t *testing.T) {
	g := newCohort(t)
	g.step(Controls{Client: 2, Slices: ControlWorks, Channels: ControlFaked, Groups: 1})
	want := reasonLimit + "; the others do not share theirs: the channels of client 2 cannot be taken off: driver fakes it"
	if way, why := g.c.way(); way != "turns" || why != want {
		t.Errorf("clients share by %s (%s), want turns (%s)", way, why, want)
	}
}

// Nobody can make the end of each turn a flood of messages.
func TestCohortIsBounded(t *testing.T) {
	g := newCohort(t)
	for id := ClientID(5); id <= maxCohort+1; id++ {
		if g.step(Attach{Client: id, Want: true}); !g.c.cohort.on {
			t.Fatalf("no cohort with client %d", id)
		}
	}
	g.step(Attach{Client: maxCohort + 2, Want: true})
	if want := "they are 33 clients, and 32 at most are stopped together"; g.c.cohort.on || !strings.HasSuffix(g.c.slices.why, want) {
		t.Errorf("clients share by turns (%s), want %s", g.c.slices.why, want)
	}
}

// A cohort of one is no cohort.
func TestCohortOfOne(t *testing.T) {
	g := newCohort(t)
	g.step(Gone{Client: 1})
	g.holders(2, 3)
	g.step(Gone{Client: 2})
	g.run(2 * time.Second)
	if g.c.cohort.on {
		t.Error("one client is a cohort")
	}
	g.holders(3)
	g.holders(4)
}

// A tenant that gets a limit while its cohort has the GPU leaves it at once; one that loses
// its limit joins the next turn.
func TestLimitsMoveTenantsInAndOut(t *testing.T) {
	g := newCohort(t)
	g.step(Attach{Client: 5, Tenant: "m", Want: true})
	g.step(Controls{Client: 5, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	g.holders(1, 2, 3, 5)
	g.step(SetShare{Tenant: "m", Share: Share{Limit: 20}})
	if cl := g.c.clients[5]; cl.grant.holds() {
		t.Error("a tenant with a limit has the GPU together with others")
	}
	g.holders(1, 2, 3)
	g.holders(5)
	g.step(SetShare{Tenant: "m"})
	g.holders(1, 2, 3, 5)
	g.is(Exclusive, reasonCohort)
}

// One of a cohort that loses its connection goes on when it is back, while the turn goes on.
func TestCohortMemberIsBack(t *testing.T) {
	g := newCohort(t)
	epoch := g.c.clients[2].grant.epoch
	g.step(Lost{Client: 2})
	g.holders(1, 3)
	g.step(Attach{Client: 2, Held: epoch, Want: true})
	if !g.c.clients[2].grant.holds() || g.c.clients[2].grant.epoch != epoch {
		t.Errorf("client 2 is back and may not go on: %+v", g.c.clients[2].grant)
	}
	g.holders(1, 2, 3)
}
