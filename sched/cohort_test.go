// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// newCohort has clients 1, 2 and 3 in a cohort beside client 4, whose tenant "l" has a limit.
// The cohort has the GPU.
func newCohort(t *testing.T) *autoGPU {
	g := newAutoGPU(t, 3)
	g.step(Attach{Client: 4, Tenant: "l", Share: Share{Limit: 30}, Want: true})
	for id := range base.ClientID(4) {
		g.step(Controls{Client: id + 1, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	g.run(8*time.Second, 1, 1, 1, 1)
	g.is(Exclusive, reasonCohort)
	g.holders(1, 2, 3)
	return g
}

// holders waits, a second at most, until exactly these clients may submit work.
func (g *autoGPU) holders(want ...base.ClientID) {
	g.t.Helper()
	var got []base.ClientID
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
	for name, event := range map[string]base.Event{
		"its limit is gone":                               SetShare{Tenant: "l"},
		"its tenant is a gang":                            SetShare{Tenant: "l", Share: Share{Gang: "g", Limit: 30}},
		"its tenant is latency, and the others are busy":  SetShare{Tenant: "l", Share: Share{Priority: Latency, Limit: 30}},
		"a latency tenant comes, and the others are busy": Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency}},
		"a gang comes":                                    Attach{Client: 5, Tenant: "m", Share: Share{Gang: "g"}, Want: true},
		"the user wants turns":                            SetMode{Exclusive},
		"the user wants all at once":                      SetMode{Concurrent},
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

// One that cannot be sliced, or whose channels cannot be taken off, has turns of its own. The
// others go on together. One that leaves the GPU idle in its turns is one of them again.
func TestUnsliceableIsApart(t *testing.T) {
	for name, refused := range map[string]Controls{
		"slices":   {Client: 2, Slices: ControlRefused},
		"channels": {Client: 2, Slices: ControlWorks, Channels: ControlRefused, Groups: 1},
	} {
		t.Run(name, func(t *testing.T) {
			g := newCohort(t)
			g.step(refused)
			g.holders(1, 3)
			g.holders(2)
			g.holders(4)
			g.run(8*time.Second, 1, 0.5, 1, 1)
			g.holders(1, 2, 3)
			g.holders(4)
			if cl := g.c.clients[2]; name == "slices" && cl.slice != 0 {
				t.Errorf("it was told slices of %v", cl.slice)
			}
		})
	}
}

// The status says why others do not share their turns.
func TestWhyNoCohort(t *testing.T) {
	g := newCohort(t)
	g.step(Controls{Client: 2, Slices: ControlWorks, Channels: ControlFaked, Groups: 1})
	g.step(Gone{Client: 3})
	way, why, refused := g.c.way()
	if want := []WayRefusal{{"slices", because(reasonLimit)}, {"cohort", because(reasonFew)}, {"driver", because(reasonShares)}}; way != "turns" || why.Why != reasonLimit || !slices.Equal(refused, want) {
		t.Errorf("clients share by %s (%v), refused %v, want turns, and %v", way, why, refused, want)
	}
}

// Nobody can make the end of each turn a flood of messages.
func TestCohortIsBounded(t *testing.T) {
	g := newCohort(t)
	for id := base.ClientID(5); id <= maxCohort+1; id++ {
		if g.step(Attach{Client: id, Want: true}); !g.c.cohort.on {
			t.Fatalf("no cohort with client %d", id)
		}
	}
	g.step(Attach{Client: maxCohort + 2, Want: true})
	if _, _, refused := g.c.way(); g.c.cohort.on || refused[1].Why != reasonMany {
		t.Errorf("refused: %v, want %s", refused, reasonMany.Code())
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

// One of a cohort that sleeps stretches nobody's slice, and has its own as soon as it wakes.
func TestSleeperOfACohort(t *testing.T) {
	for name, test := range map[string]struct {
		share         Share
		asleep, awake float64 // its slice, in those of another one
	}{
		"equal parts":    {Share{}, 1, 1},
		"a large weight": {Share{Weight: 200}, 2, 2},
		"a small weight": {Share{Weight: 25}, 0.25, 0.25},
		"a request":      {Share{Request: 40}, 2.2, 1 + 0.4/0.15}, // 60 % for four by weight
	} {
		t.Run(name, func(t *testing.T) {
			g := newCohort(t)
			g.step(Gone{Client: 3})
			g.step(Attach{Client: 3, Tenant: "s", Share: test.share, Want: true})
			g.step(Controls{Client: 3, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
			g.holders(1, 2, 3)
			g.step(Release{Client: 3, Epoch: g.c.clients[3].grant.epoch, Reason: Idle})
			is := func(want float64, when string) {
				of := func(id base.ClientID) time.Duration { return cmp.Or(g.c.clients[id].slice, timeslice.DriverSlice) }
				if got := of(3).Seconds() / of(1).Seconds(); of(1) != of(2) || math.Abs(got/want-1) > 0.1 || max(of(1), of(3)) > g.c.cohortSlice() {
					t.Errorf("%s: slices of %v and %v, and %v of the sleeper, want %.2f times that and %v at most", when, of(1), of(2), of(3), want, g.c.cohortSlice())
				}
			}
			is(test.awake, "awake")
			g.run(1250 * time.Millisecond)
			g.step(Attach{Client: 5, Tenant: "m", Share: Share{Limit: 10}}) // slices are set anew
			if g.is(Exclusive, reasonCohort); !g.c.sleeps(g.c.clients[3]) {
				t.Fatal("client 3 does not sleep")
			}
			is(test.asleep, "asleep")
			g.step(Request{Client: 3})
			is(test.awake, "when it wakes")
		})
	}
}

// One that worked in a window of slices, and sleeps at its end, had not too much in it.
func TestSleeperOfACohortIsNotCorrected(t *testing.T) {
	g := newCohort(t)
	g.run(5*time.Second, 1, 1, 1, 1)
	g.holders(4)
	g.holders(1, 2, 3)
	g.step(Release{Client: 3, Epoch: g.c.clients[3].grant.epoch, Reason: Idle})
	g.run(3*time.Second, 1, 1)
	if cl := g.c.clients[3]; !g.c.sleeps(cl) || cl.tenant.sliceFactor != 0 {
		t.Errorf("client 3 sleeps: %t, and its slice is %.2f of what its part says", g.c.sleeps(cl), cl.tenant.sliceFactor)
	}
}

// newIdleCohort is newCohort with clients 1 to 3 that leave the GPU idle.
func newIdleCohort(t *testing.T) *autoGPU {
	g := newCohort(t)
	g.run(8*time.Second, 0.5, 0.5, 0.5, 1)
	g.holders(4)
	g.holders(1, 2, 3)
	return g
}

// cohortWith checks that the cohort is there, with slices of this length, and that the gates of
// those who hold are shut or not.
func (g *autoGPU) cohortWith(slice time.Duration, shut bool) {
	g.t.Helper()
	g.is(Exclusive, reasonCohort)
	for id := base.ClientID(1); id <= 3; id++ {
		if cl := g.c.clients[id]; cl.slice != slice {
			g.t.Errorf("client %d has slices of %v, want %v", id, cl.slice, slice)
		}
	}
	for cl := g.c.open.head; cl != nil; cl = cl.next {
		if (cl.grant.state == paused) != shut {
			g.t.Errorf("the grant of client %d is %+v, paused: want %t", cl.id, cl.grant, shut)
		}
	}
}

// A latency tenant runs beside the cohort, and beside the tenant with the limit. No gate is shut
// for it, and the cohort has longer slices again when it has gone.
func TestLatencyTenantBesideACohort(t *testing.T) {
	g := newIdleCohort(t)
	longest := g.c.clients[1].slice
	g.step(Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency}, Want: true})
	g.kindOf(5, besideGrant)
	g.cohortWith(CrowdedSlice, false)
	if s := g.c.clients[4].slice; s != LatencySlice {
		t.Errorf("the tenant with the limit has slices of %v", s)
	}
	for range 5 {
		g.holders(4)
		g.kindOf(5, besideGrant)
		g.holders(1, 2, 3)
	}
	g.run(8*time.Second, 0.5, 0.5, 0.5, 1, 0.1)
	g.holders(1, 2, 3)
	g.cohortWith(CrowdedSlice, false)
	g.step(Gone{Client: 5})
	g.cohortWith(longest, false)
}

// What a latency tenant does beside a cohort is billed to it, and not to the others.
func TestBillsBesideACohort(t *testing.T) {
	g := newIdleCohort(t)
	g.step(Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency}, Want: true})
	g.run(5*time.Second, 0.5, 0.5, 0.5, 1, 0.2)
	before := g.c.Snapshot(g.now)
	g.run(10*time.Second, 0.5, 0.5, 0.5, 1, 0.2)
	all := time.Duration(0)
	for i, tenant := range g.c.Snapshot(g.now).Tenants {
		used := tenant.Used - before.Tenants[i].Used
		t.Logf("%s: %v", tenant.Tenant, used)
		all += used
		if tenant.Tenant == "m" && (used-2*time.Second).Abs() > 200*time.Millisecond {
			t.Errorf("the latency tenant is billed %v of 10 s, want 2 s", used)
		}
	}
	if all < 9*time.Second || all > 10200*time.Millisecond {
		t.Errorf("%v are billed of 10 s", all)
	}
}

// A limit of a latency tenant is held exactly, by latency grants. They shut all the gates of the
// cohort, and its turn goes on afterwards.
func TestLatencyTenantWithALimitBesideACohort(t *testing.T) {
	g := newIdleCohort(t)
	g.step(Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency, Limit: 20}, Want: true})
	g.kindOf(5, latencyGrant)
	g.cohortWith(CrowdedSlice, true)
	ends := g.now.Add(time.Second)
	for g.c.latency.n > 0 && g.now < ends { // until its limit is reached
		g.now = g.now.Add(time.Millisecond)
		g.step(Tick{})
	}
	g.cohortWith(CrowdedSlice, false)
	used := func() time.Duration { return g.c.clients[5].tenant.Used() }
	before := used()
	g.run(10*time.Second, 0.5, 0.5, 0.5, 1)
	if got := used() - before; got < 1800*time.Millisecond || got > 2100*time.Millisecond {
		t.Errorf("a latency tenant with a limit of 20 %% used %v of 10 s", got)
	}
	g.is(Exclusive, reasonCohort)
}

// A latency tenant that drains does not keep others of the cohort from their turn.
func TestJoinsBesideALatencyDrain(t *testing.T) {
	g := newIdleCohort(t)
	g.step(Release{Client: 2, Epoch: g.c.clients[2].grant.epoch, Reason: Idle})
	g.step(Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency}, Want: true})
	g.c.Step(g.now, SetShare{Tenant: "m", Share: Share{Priority: Latency, Limit: 20}}) // it has no beside grant then
	if cl := g.c.clients[5]; !cl.grant.closes() {
		t.Fatalf("client 5 has %+v", cl.grant)
	}
	g.c.Step(g.now, Request{Client: 2})
	if !g.c.clients[2].grant.holds() {
		t.Error("client 2 waits for a latency tenant that drains")
	}
}

