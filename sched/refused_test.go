// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// Clients that say that the driver has no memory for them, and others beside them, on a GPU of 100 bytes whose driver
// has memory for all, unless others than clients have some.

// sayer is a client. Unless something else is said of it, it moves what it is to move, at once.
type sayer struct {
	s                *sayers
	id               base.ClientID
	promised         uint64
	resident         uint64
	room             uint64
	seq              uint32
	epoch            base.Epoch
	moving, opened   bool
	refused          bool // it says that the driver has no memory for it
	once             bool // and says nothing after that, but when it is granted
	stopped          bool // it says nothing at all; its grants are ended for it
	keeps, keepsNext bool // the GPU, for ever: now, or from its next grant on
	ran              time.Duration
}

// has says whether the client can compute.
func (c *sayer) has() bool { return c.epoch != 0 && c.opened && c.resident == c.promised }

type sayers struct {
	t      *testing.T
	c      *GPU
	now    base.Time
	all    []*sayer // by id, from 1
	turns  time.Duration
	others uint64 // what others than clients have
}

func newSayers(t *testing.T, mode Mode) *sayers {
	return &sayers{t: t, now: 1, c: New(Config{
		Quantum: 2 * time.Second, Grace: time.Second, Mode: mode,
		Memory: residency.Config{Swap: true, Capacity: 97, Physical: 100, StallAfter: time.Second},
	})}
}

func (s *sayers) add(tenant string, bytes uint64) *sayer {
	c := &sayer{s: s, id: base.ClientID(len(s.all) + 1)}
	s.all = append(s.all, c)
	s.step(Attach{Client: c.id, Tenant: tenant, CanMove: true, Want: true})
	s.reserve(c, bytes)
	return c
}

func (s *sayers) reserve(c *sayer, bytes uint64) {
	c.promised, c.resident = bytes, min(c.resident, bytes)
	s.step(residency.Reserve{Client: c.id, Total: bytes})
	if !c.refused {
		s.step(c.move())
	}
}

// step does what is to be done for an event, and what clients do then.
func (s *sayers) step(events ...base.Event) {
	for n := 0; len(events) > 0; n++ {
		if n > 10000 {
			s.t.Fatalf("no end at %v", time.Duration(s.now))
		}
		actions := s.c.Step(s.now, events[0])
		events = events[1:]
		for _, a := range actions {
			events = append(events, s.answers(a)...)
		}
	}
}

// answers is what a client says to an action.
func (s *sayers) answers(a base.Action) []base.Event {
	switch a := a.(type) {
	case residency.Room:
		c := s.all[a.Client-1]
		c.room, c.seq = a.Bytes, a.Seq
		if c.refused && !c.once || !c.refused && !c.stopped && (a.Less || c.epoch != 0) {
			return []base.Event{c.says()}
		}
	case Grant:
		c := s.all[a.Client-1]
		c.epoch, c.moving, c.opened = a.Epoch, a.Moving, !a.Moving
		c.keeps = c.keeps || c.keepsNext && c.refused
		if c.stopped {
			return nil
		}
		return []base.Event{c.says()}
	case Revoke:
		c := s.all[a.Client-1]
		if c.keeps {
			return nil
		}
		events := []base.Event{Release{Client: c.id, Epoch: c.epoch, Reason: Revoked}, Request{c.id}}
		c.epoch, c.opened = 0, false
		return events
	}
	return nil
}

func (c *sayer) says() base.Event {
	if c.refused {
		m := c.report()
		m.Stuck, m.NoMemory = true, true
		return m
	}
	return c.move()
}

func (c *sayer) report() residency.Moved {
	return residency.Moved{Client: c.id, Epoch: c.epoch, Seen: c.seq, Report: residency.Report{Resident: c.resident, Away: c.promised - c.resident}}
}

// move has as much on the GPU as there is room for.
func (c *sayer) move() base.Event {
	before := c.resident
	c.resident = min(c.resident, c.room)
	lacks := false
	if c.epoch != 0 {
		want := min(c.room, c.promised)
		c.resident = min(want, max(c.resident, c.s.free(c)))
		lacks = c.resident < want
	}
	m := c.report()
	m.Stuck, m.NoMemory = lacks, lacks
	if c.resident > before {
		m.Report.In = c.resident
	}
	if c.epoch != 0 && c.resident == c.promised {
		m.Ready, c.moving, c.opened = c.moving, false, true
	}
	return m
}

// free is how much the driver has for a client.
func (s *sayers) free(c *sayer) uint64 {
	has := uint64(100)
	has -= s.others
	for _, o := range s.all {
		if o != c {
			has -= min(o.resident, has)
		}
	}
	return has
}

