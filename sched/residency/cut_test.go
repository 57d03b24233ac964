// SPDX-License-Identifier: Apache-2.0

package residency

import (
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
