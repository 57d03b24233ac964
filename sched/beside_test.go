// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// newBesideGPU has a latency tenant's client 1 beside clients 2 and 3, which take turns.
func newBesideGPU(t *testing.T, mode Mode) *autoGPU {
	g := &autoGPU{t: t, c: New(Config{Mode: mode}), n: 3, now: base.Time(time.Hour)}
	for id := base.ClientID(2); id <= 3; id++ {
		g.step(Attach{Client: id, Want: true})
		g.step(Controls{Client: id, Slices: ControlWorks, Channels: ControlWorks, Groups: 1})
	}
	g.step(Attach{Client: 1, Tenant: "l", Share: Share{Priority: Latency}})
	g.step(Request{1})
	return g
}

func (g *autoGPU) kindOf(id base.ClientID, want grantKind) {
	g.t.Helper()
	if gr := g.c.clients[id].grant; gr == nil || gr.kind != want {
		g.t.Fatalf("the grant of client %d is %+v, want kind %d", id, gr, want)
	}
}

// letIn lets time pass until the client has a grant.
func (g *autoGPU) letIn(id base.ClientID) {
	g.t.Helper()
	for end := g.now.Add(10 * time.Second); g.c.clients[id].grant == nil; g.step(Tick{}) {
		if g.now = g.now.Add(5 * time.Millisecond); g.now > end {
			g.t.Fatalf("client %d is not let in", id)
		}
	}
}

// The gate of nobody is shut for a latency tenant where the others' slices are short.
func TestBesideNobodyIsPaused(t *testing.T) {
	g := newBesideGPU(t, Auto)
	g.kindOf(1, besideGrant)
	holder := func() base.ClientID {
		cl := g.c.open.head
		if g.c.open.n != 1 || cl.grant.state != granted {
			t.Fatalf("%d hold in turns, the first %+v", g.c.open.n, cl.grant)
		}
		return cl.id
	}
	first := holder()
	g.now = g.now.Add(DefaultQuantum)
	g.step(Tick{})
	if holder() == first {
		t.Error("the turn of the holder did not end")
	}
	g.kindOf(1, besideGrant)
	for id := base.ClientID(2); id <= 3; id++ {
		if s := g.c.clients[id].slice; s != LatencySlice {
			t.Errorf("client %d has slices of %v", id, s)
		}
	}
}

// Whatever a beside grant rests on, its end ends the grant, and the tenant is let in as
// where slices cannot be set: the holder's gate is shut meanwhile.
func TestWhatEndsBeside(t *testing.T) {
	greedy := func(g *autoGPU) {
		g.run(3*besideWindow, 1)
		g.letIn(1)
	}
	for name, test := range map[string]struct {
		do   func(*autoGPU)
		kind grantKind
	}{
		"a driver that refuses": {func(g *autoGPU) { g.step(Controls{Client: 3, Slices: ControlRefused}) }, latencyGrant},
		"a driver that fakes":   {func(g *autoGPU) { g.step(Controls{Client: 3, Slices: ControlFaked}) }, latencyGrant},
		"one without proof": {func(g *autoGPU) {
			g.step(Attach{Client: 4, Want: true})
			g.kindOf(1, besideGrant) // it has a while to prove its controls
			g.run(proofPatience + besideWindow)
			g.letIn(1)
		}, latencyGrant},
		"the mode":     {func(g *autoGPU) { g.step(SetMode{Exclusive}) }, latencyGrant},
		"its limit":    {func(g *autoGPU) { g.step(SetShare{"l", Share{Priority: Latency, Limit: 50}}) }, latencyGrant},
		"it is greedy": {greedy, latencyGrant},
		"one that is idle and says so, later": {func(g *autoGPU) {
			greedy(g)
			g.run(besidePause)
			g.letIn(1)
			g.step(Release{Client: 1, Epoch: g.c.clients[1].grant.epoch, Reason: Idle})
			g.step(Request{1})
		}, besideGrant},
	} {
		t.Run(name, func(t *testing.T) {
			g := newBesideGPU(t, Auto)
			g.kindOf(1, besideGrant)
			test.do(g)
			g.kindOf(1, test.kind)
			if shut := g.c.open.n == 0 || g.c.open.head.grant.state == paused; shut != (test.kind == latencyGrant) {
				t.Errorf("the gates of others are shut: %t", shut)
			}
		})
	}
}

// What a latency tenant uses is billed to it, and not to the holder.
func TestBillsBeside(t *testing.T) {
	g := newBesideGPU(t, Auto)
	used := func() (of []time.Duration) {
		for _, ts := range g.c.Snapshot(g.now).Tenants {
			of = append(of, ts.Used)
		}
		return
	}
	g.run(3*time.Second, 0.2)
	before := used()
	g.run(10*time.Second, 0.2)
	after := used()
	want := map[int]time.Duration{0: 4 * time.Second, 1: 4 * time.Second, 2: 2 * time.Second} // clients 2 and 3, "l"
	for i, w := range want {
		if got := after[i] - before[i]; (got - w).Abs() > w/10 {
			t.Errorf("tenant %d is billed %v of 10 s, want %v", i, got, w)
		}
	}
}
