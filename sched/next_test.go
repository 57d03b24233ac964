// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math/rand/v2"
	"testing"

	"github.com/nvshare/nvshare/sched/base"
)

func TestNext(t *testing.T) {
	c := New(Config{})
	next := func(when string, want base.ClientID) {
		t.Helper()
		if got := c.Next(); got != want {
			t.Errorf("%s: next is %d, want %d", when, got, want)
		}
	}
	next("nobody there", 0)
	for id := range base.ClientID(4) {
		c.Step(0, Attach{Client: id + 1})
	}
	next("nobody waits", 0)
	c.Step(0, Request{Client: 1})
	next("the only one has the grant", 0)
	c.Step(1, Request{Client: 2})
	c.Step(2, Request{Client: 3})
	c.Step(3, Request{Client: 4})
	next("three wait", 2)
	c.Step(4, Gone{Client: 2})
	next("the first of them died", 3)
	c.Step(5, Lost{Client: 3})
	next("the second lost its connection", 4)
	c.Step(6, Withdraw{Client: 4})
	next("the last left", 0)
}

// Whatever happens, the client that Next names is the one that gets the next
// exclusive grant, unless it has left the queue by then.
func TestNextGetsTheGrant(t *testing.T) {
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, 0))
	c := New(Config{Quantum: 10, Grace: 1000})
	now, grants := base.Time(0), 0
	epochs := map[base.ClientID]base.Epoch{}
	const clients = 5
	for range 20_000 {
		now += base.Time(rnd.IntN(20))
		id := base.ClientID(1 + rnd.IntN(clients))
		var ev base.Event
		switch rnd.IntN(8) {
		case 0:
			ev = Attach{Client: id, Want: rnd.IntN(2) == 0}
		case 1, 2, 3:
			ev = Request{Client: id}
		case 4, 5:
			ev = Release{Client: id, Epoch: epochs[id], Reason: Revoked}
		case 6:
			ev = Tick{}
		case 7:
			ev = Gone{Client: id}
		}
		next := c.Next()
		if next == id {
			if _, leaves := ev.(Gone); leaves {
				next = 0
			} else if a, ok := ev.(Attach); ok && !a.Want {
				next = 0
			}
		}
		for _, a := range c.Step(now, ev) {
			g, ok := a.(Grant)
			if !ok {
				continue
			}
			grants++
			epochs[g.Client] = g.Epoch
			if next != 0 && g.Client != next {
				t.Fatalf("seed %d: %v: granted to %d, next was %d", seed, base.Text(ev), g.Client, next)
			}
			if c.Next() == g.Client {
				t.Fatalf("seed %d: %v: %d has the grant and is next", seed, base.Text(ev), g.Client)
			}
			next = c.Next()
		}
	}
	if grants < 1000 {
		t.Errorf("seed %d: only %d grants: this tests nothing", seed, grants)
	}
}
