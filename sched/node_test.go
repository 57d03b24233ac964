// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// TestSuspensionIsTheNodes suspends the machine while a holder of one GPU drains. The
// other GPU, where nothing was due, is stepped first: the drain has its grace period
// all the same.
func TestSuspensionIsTheNodes(t *testing.T) {
	n := NewNode()
	a := New(Config{Quantum: 100 * time.Millisecond, Grace: time.Second, GPU: "a", Node: n})
	b := New(Config{Quantum: 100 * time.Millisecond, Grace: time.Second, GPU: "b", Node: n})
	at := func(d time.Duration) base.Time { return base.Time(d) }

	b.Step(0, Attach{Client: 3})
	a.Step(0, Attach{Client: 1, Want: true})
	a.Step(0, Attach{Client: 2, Want: true})
	a.Step(at(100*time.Millisecond), Tick{}) // revokes client 1
	b.Step(at(300*time.Millisecond), Request{Client: 3})

	b.Step(at(time.Hour), Release{Client: 3, Epoch: 1, Reason: Idle})
	a.Step(at(time.Hour+10*time.Millisecond), Tick{})
	if s := a.Snapshot(at(time.Hour + 10*time.Millisecond)); s.Counters.Fences != 0 || s.Clients[0].State != StateDraining {
		t.Fatalf("client 1 is %v after a suspension, fences %d", s.Clients[0].State, s.Counters.Fences)
	}
	// 200 ms of the grace period have passed before the suspension, and 10 ms after it.
	want := at(time.Hour + 800*time.Millisecond)
	if got, ok := a.Deadline(); !ok || got != want {
		t.Errorf("the grace period ends at %v, %t, want %v", time.Duration(got), ok, time.Duration(want))
	}
	if s := b.Snapshot(at(time.Hour)); s.Clients[0].Held != 0 {
		t.Errorf("client 3 held its GPU for %v, most of it in the suspension", s.Clients[0].Held)
	}
	a.Step(want, Tick{})
	if s := a.Snapshot(want); s.Counters.Fences != 1 || s.Clients[0].State != StateFenced {
		t.Errorf("client 1 is %v after its grace period", s.Clients[0].State)
	}
}

// TestLateTicks has each tick come late, as on a machine that is busy: turns end all the same, and
// the time of a turn is billed.
func TestLateTicks(t *testing.T) {
	for _, late := range []time.Duration{base.MaxLate + time.Millisecond, 150 * time.Millisecond, base.Suspension - time.Millisecond} {
		const quantum = 10 * time.Second
		c := New(Config{Quantum: quantum, Grace: time.Second, Mode: Exclusive})
		c.Step(0, Attach{Client: 1, Tenant: "a", Want: true})
		c.Step(0, Attach{Client: 2, Tenant: "b", Want: true})
		ticks := 0
		now := base.Time(0)
		for ; ticks < 10 && c.counters.Revokes == 0; ticks++ {
			at, _ := c.Deadline()
			now = at.Add(late)
			c.Step(now, Tick{})
		}
		if most := base.Time(quantum).Add(base.MaxLate + 2*late); c.counters.Revokes != 1 || now > most {
			t.Errorf("ticks are %v late: %d revokes after %d ticks at %v, want one before %v", late, c.counters.Revokes, ticks, time.Duration(now), time.Duration(most))
		}
		if used := c.Snapshot(now).Tenants[0].Used; used < quantum-base.MaxLate || used > quantum+base.MaxLate {
			t.Errorf("ticks are %v late: the turn of %v is billed as %v", late, quantum, used)
		}
	}
}

// TestLateTickReadsFirst has a client release while the scheduler does not run: the release is read
// after a late tick, and the client is not fenced.
func TestLateTickReadsFirst(t *testing.T) {
	c := New(Config{Quantum: 100 * time.Millisecond, Grace: time.Second, Mode: Exclusive})
	c.Step(0, Attach{Client: 1, Want: true})
	c.Step(0, Attach{Client: 2, Want: true})
	at, _ := c.Deadline()
	c.Step(at, Tick{}) // revokes client 1
	at, _ = c.Deadline()
	now := at.Add(500 * time.Millisecond)
	c.Step(now, Tick{})
	if got := c.counters.Fences; got != 0 {
		t.Fatalf("%d fences before the release is read", got)
	}
	c.Step(now.Add(time.Millisecond), Release{Client: 1, Epoch: 1, Reason: Revoked})
	if s := c.Snapshot(now); s.Clients[1].State != StateHolding {
		t.Errorf("client 2 is %v", s.Clients[1].State)
	}
}

// TestLateTickOfSeveralGPUs has one tick late for two GPUs: the clock does not pass what is due
// first by more than base.MaxLate before that GPU is stepped.
func TestLateTickOfSeveralGPUs(t *testing.T) {
	n := NewNode()
	slow := New(Config{Quantum: 600 * time.Millisecond, GPU: "a", Node: n})
	fast := New(Config{Quantum: 200 * time.Millisecond, GPU: "b", Node: n})
	for id := range base.ClientID(2) {
		slow.Step(0, Attach{Client: id + 1, Want: true})
		fast.Step(0, Attach{Client: id + 3, Want: true})
	}
	due, _ := fast.deadline()
	for i := range 5 {
		slow.Step(base.Time(800*time.Millisecond).Add(time.Duration(i)*time.Millisecond), Tick{})
		if n.clock.Now > due.Add(base.MaxLate) {
			t.Fatalf("after %d steps of the other GPU the clock is at %v, and a turn is due at %v", i+1, time.Duration(n.clock.Now), time.Duration(due))
		}
	}
}
