// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
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
		begin, end Event
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
	for _, id := range []ClientID{2, 3} {
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
			t.Errorf("tenant %q gets %d of 1000, want half: members have the slice of their group", tenant.name, tenant.gets)
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

// windows feeds the search with what clients get at a length, until it has settled.
func windows(t *testing.T, s *search, now *Time, rates func(longest time.Duration) speeds) (tried []time.Duration) {
	for range 40 {
		*now = now.Add(sliceWindow)
		s.window(*now, rates(s.longest))
		if s.settled() {
			return tried
		}
		tried = append(tried, s.longest)
	}
	t.Fatalf("the search does not end: %v", tried)
	return nil
}

func TestSearch(t *testing.T) {
	now := Time(time.Hour)
	busy := func(d time.Duration) speeds {
		if d == 0 {
			return speeds{{1, 92}, {2, 920}}
		}
		return speeds{{1, 100}, {2, 1000}}
	}
	s := newSearch(false)
	windows(t, &s, &now, busy)
	if s.longest != MaxSlice {
		t.Errorf("two that keep the GPU busy have %v", s.longest)
	}
	// One waits for a slice of the other before each burst.
	bursts := func(d time.Duration) speeds {
		return speeds{{1, 100}, {3, 1 / (0.001 + max(d, DriverSlice).Seconds())}}
	}
	tried := windows(t, &s, &now, bursts)
	if s.longest != 0 || len(tried) > 3 {
		t.Errorf("with one that works in bursts the length is %v, after %v", s.longest, tried)
	}
	retries := 0
	for end := now.Add(10 * time.Minute); now < end; now = now.Add(sliceWindow) {
		before := s.longest
		s.window(now, bursts(s.longest))
		if before == 0 && s.longest > 0 {
			retries++
		}
	}
	if retries == 0 || retries > 6 {
		t.Errorf("longer slices were tried again %d times in 10 minutes", retries)
	}
	// It has ended; nobody waits any more. The search finds that by itself.
	for end := now.Add(maxRetry + time.Minute); now < end && s.longest < MaxSlice; now = now.Add(sliceWindow) {
		s.window(now, busy(s.longest))
	}
	if s.longest != MaxSlice {
		t.Errorf("after the one with bursts has ended the length is %v", s.longest)
	}
	// A program that does something else now is found out soon.
	for range 15 {
		now = now.Add(sliceWindow)
		s.window(now, busy(s.longest))
	}
	other := func(d time.Duration) speeds {
		return speeds{{1, 100}, {2, 5 / (0.001 + max(d, DriverSlice).Seconds())}}
	}
	for range 20 {
		now = now.Add(sliceWindow)
		s.window(now, other(s.longest))
	}
	if s.longest > 2*DriverSlice {
		t.Errorf("after one has begun to work in bursts the length is %v", s.longest)
	}
}

// Programs that never fill a slice have the driver's own, although measurements of their
// speed scatter: longer ones bring them nothing.
func TestSearchAmongNoise(t *testing.T) {
	const seeds, clients = 200, 3
	long, windows := 0, 0
	for seed := range uint64(seeds) {
		r := rand.New(rand.NewPCG(seed, 1))
		s, now := newSearch(false), Time(time.Hour)
		for end := now.Add(10 * time.Minute); now < end; now = now.Add(sliceWindow) {
			rates := speeds{}
			for id := range ClientID(clients) {
				rates = append(rates, speed{id, 1000 * (1 + 0.05*r.NormFloat64())})
			}
			windows++
			if s.longest > 0 {
				long++
			}
			s.window(now, rates)
		}
	}
	if part := float64(long) / float64(windows); part > 0.1 {
		t.Errorf("longer slices for %.0f %% of the time", 100*part)
	} else {
		t.Logf("longer slices for %.1f %% of the time", 100*part)
	}
}
