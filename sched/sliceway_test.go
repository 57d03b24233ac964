// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// newSlicedGPU has clients that have proved their time slices and share by these.
func newSlicedGPU(t *testing.T, clients int) *autoGPU {
	g := newAutoGPU(t, clients)
	for id := range g.n {
		g.step(Controls{Client: id + 1, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	g.way("turns")
	g.run(2*time.Second, slices.Repeat([]float64{1}, clients)...)
	g.way("slices")
	return g
}

func (g *autoGPU) way(want string) {
	g.t.Helper()
	if way, why, _ := g.c.way(); way != want {
		g.t.Fatalf("clients share by %s (%v), want %s", way, why, want)
	}
}

// Whatever slices cannot do ends them at once, and is the reason that is shown; they begin
// again when it is over, but not at once.
func TestWhatEndsSlices(t *testing.T) {
	for name, test := range map[string]struct {
		begin, end base.Event
		why        Cause
	}{
		"a gang": {
			SetShare{Tenant: "t", Share: Share{Gang: "g"}}, SetShare{Tenant: "t"}, because(reasonGang)},
		"a driver that refuses": {
			Controls{Client: 2, Slices: ControlRefused}, Controls{Client: 2, Slices: ControlWorks}, Cause{reasonUnsliceable, 2, ControlRefused}},
		"a driver that fakes": {
			Controls{Client: 2, Slices: ControlFaked}, Controls{Client: 2, Slices: ControlWorks}, Cause{reasonUnsliceable, 2, ControlFaked}},
		"channels in no group": {
			Controls{Client: 2, Slices: ControlWorks, Bare: 8}, Controls{Client: 2, Slices: ControlWorks}, Cause{Why: reasonBare, Client: 2}},
		"a latency tenant beside several": {
			SetShare{Tenant: "t", Share: Share{Priority: Latency}}, SetShare{Tenant: "t"}, because(reasonLatency)},
	} {
		t.Run(name, func(t *testing.T) {
			g := newSlicedGPU(t, 3)
			g.step(Attach{Client: 3, Tenant: "t", Want: true})
			g.step(Controls{Client: 3, Slices: ControlWorks})
			g.way("slices")
			g.step(test.begin)
			if way, why, _ := g.c.way(); way != "turns" || why != test.why {
				t.Errorf("clients share by %s (%v), want turns (%v)", way, why, test.why)
			}
			g.step(test.end)
			g.run(minTurns - time.Second)
			g.way("turns")
			g.run(3 * time.Second)
			g.way("slices")
		})
	}
}

// An overlap group has a slice as any other: that of its MPS server, which nobody here sets.
// So it shares by slices, and nobody's slices grow beside it. Beside a latency tenant all but that
// one have their turn together: the group's slice cannot be shortened.
func TestGroupsInSlices(t *testing.T) {
	g := newSlicedGPU(t, 3)
	for _, id := range []base.ClientID{2, 3} {
		g.step(Gone{Client: id})
		g.step(Attach{Client: id, Tenant: fmt.Sprint("m", id), Share: Share{Overlap: "g"}, Want: true})
		g.step(Controls{Client: id, Slices: ControlUnseen, Bare: 2})
	}
	g.run(20*time.Second, 1, 1, 1)
	g.way("slices")
	for id, cl := range g.c.clients {
		if cl.slice != 0 {
			t.Errorf("client %d has a slice of %v", id, cl.slice)
		}
	}
	if got := g.c.Snapshot(g.now).Tenants; len(got) != 2 {
		t.Fatalf("%d tenants, want the group and one", len(got))
	}
	for _, tenant := range g.c.tenants {
		if tenant.clients > 0 && (tenant.gets < 480 || tenant.gets > 520) {
			t.Errorf("tenant %q gets %d of 1000, want half: members have the slice of their group", tenant.displayName(), tenant.gets)
		}
	}
	g.step(Attach{Client: 4, Tenant: "l", Share: Share{Priority: Latency}, Want: true})
	g.is(Exclusive, reasonCohort)
	if g.c.besideAllowed() {
		t.Error("the latency tenant runs beside the group, whose slice is long")
	}
}

// The user's word goes before.
func TestModesAsSetHaveNoSlices(t *testing.T) {
	for _, mode := range []Mode{Exclusive, Concurrent} {
		g := newSlicedGPU(t, 2)
		g.c.clients[1].slice, g.c.slices.set = time.Millisecond, true // as if it had been told
		g.step(SetMode{mode})
		if g.c.sliced() || g.c.effective != mode || g.c.clients[1].slice != 0 {
			t.Errorf("mode %v: sliced %t, %v, slice %v", mode, g.c.sliced(), g.c.effective, g.c.clients[1].slice)
		}
	}
}

// A client that comes while others share by slices joins them, and has some time to prove
// that it can be sliced.
func TestOneComesWhileOthersAreSliced(t *testing.T) {
	g := newSlicedGPU(t, 2)
	g.step(Attach{Client: 3, Want: true})
	g.way("slices")
	if g.c.clients[3].grant == nil {
		t.Error("it has no grant")
	}
	g.run(proofPatience - 500*time.Millisecond)
	g.way("slices")
	g.run(2 * time.Second)
	if way, why, _ := g.c.way(); way != "turns" || why != (Cause{Why: reasonUnproved, Client: 3}) {
		t.Errorf("clients share by %s (%v)", way, why)
	}
}

// Each tenant is billed for its part, not for all the time in which its gate is open.
func TestBillsInSlices(t *testing.T) {
	g := newSlicedGPU(t, 2)
	used := func() time.Duration { return g.c.Snapshot(g.now).Tenants[0].Used }
	before := used()
	g.run(10*time.Second, 1, 1)
	if got := used() - before; got < 4800*time.Millisecond || got > 5100*time.Millisecond {
		t.Errorf("one of two is billed %v of 10 s", got)
	}
}
