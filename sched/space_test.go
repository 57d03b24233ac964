// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// spaceGPU has tenants a and b, which want the GPU.
func spaceGPU(t *testing.T) *autoGPU {
	g := newAutoGPU(t, 0)
	for i, tenant := range []string{"a", "b"} {
		id := base.ClientID(i + 1)
		g.step(Attach{Client: id, Tenant: tenant, Want: true})
	}
	return g
}

// look lets time pass and looks at the GPU.
func (g *autoGPU) look(part float64, times int) Space {
	for range times {
		g.run(5 * time.Second)
		g.step(Filled{part})
	}
	return g.c.Snapshot(g.now).Space
}

// Tenants that leave most of the processors idle, look after look, are named. Whoever comes,
// or fills the GPU, ends that.
func TestRoomForAnOverlapGroup(t *testing.T) {
	g := spaceGPU(t)
	if r := g.look(0.15, spaceLooks-1); r.Tenants != nil {
		t.Errorf("named too early: %+v", r)
	}
	if r := g.look(0.2, 1); !slices.Equal(r.Tenants, []string{"a", "b"}) || r.Filled != 0.2 {
		t.Errorf("%+v, want a and b, with the most that they filled", r)
	}
	g.run(staleLook)
	if r := g.c.Snapshot(g.now).Space; r.Tenants != nil {
		t.Errorf("long after the latest look: %+v", r)
	}
	if r := g.look(0.9, 1); r.Tenants != nil {
		t.Errorf("they fill the GPU: %+v", r)
	}
	g.look(0.1, spaceLooks)
	g.step(Attach{Client: 3, Tenant: "c", Want: true})
	if r := g.look(0.1, 1); r.Tenants != nil {
		t.Errorf("others than before: %+v", r)
	}
	if r := g.look(0.1, spaceLooks-1); !slices.Equal(r.Tenants, []string{"a", "b", "c"}) {
		t.Errorf("%+v, want all three", r)
	}
}

// Nothing is said where a group is not possible or not wanted: one tenant, one that cannot be
// in a group, a mode that was set, or a driver that does not say.
func TestNoRoomForAnOverlapGroup(t *testing.T) {
	for name, change := range map[string]func(*autoGPU) float64{
		"one tenant":      func(g *autoGPU) float64 { g.step(Gone{Client: 2}); return 0.1 },
		"a group already": func(g *autoGPU) float64 { g.step(SetShare{"b", Share{Overlap: "x"}}); return 0.1 },
		"a gang":          func(g *autoGPU) float64 { g.step(SetShare{"b", Share{Gang: "x"}}); return 0.1 },
		"a latency tenant": func(g *autoGPU) float64 {
			g.step(SetShare{"b", Share{Priority: Latency}})
			return 0.1
		},
		"turns are set":    func(g *autoGPU) float64 { g.step(SetMode{Exclusive}); return 0.1 },
		"the driver fails": func(*autoGPU) float64 { return 0 },
	} {
		g := spaceGPU(t)
		part := change(g)
		if r := g.look(part, 2*spaceLooks); r.Tenants != nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
}