// The status says why beside a latency tenant the others do not share their turns.
func TestWhyNoCohortBesideALatencyTenant(t *testing.T) {
	for want, do := range map[Why]func(*autoGPU){
		reasonBusy:   func(g *autoGPU) { g.run(8*time.Second, 1, 1, 1, 1) },
		reasonUneven: func(g *autoGPU) { g.step(Attach{Client: 6, Tenant: "r", Share: Share{Request: 30}, Want: true}) },
	} {
		g := newIdleCohort(t)
		do(g)
		g.step(Attach{Client: 5, Tenant: "m", Share: Share{Priority: Latency}, Want: true})
		if way, why, refused := g.c.way(); way != "turns" || why.Why != reasonLimit || refused[1].Why != want || g.c.cohort.on {
			t.Errorf("clients share by %s (%v), refused %v, want turns (%s)", way, why, refused, want.Code())
		}
	}
}

// Where a slice cannot be shortened, as that of a group, the cohort keeps its slices beside a latency
// tenant, which is let in before it as before any holder.
func TestLatencyTenantBesideACohortWithAGroup(t *testing.T) {
	g := newGroupCohort(t, Share{})
	g.holders(1, 2, 3, 5, 6)
	g.step(Attach{Client: 7, Tenant: "m", Share: Share{Priority: Latency}, Want: true})
	g.kindOf(7, latencyGrant)
	g.is(Exclusive, reasonCohort)
	for cl := g.c.open.head; cl != nil; cl = cl.next {
		if cl.grant.state != paused {
			t.Errorf("client %d goes on: %+v", cl.id, cl.grant)
		}
	}
	if s := g.c.clients[1].slice; s != 0 && s < timeslice.LeastSlice {
		t.Errorf("client 1 has slices of %v", s)
	}
	g.step(Release{Client: 7, Epoch: g.c.clients[7].grant.epoch, Reason: Idle})
	g.holders(1, 2, 3, 5, 6)
}

