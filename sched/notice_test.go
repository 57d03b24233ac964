// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/nvshare/nvshare/sched/base"
)

func TestNotice(t *testing.T) {
	for name, test := range map[string]struct {
		of   neighbors
		want Notice
	}{
		"alone":                         {neighbors{}, Notice{}},
		"another one is idle":           {neighbors{attached: 1}, Notice{Present: 1, Bound: true}},
		"another one waits":             {neighbors{attached: 2, waiting: 1, turns: 1}, Notice{Waiters: 1, Present: 2, Leave: true, Bound: true}},
		"a latency tenant is beside it": {neighbors{attached: 1, turns: 1, latency: 1}, Notice{Waiters: 1, Present: 1, Leave: true, Bound: true}},
		"it is let in beside a holder":  {neighbors{kind: latencyGrant, attached: 1, turns: 1, latency: 1}, Notice{Waiters: 1, Present: 1, Leave: true, Bound: true}},
		"it is let in, nobody holds":    {neighbors{kind: latencyGrant, attached: 1, latency: 1}, Notice{Present: 1, Bound: true}},
		"all hold at the same time":     {neighbors{mode: Concurrent, attached: 3, turns: 4}, Notice{Present: 3, Bound: true}},
		"alone, with a limit":           {neighbors{limited: true}, Notice{Leave: true, Bound: true}},
		"a limit among all":             {neighbors{mode: Concurrent, attached: 1, turns: 2, limited: true}, Notice{Present: 1, Leave: true, Bound: true}},
		"a rank, and somebody waits":    {neighbors{attached: 2, waiting: 1, turns: 2, ganged: true}, Notice{Waiters: 1, Present: 2, Bound: true}},
		"a rank and a latency tenant":   {neighbors{attached: 1, turns: 1, ganged: true, pooled: true}, Notice{Present: 1, Leave: true, Bound: true, Patient: true}},
		"the only rank here":            {neighbors{ganged: true}, Notice{Bound: true}},
		"a rank of a gang with a limit": {neighbors{ganged: true, limited: true}, Notice{Bound: true}},
		"a rank among all":              {neighbors{mode: Concurrent, ganged: true}, Notice{}},
		"those who wait have to move":   {neighbors{attached: 1, waiting: 1, turns: 1, patient: true}, Notice{Waiters: 1, Present: 1, Leave: true, Bound: true, Patient: true}},
		"patient for nobody":            {neighbors{attached: 1, turns: 1, patient: true}, Notice{Present: 1, Bound: true}},
	} {
		if got := test.of.notice(0); got != test.want {
			t.Errorf("%s: told %v, want %v", name, got, test.want)
		}
	}
}

// TestNoticeKeepsItsPromises tests what holders depend on, for any neighbors that can
// be: nobody waits for a holder that was not told to leave when it is idle, and who
// has the GPU for itself loses nothing.
func TestNoticeKeepsItsPromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		some := rapid.IntRange(0, 3)
		s := neighbors{
			mode:    rapid.SampledFrom([]Mode{Exclusive, Concurrent}).Draw(t, "mode"),
			waiting: some.Draw(t, "waiting"), turns: some.Draw(t, "turns"), latency: some.Draw(t, "latency"),
			limited: rapid.Bool().Draw(t, "limited"), ganged: rapid.Bool().Draw(t, "ganged"), patient: rapid.Bool().Draw(t, "patient"),
		}
		if s.mode == Concurrent {
			s.waiting, s.latency = 0, 0
		} else if rapid.Bool().Draw(t, "latency grant") {
			s.kind, s.ganged = latencyGrant, false
		}
		others := s.waiting + s.latency + s.turns
		if s.kind == latencyGrant {
			s.latency++
		} else {
			s.turns++
		}
		s.attached = others + some.Draw(t, "idle")
		n := s.notice(7)
		keeps := s.waiting // those that wait for this holder
		if s.kind == latencyGrant {
			keeps += s.turns
		} else {
			keeps += s.latency
		}
		switch {
		case n.Client != 7 || n.Present != s.attached:
			t.Fatalf("%+v: told %v", s, n)
		case s.mode == Exclusive && keeps > 0 && !n.Leave && !s.ganged:
			t.Fatalf("%+v: %d wait, told %v", s, keeps, n)
		case n.Leave && keeps == 0 && !s.limited, n.Bound && s.attached == 0 && !s.limited && !s.ganged:
			t.Fatalf("%+v: nobody needs it, told %v", s, n)
		case n.Leave && !n.Bound, n.Patient && !n.Leave:
			t.Fatalf("%+v: told %v", s, n)
		case s.attached > 0 && !n.Bound:
			t.Fatalf("%+v: its work ahead delays others, told %v", s, n)
		}
	})
}

// TestManyHoldersAreToldOfALimit takes a client out of its gang, into a tenant with a
// limit, while more clients hold than are told the exact numbers.
func TestManyHoldersAreToldOfALimit(t *testing.T) {
	c := New(Config{Mode: Concurrent})
	c.Step(0, Attach{Client: 1, Tenant: "a", Share: Share{Gang: "g"}, Want: true})
	for id := base.ClientID(2); id <= noticed+2; id++ {
		c.Step(0, Attach{Client: id, Want: true})
	}
	c.Step(1, SetShare{Tenant: "a", Share: Share{Limit: 50}})
	if err := c.Check(); err != nil {
		t.Error(err)
	}
	if told := c.clients[1].told; !told.Leave {
		t.Errorf("client 1 has a limit and was told %v", told)
	}
}

// TestGroupAloneIsAlone has the members of an overlap group alone on a GPU: nobody needs their
// submitted work to be short. A client from outside is news to each of them, however many they are.
func TestGroupAloneIsAlone(t *testing.T) {
	for _, members := range []base.ClientID{2, noticed + 4} {
		c := New(Config{})
		for id := base.ClientID(1); id <= members; id++ {
			c.Step(0, Attach{Client: id, Share: Share{Overlap: "g"}, Want: true})
		}
		told := func(when string, want bool) {
			t.Helper()
			if err := c.Check(); err != nil {
				t.Error(err)
			}
			for id := base.ClientID(1); id <= members; id++ {
				if got := c.clients[id].told; got.Present > 0 != want || got.Bound != want {
					t.Errorf("%d members, %s: client %d was told %v", members, when, id, got)
				}
			}
		}
		told("alone", false)
		c.Step(1, Attach{Client: 100, Tenant: "outside"})
		told("with one from outside", true)
		c.Step(2, Gone{Client: 100})
		told("alone again", false)

		// In mode concurrent the one from outside may have been granted first.
		c = New(Config{Mode: Concurrent})
		c.Step(0, Attach{Client: 100, Tenant: "outside", Want: true})
		for id := base.ClientID(1); id <= members; id++ {
			c.Step(0, Attach{Client: id, Share: Share{Overlap: "g"}, Want: true})
		}
		told("at the same time as one from outside", true)
		c.Step(1, Gone{Client: 100})
		told("when that one has gone", false)
	}
}
