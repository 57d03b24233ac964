// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
)

// State is what a client does on the GPU; doc.go draws the states.
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
	return base.Name(s, "state", "idle", "waiting", "holding", "draining", "lost", "fenced")
}

// Counters count since New.
type Counters struct {
	Grants        uint64
	Revokes       uint64
	Fences        uint64
	Preemptions   uint64 // grants that ended with work left
	Reclaims      uint64 // live grants that ended by death
	StaleReleases uint64 // releases of an epoch the client does not have
}

// Snapshot describes a GPU at one moment, and shares nothing with it.
type Snapshot struct {
	Quantum, Grace time.Duration
	Mode           Mode            // as it was set
	Effective      Mode            // Exclusive or Concurrent
	Way            string          // "turns", "slices" or "driver"
	Cause          Cause           // why that way, and that mode
	Refused        []WayRefusal    // why no better way
	Epoch          base.Epoch      // of the latest grant
	Holders        []base.ClientID // with a live grant: holding, draining or lost
	Queue          []base.ClientID // the next one first
	Clients        []ClientSnapshot
	Tenants        []TenantSnapshot
	Counters       Counters
}

// TenantSnapshot describes a tenant with clients on this GPU, or with a debt that
// outlives its clients.
type TenantSnapshot struct {
	Tenant      string // as in Attach; "" never: a client of its own is "client N"
	Share       Share
	Clients     int
	Promised    int           // permille of the GPU's time that it gets in the long run if it wants it, while those want it that do now
	Got         int           // permille of the GPU's time, over the latest five seconds
	Waited      int           // permille of the latest five seconds: it wanted the GPU and had no grant
	Used        time.Duration // billed so far
	Moved       time.Duration // moving memory, which is not billed
	Debt        time.Duration // used above its limit, to be made up for; 0: none
	Throttled   time.Duration // until its limit allows a grant; 0: it does now
	Grants      uint64
	LongestWait time.Duration  // for a grant, up to now
	Slow        time.Duration  // that its latest drain took beyond what a drain may take
	SlowAt      base.Time      // when that ended
	Grace       time.Duration  // that its next drain has
	RecentWait  time.Duration  // the longest in the latest minute
	Waits       account.Spread // for the grants of the latest minute
}

// ClientSnapshot describes one client. Its numbers begin when the core first sees the
// client. A client without a grant is forgotten when it loses its connection.
type ClientSnapshot struct {
	ID           base.ClientID
	State        State
	Connected    bool
	Epoch        base.Epoch    // of its grant, also when fenced; 0: none
	Since        base.Time     // the beginning of that grant; the time of a suspension is left out
	WaitingSince base.Time     // while waiting; as above
	Grants       uint64        // given to it
	Preemptions  uint64        // of these, how many ended with work left
	Held         time.Duration // under grants, drain included, up to now
	LongestWait  time.Duration // for a grant, up to now
	Moving       bool          // has a grant, and moves memory before its turn begins
	Slice        time.Duration // the GPU's own time slice, as it was told; 0: the driver's
	Controls     Controls      // what it has proved; Client 0: nothing yet
}

// Snapshot describes the core as of now, which is at least the time of the
// latest Step. Clients are in the order of their IDs.
func (c *GPU) Snapshot(now base.Time) Snapshot {
	now = max(c.clock.FromCaller(now), c.now)
	s := Snapshot{
		Quantum:   c.quantum,
		Grace:     c.grace,
		Mode:      c.mode,
		Effective: c.effective,
		Epoch:     c.epoch,
		Holders:   slices.Concat(c.open.ids(), c.latency.ids(), c.beside.ids(), c.closing.ids()),
		Queue:     c.queueIDs(),
		Clients:   make([]ClientSnapshot, 0, len(c.clients)),
		Counters:  c.counters,
	}
	s.Way, s.Cause, s.Refused = c.way()
	for _, cl := range c.clients {
		cs := ClientSnapshot{
			ID:          cl.id,
			State:       c.state(cl),
			Connected:   cl.connected,
			Grants:      cl.grants,
			Preemptions: cl.preemptions,
			Held:        cl.held,
			LongestWait: cl.longestWait,
			Slice:       cl.slice,
			Controls:    cl.controls,
		}
		if g := cl.grant; g != nil {
			cs.Epoch, cs.Moving = g.epoch, g.move.on
			cs.Since = c.clock.ToCaller(g.since)
			cs.Held += now.Sub(g.since)
		}
		if cs.State == StateWaiting {
			cs.WaitingSince = c.clock.ToCaller(cl.waitingSince)
			cs.LongestWait = max(cs.LongestWait, now.Sub(cl.waitingSince))
		}
		s.Clients = append(s.Clients, cs)
	}
	slices.SortFunc(s.Clients, func(a, b ClientSnapshot) int { return cmp.Compare(a.ID, b.ID) })
	d := c.dues()
	for _, t := range c.tenants {
		if !t.remembered || t.Credit() < 0 {
			s.Tenants = append(s.Tenants, c.tenantSnapshot(t, now, &d))
		}
	}
	// A tenant that has become a gang of itself has left its debt to one of the same name, and may
	// leave another one. Those with clients first, then the greatest debt.
	slices.SortFunc(s.Tenants, func(a, b TenantSnapshot) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(b.Clients, a.Clients), cmp.Compare(b.Debt, a.Debt))
	})
	s.Tenants = slices.CompactFunc(s.Tenants, func(a, b TenantSnapshot) bool { return a.Tenant == b.Tenant })
	return s
}

