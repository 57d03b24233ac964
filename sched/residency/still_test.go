// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// stillMemory is the memory of a GPU of 104, of which clients may have 100 where more is promised.
type stillMemory struct {
	*Memory
	turns everybodyWaits
	still bool // as clients were told
}

func newStillMemory(t *testing.T, clients ...Client) *stillMemory {
	arenas := NewArenas()
	s := &stillMemory{turns: everybodyWaits{map[base.ClientID]bool{}}, still: true}
	s.Memory = New(Config{Swap: true, Capacity: 100, Physical: 104, MoveUnit: 1}, &arenas, s.turns, func(a base.Action) {
		if a, ok := a.(Still); ok {
			s.still = a.On
		}
	})
	t.Cleanup(func() {
		if err := s.Check(); err != nil {
			t.Error(err)
		}
	})
	s.Begin(1, time.Second)
	for _, cl := range clients {
		cl.CanMove = true
		s.Attach(cl)
	}
	return s
}

// has promises a client memory, all of which is on the GPU.
func (s *stillMemory) has(id base.ClientID, bytes uint64) {
	s.Reserve(Reserve{Client: id, Total: bytes})
	s.Settle()
	s.reports(id, Moved{Report: Report{Resident: bytes}})
}

// reports has a client say what it has, and know its room.
func (s *stillMemory) reports(id base.ClientID, ev Moved) {
	ev.Client, ev.Seen = id, s.rooms.clients[id].seq
	s.Moved(ev)
	s.Settle()
}

// at lets time pass.
func (s *stillMemory) at(after time.Duration) {
	s.Begin(base.Time(1+after), time.Second)
	s.PlaceStranded()
	s.PutBehind()
	s.LookOutside()
	s.Settle()
}

// All fits by what is promised, and the driver refuses memory to who comes back: others than clients have some. Who
// makes room for that has host memory for it, until it is tried again.
func TestMemoryOfOthersIsMadeUpFor(t *testing.T) {
	s := newStillMemory(t, Client{ID: 1}, Client{ID: 2})
	s.has(2, 44)
	s.Reserve(Reserve{Client: 1, Total: 60})
	s.reports(1, Moved{Report: Report{Away: 60}})
	s.SetActive(1, true)
	s.Granted(1, true)
	s.Settle()
	s.reports(1, Moved{Epoch: 1, Report: Report{Resident: 57, Away: 3, In: 57}, Stuck: true, NoMemory: true})
	o := s.rooms.clients[2]
	if w := s.members[2].wanted.Bytes; o.room >= 44 || w == 0 {
		t.Errorf("2 has room for %d, and host memory for %d", o.room, w)
	}
	s.SetActive(1, false)
	s.Released(1, 0)
	s.at(outsideFor)
	if w := s.members[2].wanted.Bytes; w != 0 {
		t.Errorf("2 is to have %d of host memory, and all fits", w)
	}
}

// A client that says again and again that the driver refuses it memory keeps the GPU from nobody: what is promised
// fits. Only while it moves in does anybody make room, no more than it lacks.
func TestRefusalsAreOneClientsWord(t *testing.T) {
	s := newStillMemory(t, Client{ID: 1}, Client{ID: 2}, Client{ID: 3, Tenant: "limited"})
	s.SetTenant(SetTenantMemory{Tenant: "limited", Limit: 1})
	s.has(1, 20)
	s.has(2, 20)
	s.has(3, 1)
	for _, moves := range []bool{false, true} {
		s.SetActive(3, true)
		s.Granted(3, moves)
		s.reports(3, Moved{Epoch: 1, Report: Report{Away: 1}, Stuck: true, NoMemory: true})
		if s.still == moves || s.Overfull() {
			t.Errorf("moving in %t: still %t, overfull %t", moves, s.still, s.Overfull())
		}
		if n := s.rooms.clients[1].room + s.rooms.clients[2].room; n < 39 {
			t.Errorf("moving in %t: the others have room for %d", moves, n)
		}
		s.SetActive(3, false)
		s.Released(3, 0)
	}
}

