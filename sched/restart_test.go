// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// restart returns the GPU of a scheduler that starts 100 ms later, from what the one before has
// recorded, and what each client holds.
func (g *autoGPU) restart() (*autoGPU, map[base.ClientID]base.Epoch) {
	g.t.Helper()
	held := map[base.ClientID]base.Epoch{}
	for id, cl := range g.c.clients {
		if cl.grant.holds() {
			held[id] = cl.grant.epoch
		}
	}
	rec := g.c.persisted
	cfg := Config{Mode: g.c.mode, LastEpoch: rec.Epoch, Way: rec.Way, Intact: true}
	h := &autoGPU{t: g.t, c: New(cfg), n: g.n, now: g.now.Add(100 * time.Millisecond)}
	if rec.Unrecorded {
		h.step(RestoreUnknown{rec.Epoch})
	}
	for _, x := range rec.Holders {
		if x.Client != 0 {
			h.step(Restore{Client: x.Client, Epoch: x.Epoch, Shared: x.Shared})
		}
	}
	return h, held
}

// reconnect has clients come back one after the other within that time, and fails if one that held
// may not go on.
func (g *autoGPU) reconnect(within time.Duration, held map[base.ClientID]base.Epoch, attach ...Attach) {
	g.t.Helper()
	for i, ev := range attach {
		ev.Held = held[ev.Client]
		acts := slices.Clone(g.c.Step(g.now, ev))
		if err := g.c.Check(); err != nil {
			g.t.Fatalf("after %v: %v", base.Text(ev), err)
		}
		want := Adopt{ev.Client, ev.Held, g.c.effective == Concurrent, g.c.cohort.on && !ev.Share.limited()} // its new page says the same of its turn
		if ev.Held != 0 && acts[0] != base.Action(want) {
			g.t.Fatalf("%v: %v, want %+v first", base.Text(ev), acts, want)
		}
		g.step(Controls{Client: ev.Client, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
		for _, back := range attach[:i+1] {
			if held[back.Client] != 0 {
				g.goesOn(back.Client, held[back.Client])
			}
		}
		g.now = g.now.Add(within / time.Duration(len(attach)))
	}
}

func (g *autoGPU) goesOn(id base.ClientID, epoch base.Epoch) {
	g.t.Helper()
	if cl := g.c.clients[id]; cl.grant == nil || cl.grant.state != granted || cl.grant.epoch != epoch || g.c.counters.Revokes > 0 {
		g.t.Fatalf("client %d held epoch %d, and has %+v; %d grants were revoked", id, epoch, cl.grant, g.c.counters.Revokes)
	}
}

// attachAll is n clients that want nothing beyond what they hold; those of the given tenants first.
func attachAll(n base.ClientID, tenants ...Attach) []Attach {
	all := slices.Clone(tenants)
	for id := base.ClientID(1); id <= n; id++ {
		if !slices.ContainsFunc(tenants, func(a Attach) bool { return a.Client == id }) {
			all = append(all, Attach{Client: id})
		}
	}
	return all
}

// Where clients share the GPU by slices, a restart disturbs none of them.
func TestRestartKeepsSlices(t *testing.T) {
	for _, n := range []int{2, 8, 12, 40} {
		g, held := newSlicedGPU(t, n).restart()
		if len(held) != n {
			t.Fatalf("%d of %d clients held", len(held), n)
		}
		g.reconnect(500*time.Millisecond, held, attachAll(base.ClientID(n))...)
		for range 20 {
			g.run(time.Second, slices.Repeat([]float64{1}, n)...)
			g.way("slices")
			for id, epoch := range held {
				g.goesOn(id, epoch)
			}
		}
	}
}

// A latency tenant that was beside others by slices, because they leave gaps, is so again; also
// where it comes back after them.
func TestRestartKeepsSlicesBesideALatencyTenant(t *testing.T) {
	for name, last := range map[string]bool{"first": false, "last": true} {
		g := newSlicedGPU(t, 3)
		latency := Attach{Client: 3, Tenant: "l", Share: Share{Priority: Latency}}
		g.step(latency)
		g.run(20*time.Second, 0.5, 0.5, 0.1)
		g.way("slices")
		g, held := g.restart()
		all := attachAll(3, latency)
		if last {
			slices.SortFunc(all, func(a, b Attach) int { return cmp.Compare(a.Client, b.Client) })
		}
		g.reconnect(500*time.Millisecond, held, all...)
		g.run(10*time.Second, 0.5, 0.5, 0.1)
		g.way("slices")
		if n := g.c.counters.Revokes; n > 0 {
			t.Errorf("the latency tenant comes back %s: %d grants are revoked", name, n)
		}
	}
}

// The same with the driver's own slices.
func TestRestartKeepsTheDriversSlices(t *testing.T) {
	g := newAutoGPU(t, 12)
	busy := slices.Repeat([]float64{0.4}, 12)
	g.run(8*time.Second, busy...)
	g.is(Concurrent, reasonGaps)
	g, held := g.restart()
	for i, a := range attachAll(12) {
		a.Held = held[a.Client]
		g.step(a)
		g.now = g.now.Add(40 * time.Millisecond)
		g.goesOn(base.ClientID(i+1), a.Held)
	}
	g.run(10*time.Second, busy...)
	g.is(Concurrent, reasonGaps)
	for id, epoch := range held {
		g.goesOn(id, epoch)
	}
}

// nineOfACohort has clients 1 to 9, and a tenant with a limit, which is client 10 and wants the GPU
// or not. The cohort has its turn.
func nineOfACohort(t *testing.T, wants bool) (*autoGPU, Attach) {
	g := newAutoGPU(t, 9)
	limited := Attach{Client: 10, Tenant: "l", Share: Share{Limit: 30}, Want: wants}
	g.step(limited)
	for id := range base.ClientID(10) {
		g.step(Controls{Client: id + 1, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	g.run(8*time.Second, slices.Repeat([]float64{1}, 9)...)
	g.is(Exclusive, reasonCohort)
	g.holders(1, 2, 3, 4, 5, 6, 7, 8, 9)
	return g, limited
}

// A cohort goes on with its turn.
func TestRestartKeepsACohort(t *testing.T) {
	g, limited := nineOfACohort(t, false)
	g, held := g.restart()
	g.reconnect(500*time.Millisecond, held, attachAll(10, limited)...)
	for range 20 {
		g.run(time.Second, slices.Repeat([]float64{1}, 9)...)
		g.is(Exclusive, reasonCohort)
		for id, epoch := range held {
			g.goesOn(id, epoch)
		}
	}
}

// Where the tenant with the limit waits, the turn of the cohort ends when all are back, and both
// take turns as before: the GPU is never left idle.
func TestRestartedCohortTakesTurns(t *testing.T) {
	for name, order := range map[string]func(a, b Attach) int{
		"first": func(a, b Attach) int { return cmp.Compare(b.Client, a.Client) },
		"last":  func(a, b Attach) int { return cmp.Compare(a.Client, b.Client) },
	} {
		t.Run(fmt.Sprintf("it is back %s", name), func(t *testing.T) {
			g, limited := nineOfACohort(t, true)
			g, held := g.restart()
			all := attachAll(10, limited)
			slices.SortFunc(all, order)
			g.reconnect(500*time.Millisecond, held, all...)
			idle := 0
			for range 1000 {
				g.now = g.now.Add(5 * time.Millisecond)
				g.step(Tick{})
				if g.c.open.n == 0 {
					idle++
				}
			}
			g.is(Exclusive, reasonCohort)
			if idle > 0 {
				t.Errorf("nobody may submit at %d of 1000 moments", idle)
			}
			for _, tenant := range g.c.Snapshot(g.now).Tenants {
				if tenant.Tenant == "l" && (tenant.Used < 450*time.Millisecond || tenant.Used > 600*time.Millisecond) { // of ten that want it
					t.Errorf("of 5 s the tenant with a limit has %v, want about a tenth", tenant.Used)
				}
			}
		})
	}
}

// The turn of a tenant with a limit beside a cohort is its own.
func TestRestartKeepsATurnBesideACohort(t *testing.T) {
	g, limited := nineOfACohort(t, true)
	g.holders(10)
	g, held := g.restart()
	g.reconnect(10*time.Millisecond, held, attachAll(10, limited)...) // its limit allows 25 ms
	g.holders(10)
	g.goesOn(10, held[10])
	for id := range base.ClientID(9) {
		g.step(Request{id + 1})
	}
	g.holders(1, 2, 3, 4, 5, 6, 7, 8, 9)
}

// One of a cohort that does not come back keeps the others from nothing.
func TestRestartedCohortMissesOne(t *testing.T) {
	g, limited := nineOfACohort(t, true)
	g, held := g.restart()
	g.reconnect(500*time.Millisecond, held, attachAll(10, limited)[:9]...)
	g.run(proofPatience)
	if g.c.counters.Revokes == 0 {
		t.Error("the turn of the cohort goes on")
	}
	g.run(DefaultQuantum + DefaultGrace)
	if g.c.counters.Fences != 1 {
		t.Errorf("%d fences, want one: of the client that is not back", g.c.counters.Fences)
	}
	g.holders(10)
	g.holders(1, 2, 3, 4, 5, 6, 7, 8)
}

// What came meanwhile, and what the user set meanwhile, is heeded.
func TestWhatEndsTheResumedWay(t *testing.T) {
	for name, event := range map[string]base.Event{
		"a gang comes":          Attach{Client: 9, Tenant: "g", Share: Share{Gang: "g"}, Want: true},
		"the user wants turns":  SetMode{Exclusive},
		"a core limit":          SetShare{Tenant: "t", Share: Share{Limit: 50}},
		"a driver that refuses": Controls{Client: 2, Slices: ControlRefused},
	} {
		g := newSlicedGPU(t, 3)
		g.step(Attach{Client: 3, Tenant: "t", Want: true})
		g, held := g.restart()
		g.reconnect(100*time.Millisecond, held, attachAll(3, Attach{Client: 3, Tenant: "t"})...)
		g.way("slices")
		if g.step(event); g.c.sliced() {
			t.Errorf("%s: slices go on", name)
		}
	}
	g := newSlicedGPU(t, 3)
	g.c.mode = Exclusive // another option of the next scheduler
	h, _ := g.restart()
	if h.c.sliced() || h.c.effective != Exclusive {
		t.Error("slices begin in mode exclusive")
	}
}

// Without anybody who held, a restart begins as ever.
func TestRestartWithoutHolders(t *testing.T) {
	c := New(Config{Mode: Auto, LastEpoch: 5, Way: WaySlices, Intact: true})
	c.Step(1, Attach{Client: 1, Want: true})
	if c.sliced() || c.persisted.Way != WayTurns {
		t.Errorf("slices begin: %t, %v is recorded", c.sliced(), c.persisted)
	}
}