// newGroupCohort is newCohort with clients 5 and 6, which are an overlap group with this share.
func newGroupCohort(t *testing.T, share Share) *autoGPU {
	g := newCohort(t)
	share.Overlap = "o"
	for id := base.ClientID(5); id <= 6; id++ {
		g.step(Attach{Client: id, Tenant: fmt.Sprint("m", id), Share: share, Want: true})
		g.step(Controls{Client: id, Slices: ControlUnseen, Bare: 2})
	}
	g.is(Exclusive, reasonCohort)
	return g
}

// An overlap group is one of the cohort: its clients have their turn with the others, and it is
// billed once for its part.
func TestGroupInACohort(t *testing.T) {
	g := newGroupCohort(t, Share{})
	g.holders(1, 2, 3, 5, 6)
	g.holders(4)
	g.holders(1, 2, 3, 5, 6)
	g.run(10*time.Second, 1, 1, 1, 1, 1, 1)
	before := g.c.Snapshot(g.now)
	g.run(20*time.Second, 1, 1, 1, 1, 1, 1)
	for i, tenant := range g.c.Snapshot(g.now).Tenants {
		used := tenant.Used - before.Tenants[i].Used
		t.Logf("%s: %v", tenant.Tenant, used)
		if used < 3800*time.Millisecond || used > 4200*time.Millisecond { // a fifth of 20 s
			t.Errorf("%s is billed %v of 20 s, want 4 s", tenant.Tenant, used)
		}
	}
	for id, n := range map[base.ClientID]Notice{1: {Bound: false}, 5: {Bound: true}} { // its channels cannot be taken off
		if told := g.c.clients[id].told; told.Bound != n.Bound {
			t.Errorf("client %d is told %+v", id, told)
		}
	}
	for id := base.ClientID(5); id <= 6; id++ {
		if g.c.clients[id].slice != 0 {
			t.Errorf("client %d of the group has slices of %v", id, g.c.clients[id].slice)
		}
	}
}