// way says how clients share the GPU, and why in no better way. A cohort takes turns with the others.
func (c *GPU) way() (way string, cause Cause, refused []WayRefusal) {
	way = c.auto.way.String()
	if c.cohort.on {
		way = WayTurns.String()
	}
	if c.mode != Auto || len(c.clients) < 2 {
		return way, c.auto.cause, nil
	}
	for _, w := range candidates {
		if w == c.auto.way {
			break
		}
		if cause := c.refused(w); cause.Why != reasonNone && cause.Why != reasonNotNeeded {
			refused = append(refused, WayRefusal{w.String(), cause})
		}
	}
	return way, c.auto.cause, refused
}

func (c *GPU) tenantSnapshot(t *tenant, now base.Time, d *account.Dues) TenantSnapshot {
	a := t.Account // billed up to now in a copy: this changes nothing
	a.Bill(now, c.ratesOf(t))
	ts := TenantSnapshot{
		Tenant:      t.displayName(),
		Share:       t.share,
		Clients:     t.clients,
		Promised:    d.Permille(t.claim(), t.wants()),
		RecentWait:  t.recentWait.Most(now),
		Waits:       t.waits.Sum(now),
		Used:        a.Used(),
		Moved:       t.moved,
		Grants:      t.grants,
		LongestWait: t.longestWait,
		Slow:        t.slow,
		SlowAt:      c.clock.ToCaller(t.slowAt),
		Grace:       c.grace - c.lessGrace(t),
	}
	ts.Got, ts.Waited = a.Lately(now)
	if t.limited() {
		ts.Debt = max(0, -a.Credit())
		if a.Capped() {
			ts.Throttled = max(0, max(t.notBefore, a.BackAt(t.share.Limit, t.slice())).Sub(now))
		}
	}
	if cl := t.queue.head; cl != nil {
		wait := now.Sub(cl.waitingSince)
		ts.LongestWait, ts.RecentWait = max(ts.LongestWait, wait), max(ts.RecentWait, wait)
	}
	return ts
}

// queueIDs returns who waits, those first that are next, as things are.
func (c *GPU) queueIDs() []base.ClientID {
	ids := []base.ClientID{}
	for _, h := range []*tenantHeap{&c.urgent, &c.ready, &c.deferred, &c.spent, &c.throttled} {
		tenants := slices.Clone(h.items)
		slices.SortFunc(tenants, func(a, b *tenant) int {
			if h.less(a, b) {
				return -1
			}
			return 1
		})
		for _, t := range tenants {
			ids = append(ids, t.queue.ids()...)
		}
	}
	for _, t := range c.ganged {
		if t.place == parked {
			ids = append(ids, t.queue.ids()...)
		}
	}
	if i := slices.Index(ids, c.Next()); i > 0 {
		ids = slices.Insert(slices.Delete(ids, i, i+1), 0, c.Next())
	}
	return ids
}

func (c *GPU) state(cl *client) State {
	switch g := cl.grant; {
	case g.holds():
		return StateHolding
	case g.closes() && cl.connected:
		return StateDraining
	case g.closes():
		return StateLost
	case g != nil:
		return StateFenced
	case cl.in == &cl.tenant.queue, cl.later:
		return StateWaiting
	}
	return StateIdle
}

func (l *list) ids() []base.ClientID {
	ids := make([]base.ClientID, 0, l.n)
	for cl := l.head; cl != nil; cl = cl.next {
		ids = append(ids, cl.id)
	}
	return ids
}