// Clients take turns for one that the driver refuses memory, but by the word of one tenant alone only now and then, and by
// those of several for half of the time. Where all say so nobody else pays.
func TestTurnsAreNotForcedByWords(t *testing.T) {
	const seconds = 600
	for name, says := range map[string]struct {
		who         []base.ClientID
		least, most int // seconds of turns
	}{
		"one tenant": {[]base.ClientID{2}, 30, 70},
		"several":    {[]base.ClientID{2, 3}, 250, seconds/2 + 10},
		"all":        {[]base.ClientID{2, 3, 1}, seconds * 9 / 10, seconds},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStillMemory(t, Client{ID: 1, Granted: true}, Client{ID: 2}, Client{ID: 3})
			s.has(1, 60)
			s.has(2, 20)
			s.has(3, 20)
			turns := 0
			for n := range seconds {
				for id := range base.ClientID(4) {
					s.SetActive(id, true)
				}
				s.at(time.Duration(n) * time.Second)
				id := says.who[n%len(says.who)]
				has := s.rooms.clients[id].promised
				s.Granted(id, true)
				s.reports(id, Moved{Epoch: 1, Report: Report{Resident: has / 2, Away: has / 2}, Stuck: true, NoMemory: true})
				s.reports(id, Moved{Epoch: 1, Report: Report{Resident: has}, Ready: true})
				if s.Overfull() {
					turns++
				}
				s.SetActive(id, false)
				s.Released(id, 0)
			}
			if turns < says.least || turns > says.most {
				t.Errorf("%d seconds of turns in %d, not %d to %d", turns, seconds, says.least, says.most)
			}
		})
	}
}

// What a client gives back that it never had, as the driver refused it that, is not taken for memory that it has freed: it
// says nothing, for it has what it had.
func TestGivesBackWhatItNeverHad(t *testing.T) {
	s := newStillMemory(t, Client{ID: 1, Granted: true})
	s.has(1, 26)
	for range 3 {
		s.Reserve(Reserve{Client: 1, Total: 37})
		s.Reserve(Reserve{Client: 1, Total: 26})
	}
	if has := s.rooms.clients[1].resident; has != 26 {
		t.Errorf("it has 26, and %d are known", has)
	}
}

// That a client does not move is known for as often as it was reported in a row, also while nobody waits: until it has
// moved something, or nobody has to.
func TestStallsInARow(t *testing.T) {
	for name, ends := range map[string]func(*stillMemory){
		"it moves": func(s *stillMemory) { s.reports(1, Moved{Report: Report{Resident: 50, Away: 10, Out: 10}}) },
		"nobody has to move": func(s *stillMemory) {
			s.Drop(2)
			s.at(time.Hour)
			s.at(time.Hour + stillAfter)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStillMemory(t, Client{ID: 1}, Client{ID: 2})
			s.has(1, 60)
			s.Reserve(Reserve{Client: 2, Total: 60})
			s.reports(2, Moved{Report: Report{Away: 60}})
			stalls := func() int {
				cm, _ := s.View().ClientMemory(1)
				return cm.Stalls
			}
			for n := range 3 {
				s.SetActive(2, true)
				s.Settle()
				for at, ok := s.Due(); ok && stalls() == n; at, ok = s.Due() {
					s.at(time.Duration(at - 1))
				}
				s.SetActive(2, false)
				s.Released(2, 0)
				s.SetActive(1, true) // it has a turn meanwhile
				s.Settle()
				s.SetActive(1, false)
				s.Released(1, 0)
				if stalls() != n+1 {
					t.Errorf("stalled %d times, known %d", n+1, stalls())
				}
			}
			if ends(s); stalls() != 0 {
				t.Errorf("%d stalls are known", stalls())
			}
		})
	}
}

// reserves says whether a client of a GPU on which all fits that is promised gets more memory.
func (s *stillMemory) reserves(id base.ClientID, total uint64) (refused Refusal) {
	do := s.do
	s.do = func(a base.Action) {
		if r, ok := a.(Reserved); ok {
			refused = r.Refused
		}
		do(a)
	}
	s.Reserve(Reserve{Client: id, Total: total, Least: total})
	s.Settle()
	s.do = do
	return refused
}

// While all fits that is promised, no memory of the GPU is refused because host memory is short: nothing more has
// to go there.
func TestHostMemoryIsNoReasonWhereAllFits(t *testing.T) {
	for name, short := range map[string]func(*stillMemory){
		"another one was refused memory": func(s *stillMemory) {
			s.arenas.Bound(10, 0)
			s.Reserve(Reserve{Client: 1, Total: 60})
			s.reports(1, Moved{Report: Report{Away: 60}})
			s.SetActive(1, true)
			s.Granted(1, true)
			s.Settle()
			s.reports(1, Moved{Epoch: 1, Report: Report{Resident: 57, Away: 3, In: 57}, Stuck: true, NoMemory: true})
		},
		"the host has less than when another one was suspended": func(s *stillMemory) {
			s.arenas.Bound(60, 0)
			s.has(1, 60)
			s.Suspend(1)
			s.Settle()
			s.arenas.Bound(50, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStillMemory(t, Client{ID: 1}, Client{ID: 2}, Client{ID: 3})
			s.has(2, 40)
			short(s)
			if s.Overfull() {
				t.Fatal("not all fits")
			}
			if refused := s.reserves(3, 1); refused != NotRefused {
				t.Errorf("1 of 104 beside 100: refused: %v", refused)
			}
		})
	}
}