// A group with one other is a cohort, whoever held when it begins.
func TestGroupAndOneAreACohort(t *testing.T) {
	g := newGroupCohort(t, Share{})
	g.step(Gone{Client: 1})
	g.step(Gone{Client: 2})
	g.holders(3, 5, 6)
	for _, holders := range [][]base.ClientID{{3}, {4}, {5, 6}} {
		g.step(Controls{Client: 3, Slices: ControlRefused})
		if g.c.cohort.on {
			t.Fatal("the cohort goes on")
		}
		g.holders(holders...)
		g.c.auto.notBefore = g.now
		g.step(Controls{Client: 3, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
		for range 40 {
			if !g.c.cohort.on {
				g.run(250 * time.Millisecond)
			}
		}
		g.holders(3, 5, 6)
		g.holders(4)
		g.holders(3, 5, 6)
	}
	g.step(Gone{Client: 3})
	g.run(2 * time.Second)
	if g.c.cohort.on {
		t.Error("a group alone is a cohort")
	}
	g.holders(5, 6)
	g.holders(4)
}

// A group with a limit has turns of its own, and its limit is exact. It leaves the cohort when it
// gets one, and joins when it loses it, also in the middle of its turn.
func TestGroupWithALimitBesideACohort(t *testing.T) {
	g := newGroupCohort(t, Share{Limit: 20})
	g.holders(1, 2, 3)
	g.holders(5, 6)
	used := func() time.Duration { return g.c.clients[5].tenant.Used() }
	before := used()
	g.run(20*time.Second, 1, 1, 1, 1, 1, 1)
	if got := used() - before; got < 3900*time.Millisecond || got > 4100*time.Millisecond {
		t.Errorf("a group with a limit of 20 %% used %v of 20 s", got)
	}
	limit := func(n int) {
		for id := base.ClientID(5); id <= 6; id++ {
			g.step(SetShare{Tenant: fmt.Sprint("m", id), Share: Share{Overlap: "o", Limit: n}})
		}
	}
	g.holders(5, 6)
	limit(0)
	g.holders(1, 2, 3, 5, 6)
	limit(20)
	if g.c.clients[5].grant.holds() && g.c.clients[1].grant.holds() {
		t.Error("a group with a limit has the GPU together with others")
	}
	g.holders(1, 2, 3)
	g.holders(5, 6)
	g.is(Exclusive, reasonCohort)
}
