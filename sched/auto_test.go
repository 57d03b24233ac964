// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// autoGPU is a GPU in mode Auto with clients that all want it, and a clock.
type autoGPU struct {
	t *testing.T
	c *GPU
	n base.ClientID

	now    base.Time
	slowed int // their calls are so much slower beside each other
}

func newAutoGPU(t *testing.T, clients int) *autoGPU {
	g := &autoGPU{t: t, c: New(Config{Mode: Auto}), n: base.ClientID(clients), now: base.Time(time.Hour)}
	for id := range g.n {
		g.step(Attach{Client: id + 1, Want: true})
	}
	return g
}

func (g *autoGPU) step(ev base.Event) {
	g.t.Helper()
	var acts []base.Action
	acts = append(acts, g.c.Step(g.now, ev)...)
	if err := g.c.Check(); err != nil {
		g.t.Fatalf("after %v: %v", base.Text(ev), err)
	}
	for _, a := range acts {
		if r, ok := a.(Revoke); ok {
			calls := g.now.Sub(g.c.clients[r.Client].grant.since) / (5 * time.Millisecond)
			g.step(Release{Client: r.Client, Epoch: r.Epoch, Reason: Revoked, Calls: uint64(calls)})
			g.step(Request{Client: r.Client})
		}
	}
}

// run lets time pass; busy are the parts of the time in which the GPU has work of each
// client while its gate is open.
func (g *autoGPU) run(d time.Duration, busy ...float64) {
	const every = 250 * time.Millisecond
	for range d / every {
		until := g.now.Add(every)
		for g.now < until {
			g.now = g.now.Add(5 * time.Millisecond)
			g.step(Tick{})
		}
		for i, b := range busy {
			samples := 50 // a look each 5 ms while the gate is open
			if g.c.effective == Exclusive {
				samples /= int(g.n)
			}
			g.step(timeslice.Utilization{Client: base.ClientID(i + 1), Samples: samples, Busy: int(b*float64(samples) + 0.5), Calls: samples / max(g.slowed, 1)})
		}
	}
}

func (g *autoGPU) is(want Mode, why Why) {
	g.t.Helper()
	if got := g.c.auto.cause; g.c.effective != want || got.Why != why {
		g.t.Fatalf("%v (%v), want %v (%s)", g.c.effective, got, want, why.Code())
	}
}

func TestAutoLeavesTurnsThatWaste(t *testing.T) {
	g := newAutoGPU(t, 3)
	g.run(2*time.Second, 1, 1, 1)
	g.is(Exclusive, reasonUnproved)
	g.run(2*time.Second, 0.45, 0.45, 0.45) // three that decode
	g.is(Concurrent, reasonGaps)
	g.run(10*time.Second, 0.7, 0.7, 0.7) // at the same time they are less idle
	g.is(Concurrent, reasonGaps)
	g.slowed = 6 // and then they keep the GPU busy, and get on more slowly than in turns
	g.run(5*time.Second, 1, 1, 0.99)
	g.is(Exclusive, reasonUnproved)
}

// One that saturates the GPU beside one that leaves gaps.
func TestAutoMixed(t *testing.T) {
	g := newAutoGPU(t, 2)
	g.run(2*time.Second, 1, 0.5)
	g.is(Concurrent, reasonGaps)
	g.run(10*time.Second, 1, 0.7)
	g.is(Concurrent, reasonGaps)
}

func TestAutoKnowsTooLittle(t *testing.T) {
	g := newAutoGPU(t, 2)
	g.run(10 * time.Second) // shims that tell nothing
	g.is(Exclusive, reasonUnproved)
	g.step(timeslice.Utilization{Client: 1, Samples: 10, Busy: 0})
	g.run(2 * time.Second)
	g.is(Exclusive, reasonUnproved)
	g.step(timeslice.Utilization{Client: 99, Samples: 1000, Busy: 0}) // nobody
	g.run(2 * time.Second)
	g.is(Exclusive, reasonUnproved)
}

// A client that claims more samples than it can have taken weighs no more than one that
// had the GPU all the time.
func TestAutoBoundsAClaim(t *testing.T) {
	g := newAutoGPU(t, 8)
	for range 8 {
		g.run(250*time.Millisecond, 1, 1, 1, 1, 1, 1, 1, 1)
		g.step(timeslice.Utilization{Client: 1, Samples: 1_000_000, Busy: 850_000})
	}
	g.is(Exclusive, reasonUnproved)
}

// Memory that fits leaves the way as it is, however little is left.
func TestMemoryThatFitsDecidesNothing(t *testing.T) {
	g := newAutoGPU(t, 2)
	g.run(2*time.Second, 0.5, 0.5)
	g.is(Concurrent, reasonGaps)
	g.step(residency.Reserve{Client: 1, Total: 47})
	g.step(residency.Reserve{Client: 2, Total: 47})
	g.run(2*time.Second, 0.5, 0.5)
	g.is(Concurrent, reasonGaps)
}