// Who has more than clients may have where more is promised than the GPU has does not come to where others are: what
// it brings would have no place there, and it would be granted nothing.
func TestWhoHasMostDoesNotArrive(t *testing.T) {
	s := newStillMemory(t, Client{ID: 1})
	s.has(1, 5)
	mover := Mover{Bytes: 102, Arena: 102}
	arrives := s.View().ArriveFits("other", map[base.ClientID]Mover{2: mover}, nil)
	s.Attach(Client{ID: 2, CanMove: true, Again: true})
	s.Reserve(Reserve{Client: 2, Total: 102, Force: true})
	s.Settle()
	if has := s.members[2].promised; has != mover.Bytes && arrives == nil {
		t.Errorf("it may come with %d, and is promised %d", mover.Bytes, has)
	}
}

// Nobody waits for work for longer than that which was cut: one that cannot go on with it, as a rank of a gang that
// does not come, is to make room as any other.
func TestWorkThatIsNotGoneOnWith(t *testing.T) {
	for name, later := range map[string]bool{"room is lacking later": true, "room is lacking": false} {
		t.Run(name, func(t *testing.T) {
			s := newStillMemory(t, Client{ID: 1}, Client{ID: 2})
			s.has(1, 60)
			cross := func() {
				s.Reserve(Reserve{Client: 2, Total: 60})
				s.Settle()
			}
			if !later {
				cross()
			}
			s.SetActive(1, true)
			s.SetCut(1, true)
			s.Released(1, 0)
			s.Settle()
			if later {
				s.at(time.Hour)
				cross()
			}
			s.PutBehind()
			since := time.Duration(s.now - 1)
			if !s.turns.aside[2] {
				t.Fatal("nobody waits for its work")
			}
			if at, ok := s.Due(); !ok || at != base.Time(1+since+mostCut) {
				t.Errorf("due at %d", at)
			}
			s.at(since + mostCut)
			if s.turns.aside[2] {
				t.Error("2 waits for ever")
			}
		})
	}
}

// That its work was cut is believed of a client whose latest grant ended so.
func TestWorkThatWasNotCut(t *testing.T) {
	s := newStillMemory(t)
	for id := base.ClientID(1); id <= 2; id++ {
		s.Attach(Client{ID: id, CanMove: true, Again: id == 2, Cut: true})
		if cut := s.rooms.clients[id].cut; cut != (id == 2) {
			t.Errorf("client %d, new: %t", id, cut)
		}
		for _, was := range []bool{true, false} {
			s.SetActive(id, true)
			s.SetCut(id, was)
			s.Released(id, 0)
			s.Forget(id)
			s.Attach(Client{ID: id, CanMove: true, Cut: true})
			if cut := s.rooms.clients[id].cut; cut != was {
				t.Errorf("client %d, cut %t: %t", id, was, cut)
			}
		}
	}
}

// Memory of the driver that a client without a grant has had while another one leaves may stay, as all fits.
func TestWhatIsThereMayStay(t *testing.T) {
	s := newStillMemory(t, Client{ID: 1}, Client{ID: 2})
	s.has(1, 10)
	s.has(2, 10)
	s.Suspend(1)
	s.Settle()
	s.Reserve(Reserve{Client: 2, Total: 12})
	s.Settle()
	s.reports(2, Moved{Report: Report{Resident: 12, Fixed: 2}})
	s.reports(1, Moved{Report: Report{Away: 10, Out: 10}})
	s.at(stillAfter)
	s.at(2 * stillAfter)
	if !s.still {
		t.Errorf("22 of 104 are promised: %+v", s.rooms.clients[2])
	}
}

// A suspended client that does not answer stays, as all fits. It is asked anew when it is suspended again.
func TestSuspendedAndSilent(t *testing.T) {
	s := newStillMemory(t, Client{ID: 1}, Client{ID: 2})
	s.has(1, 10)
	s.has(2, 10)
	for again := range time.Duration(2) {
		s.Suspend(1)
		s.Settle()
		if !s.members[1].asked || !s.still {
			t.Errorf("asked to leave: %t, still: %t", s.members[1].asked, s.still)
		}
		for n := range time.Duration(4) {
			s.at(again*time.Minute + n*stillAfter)
		}
		if !s.still {
			t.Errorf("20 of 104 are promised: %+v", s.rooms.clients[1])
		}
		s.SetActive(1, true)
		s.Settle()
		s.reports(1, Moved{Report: Report{Resident: 10}, Stuck: true})
		s.SetActive(1, false)
		s.Released(1, 0)
		s.reports(1, Moved{Report: Report{Resident: 10}, Stuck: true})
	}
}