// run lets time pass. What a client says for ever it says each second, and one that lacks memory tries again then.
func (s *sayers) run(d time.Duration) {
	for end := s.now.Add(d); s.now < end; {
		next := s.now.Add(100 * time.Millisecond)
		if at, ok := s.c.Deadline(); ok && at < next {
			next = max(at, s.now+1)
		}
		took := next.Sub(s.now)
		for _, c := range s.all {
			if c.has() {
				c.ran += took
			}
		}
		if s.c.effective == Exclusive {
			s.turns += took
		}
		second := next/base.Time(time.Second) != s.now/base.Time(time.Second)
		s.now = next
		s.step(Tick{})
		for _, c := range s.all {
			if second && (c.refused && !c.once || !c.refused && !c.stopped && c.epoch != 0 && !c.has()) {
				s.step(c.says())
			}
		}
	}
}

// count forgets who ran, and lets time pass.
func (s *sayers) count(d time.Duration) {
	s.turns = 0
	for _, c := range s.all {
		c.ran = 0
	}
	s.run(d)
}

// Who says that the driver has no memory for it, and hangs, starves nobody.
func TestRefusedStarvesNobody(t *testing.T) {
	hangs := map[string]func(*sayer){
		"releases":        func(*sayer) {},
		"keeps the GPU":   func(c *sayer) { c.keeps = true },
		"says so once":    func(c *sayer) { c.keeps, c.once = true, true },
		"as it was moved": func(c *sayer) { c.keepsNext = true },
	}
	for _, mode := range []Mode{Concurrent, Auto, Exclusive} {
		for how, hang := range hangs {
			t.Run(mode.String()+", "+how, func(t *testing.T) {
				s := newSayers(t, mode)
				first, c := s.add("first", 10), s.add("refused", 20)
				s.run(5 * time.Second)
				hang(c)
				c.refused = c.keepsNext
				s.reserve(c, 95)
				s.reserve(c, 21)
				c.refused, c.resident = true, 20
				s.step(c.says())
				s.run(5 * time.Second)
				second := s.add("second", 20)
				s.count(5 * time.Minute)
				least := 4 * time.Minute
				if mode != Concurrent { // in turns: the third who says so has as many
					least = 95 * time.Second
				}
				if first.ran < least || second.ran < least {
					t.Errorf("in 5 minutes the others ran for %v and %v, not for %v each", first.ran, second.ran, least)
				}
			})
		}
	}
}

// Two tenants that say for ever that the driver has no memory for them have others take turns for half of the time.
func TestRefusedHaveTurns(t *testing.T) {
	for _, keep := range []bool{false, true} {
		s := newSayers(t, Concurrent)
		for _, tenant := range []string{"first", "refused", "refused too", "second"} {
			s.add(tenant, 10)
		}
		s.run(5 * time.Second)
		s.reserve(s.all[1], 95)
		for _, c := range s.all[1:3] {
			s.reserve(c, 11)
			c.resident, c.refused, c.keeps = 10, true, keep
			s.step(c.says())
		}
		s.run(5 * time.Second)
		s.count(10 * time.Minute)
		if s.turns > 5*time.Minute+10*time.Second {
			t.Errorf("they keep the GPU: %v: turns for %v of 10 minutes", keep, s.turns)
		}
		for _, c := range []*sayer{s.all[0], s.all[3]} {
			if c.ran < 5*time.Minute {
				t.Errorf("they keep the GPU: %v: client %d ran for %v of 10 minutes", keep, c.id, c.ran)
			}
		}
	}
}

// Where one tenant has the GPU alone, nobody else pays for the turns that its processes have as the driver has not
// memory for all of them: they have turns for as long as that is so.
func TestRefusedAlone(t *testing.T) {
	for _, mode := range []Mode{Concurrent, Auto} {
		t.Run(mode.String(), func(t *testing.T) {
			s := newSayers(t, mode)
			s.others = 30
			a, b := s.add("only", 45), s.add("only", 25)
			s.run(5 * time.Second)
			s.reserve(a, 95) // somebody has to make room, for a moment
			s.reserve(a, 45)
			s.reserve(b, 45)
			s.run(30 * time.Second)
			s.count(10 * time.Minute)
			if a.ran < 4*time.Minute || b.ran < 4*time.Minute {
				t.Errorf("in 10 minutes they ran for %v and %v, in turns for %v", a.ran, b.ran, s.turns)
			}
		})
	}
}
