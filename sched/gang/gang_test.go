// SPDX-License-Identifier: Apache-2.0

package gang

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// rank is the one client of a gang on a GPU.
type rank struct {
	gpu     string
	waits   bool // for a grant
	granted bool
	revoked base.Time // while it drains
}

func (r *rank) GPU() string                 { return r.gpu }
func (r *rank) Counts() bool                { return true }
func (r *rank) Asks() bool                  { return r.waits }
func (r *rank) Calls() bool                 { return r.waits }
func (r *rank) Live() bool                  { return r.granted }
func (r *rank) Manned() bool                { return true }
func (r *rank) Broke() bool                 { return false }
func (r *rank) Drains() (base.Time, bool)   { return r.revoked, r.revoked != 0 }
func (r *rank) Alone() bool                 { return true }
func (r *rank) Grace() time.Duration        { return time.Second }
func (r *rank) Binds() base.Time            { return 0 }
func (r *rank) Moves() bool                 { return false }
func sit(gs *Gangs, name, gpu string) *Slot { return gs.Join(name, false, &rank{gpu: gpu}) }

// A gang has both of its GPUs or none, and while one rank drains the other one, which has drained and
// waits, makes a call.
func TestTurnOfAGang(t *testing.T) {
	now := base.Time(time.Hour)
	gs := New(func() base.Time { return now })
	a, b := sit(gs, "job", "0"), sit(gs, "job", "1")
	ranks := []*rank{a.m.(*rank), b.m.(*rank)}
	phase := func(want Phase, after string) {
		t.Helper()
		if a.Phase() != want || b.Phase() != want {
			t.Fatalf("%s: phase %d, want %d", after, a.Phase(), want)
		}
		if err := gs.Check(); err != nil {
			t.Fatal(err)
		}
	}
	ranks[0].waits = true
	a.Follow()
	phase(Wanted, "a rank asks")
	a.SetDue()
	phase(Wanted, "its turn has come on one GPU")
	b.SetDue()
	phase(Called, "on both")
	if !a.IsCalled() || !b.IsCalled() {
		t.Fatal("it is not next on both GPUs")
	}
	a.Keep()
	phase(Called, "one GPU is kept")
	b.Keep()
	phase(Running, "both are")
	for i, s := range []*Slot{a, b} {
		s.Play()
		ranks[i].waits, ranks[i].granted = false, true
	}
	a.Drain()
	a.Stop()
	b.Drain()
	phase(Stopping, "the turn is over")
	ranks[0].granted, ranks[0].waits = false, true // it has drained, and asks again
	ranks[1].revoked = now
	a.Released()
	if at, ok := a.Due(); !ok || at != now.Add(stepAfter) || a.Step() {
		t.Fatalf("the other rank is to make a call at %v (%t), want in 5 ms", time.Duration(at), ok)
	}
	if now = now.Add(stepAfter); !a.Step() || b.Step() {
		t.Fatal("not the rank that has drained makes a call")
	}
	ranks[1].granted, ranks[1].revoked = false, 0
	a.Follow()
	a.Free()
	b.Free()
	phase(Wanted, "all have drained, and one waits")
}

// Two gangs on the same GPUs: whoever is called first is before the other one on both. One that comes to
// a new GPU while it runs lacks that, and makes way.
func TestTicketsRise(t *testing.T) {
	gs := New(func() base.Time { return 1 })
	x0, x1, y0, y1 := sit(gs, "x", "0"), sit(gs, "x", "1"), sit(gs, "y", "0"), sit(gs, "y", "1")
	for _, s := range []*Slot{x0, y0, y1, x1} {
		s.m.(*rank).waits = true
		s.Follow()
		s.SetDue()
	}
	if !y0.Before(x0) || !y1.Before(x1) || x0.Before(y0) {
		t.Error("the gang that was called first is not before the other one")
	}
	y0.Keep()
	y1.Keep()
	for _, s := range []*Slot{y0, y1} {
		s.Play()
		s.m.(*rank).waits, s.m.(*rank).granted = false, true
	}
	if y0.MakesWay(x0) {
		t.Error("a gang that has all its GPUs makes way")
	}
	y2 := sit(gs, "y", "2")
	y2.m.(*rank).waits = true
	y2.Follow()
	if !y2.IsCalled() || y0.MakesWay(x0) { // it was called before
		t.Error("it is not called on the new GPU, or makes way for a gang that was called later")
	}
	if n := len(gs.Others("0")); n != 2 {
		t.Errorf("%d other GPUs are to look at what has changed, want 2", n)
	}
}
