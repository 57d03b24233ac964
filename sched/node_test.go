// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

// TestSuspensionIsTheNodes suspends the machine while a holder of one GPU drains. The
// other GPU, where nothing was due, is stepped first: the drain has its grace period
// all the same.
func TestSuspensionIsTheNodes(t *testing.T) {
	n := NewNode()
	a := New(Config{Quantum: 100 * time.Millisecond, Grace: time.Second, GPU: "a", Node: n})
	b := New(Config{Quantum: 100 * time.Millisecond, Grace: time.Second, GPU: "b", Node: n})
	at := func(d time.Duration) Time { return Time(d) }

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
