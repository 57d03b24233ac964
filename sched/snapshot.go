// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// State is what a client is doing on the GPU; doc.go draws them.
type State uint8

const (
	StateIdle State = iota
	StateWaiting
	StateHolding
	StateDraining
	StateLost
	StateFenced
)

func (s State) String() string {
	names := [...]string{"idle", "waiting", "holding", "draining", "lost", "fenced"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Counters count since New.
type Counters struct {
	Grants        uint64
	Revokes       uint64
	Fences        uint64
	Reclaims      uint64 // live grants that ended by death
	StaleReleases uint64 // releases of an epoch the client does not have
}

// Snapshot describes a Core at one moment; it shares nothing with it.
type Snapshot struct {
	Quantum, Grace time.Duration
	Mode           Mode
	Epoch          Epoch      // of the latest grant
	Holders        []ClientID // with a live grant: holding, draining or lost
	Queue          []ClientID // the next one first
	Clients        []ClientSnapshot
	Counters       Counters
}

// ClientSnapshot describes one client. Its numbers begin when the core first
// sees it; losing the connection without a grant ends it.
type ClientSnapshot struct {
	ID           ClientID
	State        State
	Connected    bool
	Epoch        Epoch         // of its grant, also when fenced; 0: none
	Since        Time          // of that grant
	WaitingSince Time          // while waiting
	Grants       uint64        // given to it
	Held         time.Duration // under grants, drain included, up to now
	LongestWait  time.Duration // for a grant, up to now
}

// Snapshot describes the core as of now, which is at least the time of the
// latest Step. Clients are in the order of their IDs.
func (c *Core) Snapshot(now Time) Snapshot {
	now = max(now, c.now)
	s := Snapshot{
		Quantum:  c.quantum,
		Grace:    c.grace,
		Mode:     c.mode,
		Epoch:    c.epoch,
		Holders:  append(c.open.ids(), c.closing.ids()...),
		Queue:    c.queue.ids(),
		Clients:  make([]ClientSnapshot, 0, len(c.clients)),
		Counters: c.counters,
	}
	for _, cl := range c.clients {
		cs := ClientSnapshot{
			ID:          cl.id,
			State:       c.state(cl),
			Connected:   cl.connected,
			Epoch:       cl.epoch,
			Grants:      cl.grants,
			Held:        cl.held,
			LongestWait: cl.longestWait,
		}
		if cl.epoch != 0 {
			cs.Since = cl.since
			cs.Held += now.Sub(cl.since)
		}
		if cs.State == StateWaiting {
			cs.WaitingSince = cl.waitingSince
			cs.LongestWait = max(cs.LongestWait, now.Sub(cl.waitingSince))
		}
		s.Clients = append(s.Clients, cs)
	}
	slices.SortFunc(s.Clients, func(a, b ClientSnapshot) int { return cmp.Compare(a.ID, b.ID) })
	return s
}

func (c *Core) state(cl *client) State {
	switch {
	case cl.fenced:
		return StateFenced
	case cl.in == &c.open:
		return StateHolding
	case cl.in == &c.closing && cl.connected:
		return StateDraining
	case cl.in == &c.closing:
		return StateLost
	case cl.in == &c.queue:
		return StateWaiting
	}
	return StateIdle
}

func (l *list) ids() []ClientID {
	ids := make([]ClientID, 0, l.n)
	for cl := l.head; cl != nil; cl = cl.next {
		ids = append(ids, cl.id)
	}
	return ids
}
