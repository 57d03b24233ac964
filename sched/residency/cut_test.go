// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// everybodyWaits are turns in which all wait.
type everybodyWaits struct{ aside map[base.ClientID]bool }

func (t everybodyWaits) Known(base.ClientID) bool                             { return true }
func (t everybodyWaits) Connected(base.ClientID) bool                         { return true }
func (t everybodyWaits) Later(a, b base.ClientID) bool                        { return a > b }
func (t everybodyWaits) SetAway(base.ClientID, bool)                          {}
func (t everybodyWaits) SetStranded(id base.ClientID, on bool)                { t.aside[id] = on }
func (t everybodyWaits) Ready(base.ClientID, base.Epoch, uint64, bool)        {}
func (t everybodyWaits) MovesOn(id base.ClientID, epoch base.Epoch, got bool) {}
func (t everybodyWaits) MovedOut()                                            {}
func (t everybodyWaits) MayBeRoom()                                           {}

// Who needs room is put aside until work has ended that was cut. A client that says for a minute that its work
// was cut again, as one would that keeps its memory by that, is to make room as any other.
func TestWorkIsNotWaitedForForEver(t *testing.T) {
	turns := everybodyWaits{map[base.ClientID]bool{}}
	arenas := NewArenas()
	mem := New(Config{Swap: true, Capacity: 100, Physical: 100}, &arenas, turns, func(base.Action) {})
	for id := base.ClientID(1); id <= 2; id++ {
		mem.Begin(1, time.Second)
		mem.Attach(Client{ID: id, CanMove: true})
		mem.Reserve(Reserve{Client: id, Total: 60})
		mem.Settle()
	}
	mem.Moved(Moved{Client: 1, Report: Report{Resident: 60}})
	for at := time.Duration(0); at <= mostCut; at += mostCut / 4 {
		mem.Begin(base.Time(1+at), time.Second)
		mem.SetActive(1, true)
		mem.SetCut(1, true)
		mem.Released(1, 0)
		mem.PlaceStranded()
		mem.PutBehind()
		mem.Settle()
		if turns.aside[2] != (at < mostCut) {
			t.Fatalf("after %v: put aside: %t", at, turns.aside[2])
		}
	}
	mem.SetActive(2, true)
	mem.Settle()
	if o := mem.rooms.clients[1]; o.room != 40 {
		t.Errorf("client 1 has room for %d", o.room)
	}
	if err := mem.Check(); err != nil {
		t.Error(err)
	}
}

// A client has tried how much it gets, and the driver refused it memory that fits by what is promised: others make
// room, and that it was so is forgotten.
func TestRefusalIsForgotten(t *testing.T) {
	turns := everybodyWaits{map[base.ClientID]bool{}}
	arenas := NewArenas()
	still := true
	mem := New(Config{Swap: true, Capacity: 100, Physical: 100}, &arenas, turns, func(a base.Action) {
		if s, ok := a.(Still); ok {
			still = s.On
		}
	})
	mem.Begin(1, time.Second)
	for id := base.ClientID(1); id <= 2; id++ {
		mem.Attach(Client{ID: id, CanMove: true, Granted: id == 1})
		mem.Granted(1, true)
		mem.Reserve(Reserve{Client: id, Total: 50})
		mem.Moved(Moved{Client: id, Report: Report{Resident: 45, Away: 5}, Stuck: id == 1, NoMemory: id == 1})
		mem.Settle()
	}
	mem.Moved(Moved{Client: 1, Report: Report{Resident: 45, Away: 5}, Stuck: true, NoMemory: true})
	mem.Settle()
	if still {
		t.Error("all memory seems to fit")
	}
	mem.SetActive(1, false)
	mem.Released(1, 0)
	for id := base.ClientID(1); id <= 2; id++ {
		room := min(mem.rooms.clients[id].room, 45)
		mem.Moved(Moved{Client: id, Report: Report{Resident: room, Away: 45 - room}})
	}
	for range 20 {
		mem.Settle()
		at, ok := mem.Due()
		if !ok || at > base.Time(outsideFor+2*stillAfter) {
			break
		}
		mem.Begin(at, time.Second)
		mem.Settle()
	}
	if !still {
		t.Error("all memory fits")
	}
}

// A client without a place has work that was cut: it is granted all the same, or it could never finish it to leave.
// Found in simulation.
func TestCutWorkHasAPlace(t *testing.T) {
	turns := everybodyWaits{map[base.ClientID]bool{}}
	arenas := NewArenas()
	mem := New(Config{Swap: true, Capacity: 100, Physical: 100}, &arenas, turns, func(base.Action) {})
	mem.Begin(1, time.Second)
	mem.Attach(Client{ID: 1, CanMove: true, Granted: true})
	mem.putAside(mem.members[1])
	mem.SetCut(1, true)
	mem.Released(1, 0)
	if turns.aside[1] {
		t.Error("it is granted nothing")
	}
}

// A client that comes back to the turns has its work still, and no new minute for it.
func TestComesBackWithItsWork(t *testing.T) {
	arenas := NewArenas()
	mem := New(Config{Swap: true, Capacity: 100, Physical: 100}, &arenas, everybodyWaits{map[base.ClientID]bool{}}, func(base.Action) {})
	mem.Begin(1, time.Second)
	for id := base.ClientID(1); id <= 2; id++ {
		mem.Attach(Client{ID: id, CanMove: true})
		mem.Reserve(Reserve{Client: id, Total: 60})
	}
	mem.Settle()
	mem.SetActive(1, true)
	mem.SetCut(1, true)
	mem.Released(1, 0)
	for at := base.Time(1); at <= base.Time(1+mostCut); at += base.Time(mostCut / 4) {
		mem.Begin(at, time.Second)
		mem.Forget(1)
		mem.Attach(Client{ID: 1, CanMove: true, Cut: true})
		mem.Settle()
		if want := at < base.Time(1+mostCut); mem.rooms.clients[1].cut != want {
			t.Errorf("after %v its work is waited for: %t", time.Duration(at-1), !want)
		}
	}
}

// Clients are in the order of their ids, however large these are, and a look at all is counted.
func TestClientsOfATenant(t *testing.T) {
	arenas := NewArenas()
	mem := New(Config{}, &arenas, everybodyWaits{map[base.ClientID]bool{}}, func(base.Action) {})
	ids := []base.ClientID{1, 2, 1<<63 + 1, 1<<64 - 1}
	for _, id := range ids {
		mem.Attach(Client{ID: id, Tenant: "a"})
	}
	before := mem.Looked()
	if got := mem.Clients("a"); !slices.Equal(got, ids) || mem.Looked() != before+4 {
		t.Errorf("clients %d, looked at %d", got, mem.Looked()-before)
	}
}
