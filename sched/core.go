// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"time"
)

// Defaults of a Config's zero fields, and the limits to which a Core clamps
// what it is given; callers that have a user to tell should refuse instead.
const (
	DefaultQuantum = 100 * time.Millisecond
	DefaultGrace   = 10 * time.Second

	MinQuantum = time.Millisecond
	MaxQuantum = 24 * time.Hour
	MinGrace   = time.Millisecond
	MaxGrace   = 24 * time.Hour
)

// Config is what a Core starts with.
type Config struct {
	Quantum   time.Duration // 0: DefaultQuantum
	Grace     time.Duration // 0: DefaultGrace
	Mode      Mode
	LastEpoch Epoch // the last epoch persisted; the next grant's is higher
}

// Core schedules one GPU. Make one with New.
type Core struct {
	quantum, grace time.Duration
	mode           Mode
	epoch          Epoch // of the latest grant
	counters       Counters

	started     bool
	now         Time // of the latest Step; never runs backwards
	claimsUntil Time // see attach
	holdOff     Time // no exclusive grant before; 0: none

	clients   map[ClientID]*client
	connected int // clients with a connection

	// Each client is in at most one of these. Together open and closing are
	// the live grants: those that keep others from an exclusive one.
	queue   list // waiting
	open    list // holding: connected, gate open, in the order of their grants
	closing list // draining or lost, the earliest end of grace first

	// What a restart must know of the live grants, and what it would know.
	holder     *client // under an exclusive one, not merely claimed; or nil
	concurrent int     // number of concurrent ones
	persisted  Persist

	acts []Action // reused by each Step
}

// client is what the core knows of one process.
type client struct {
	id        ClientID
	connected bool
	want      bool // has a grant, and asked for the next one already

	// The grant; epoch is 0 if it has none, and the rest then means nothing.
	epoch      Epoch
	since      Time
	concurrent bool // given in concurrent mode, or while that began
	revoked    bool // asked back, or never ours to adopt
	fenced     bool
	base       Time // end of grace = base + Core.grace; while in closing

	told Notice // what its page says

	waitingSince Time
	longestWait  time.Duration
	held         time.Duration // under grants that have ended
	grants       uint64

	prev, next *client // within in
	in         *list
}

// New returns the core of a GPU that nobody uses yet. The last epoch and, by
// Restore, the holder must be those that were persisted before a restart.
func New(cfg Config) *Core {
	c := &Core{
		quantum: clamp(cmp.Or(cfg.Quantum, DefaultQuantum), MinQuantum, MaxQuantum),
		grace:   clamp(cmp.Or(cfg.Grace, DefaultGrace), MinGrace, MaxGrace),
		mode:    cfg.Mode,
		epoch:   cfg.LastEpoch,
		clients: make(map[ClientID]*client),
	}
	c.persisted.Epoch = cfg.LastEpoch
	return c
}

func clamp(d, lo, hi time.Duration) time.Duration { return min(max(d, lo), hi) }

// Step takes note of an event at a time and returns what to do about it. The
// slice is reused by the next Step. A time before that of the latest Step
// counts as that one.
func (c *Core) Step(now Time, ev Event) []Action {
	if !c.started {
		c.started = true
		c.now = now
		c.claimsUntil = now.Add(c.quantum + c.grace)
	}
	c.now = max(c.now, now)
	c.acts = c.acts[:0]

	switch ev := ev.(type) {
	case Attach:
		c.attach(ev)
	case Request:
		if cl := c.clients[ev.Client]; cl != nil && cl.connected {
			c.request(cl)
		}
	case Release:
		c.release(ev)
	case Lost:
		c.lost(ev.Client)
	case Gone:
		c.gone(ev.Client)
	case Tick:
	case SetQuantum:
		c.quantum = clamp(ev.D, MinQuantum, MaxQuantum)
	case SetGrace:
		c.grace = clamp(ev.D, MinGrace, MaxGrace)
	case SetMode:
		c.setMode(ev.M)
	case Restore:
		c.restore(ev)
	default:
		panic(fmt.Sprintf("sched: unknown event %T", ev))
	}

	c.fenceOverdue()
	c.grantNext()
	c.revokeOverdue()
	c.settle()
	return c.acts
}

// Deadline returns when Step must be called next, with a Tick if nothing else
// happens until then; false if never.
func (c *Core) Deadline() (Time, bool) {
	var t Time
	var ok bool
	earliest := func(u Time) {
		if !ok || u < t {
			t, ok = u, true
		}
	}
	if cl := c.closing.head; cl != nil {
		earliest(cl.base.Add(c.grace))
	}
	if cl := c.open.head; cl != nil && c.mode == Exclusive && c.queue.n > 0 {
		earliest(cl.since.Add(c.quantum))
	}
	if c.holdOff != 0 {
		earliest(c.holdOff)
	}
	return t, ok
}

// Next returns the client whose turn is next: it gets a grant as soon as the GPU
// is free, if it does not leave before; 0 if nobody waits.
func (c *Core) Next() ClientID {
	if c.queue.head == nil {
		return 0
	}
	return c.queue.head.id
}

func (c *Core) do(a Action) { c.acts = append(c.acts, a) }

func (c *Core) attach(ev Attach) {
	if ev.Client == 0 {
		panic("sched: attach of client 0")
	}
	cl := c.clients[ev.Client]
	if cl == nil {
		cl = &client{id: ev.Client}
		c.clients[ev.Client] = cl
	}
	if !cl.connected {
		cl.connected = true
		c.connected++
	}
	cl.told = Notice{Client: cl.id} // a new page says nothing
	cl.want = false

	switch {
	case ev.Held == 0:
		// It does not hold what we thought: the release was lost with the
		// old connection, or the grant never reached it.
		if cl.epoch != 0 {
			c.endGrant(cl)
		}
		if !ev.Want && cl.in == &c.queue {
			c.queue.remove(cl)
		}
	case ev.Held == cl.epoch && c.adoptable(cl):
		cl.in.remove(cl)
		c.open.push(cl)
		c.do(Adopt{cl.id, cl.epoch})
		c.notice(cl)
	case cl.epoch != 0:
		// Revoked, or it names another epoch than ours. It sees a word that
		// is not its epoch, drains, and releases the epoch it named.
		cl.epoch = ev.Held
		cl.revoked = true
		c.startClosing(cl)
	default:
		c.claim(cl, ev.Held)
	}
	if ev.Want {
		c.request(cl)
	}
}

// adoptable says whether a client that is back may go on under its grant.
func (c *Core) adoptable(cl *client) bool {
	if cl.revoked || cl.fenced {
		return false
	}
	if c.mode == Concurrent {
		return true
	}
	// A lost holder is not revoked by the clock, there is nobody to tell. It
	// is now; or cutting the connection would buy another grace period.
	return c.queue.n == 0 || c.now < cl.since.Add(c.quantum)
}

// claim takes note of a grant the core has no record of. The client will
// drain and release it; nothing is granted meanwhile, for a grace period at
// most. Only after a restart that lost what was persisted can that be honest,
// so late claims block nobody: else a process could keep the GPU from others
// by making claims for ever.
func (c *Core) claim(cl *client, held Epoch) {
	if cl.in == &c.queue {
		c.queue.remove(cl)
	}
	cl.epoch = held
	cl.since = c.now
	cl.revoked = true
	if c.now < c.claimsUntil {
		c.startClosing(cl)
	} else {
		c.fence(cl)
	}
}

func (c *Core) request(cl *client) {
	switch {
	case cl.epoch != 0:
		cl.want = true
	case cl.in == nil:
		cl.waitingSince = c.now
		c.queue.push(cl)
	}
}

func (c *Core) release(ev Release) {
	cl := c.clients[ev.Client]
	if cl == nil || ev.Epoch == 0 || ev.Epoch != cl.epoch {
		if ev.Epoch != 0 || ev.Reason != Exit {
			c.counters.StaleReleases++
		}
		if cl != nil && ev.Reason == Exit {
			cl.want = false
			if cl.in == &c.queue {
				c.queue.remove(cl)
			}
		}
		return
	}
	if cl.in == &c.open {
		c.do(Close{cl.id})
	}
	want := cl.want && ev.Reason != Exit
	c.endGrant(cl)
	switch {
	case !cl.connected:
		c.forget(cl)
	case want:
		c.request(cl)
	}
}

func (c *Core) lost(id ClientID) {
	cl := c.clients[id]
	if cl == nil || !cl.connected {
		return
	}
	cl.connected = false
	c.connected--
	cl.want = false
	if cl.epoch == 0 {
		c.forget(cl)
		return
	}
	if cl.in == &c.open {
		c.do(Close{id})
		c.startClosing(cl)
	}
}

func (c *Core) gone(id ClientID) {
	cl := c.clients[id]
	if cl == nil {
		return
	}
	if cl.epoch != 0 {
		if !cl.fenced {
			c.counters.Reclaims++
		}
		c.endGrant(cl)
	}
	if cl.connected {
		c.connected--
	}
	c.forget(cl)
}

func (c *Core) forget(cl *client) {
	if cl.in != nil {
		cl.in.remove(cl)
	}
	delete(c.clients, cl.id)
}

func (c *Core) setMode(m Mode) {
	if m != Exclusive && m != Concurrent {
		panic(fmt.Sprintf("sched: unknown %v", m))
	}
	if m == c.mode {
		return
	}
	c.mode = m
	if m == Concurrent {
		// From now on these overlap with others.
		for _, l := range []*list{&c.open, &c.closing} {
			for cl := l.head; cl != nil; cl = cl.next {
				c.setConcurrent(cl)
			}
		}
		if c.open.head != nil {
			c.notice(c.open.head) // nobody waits for it any more
		}
		return
	}
	for cl := c.closing.head; cl != nil; cl = cl.next {
		cl.revoked = true
	}
	for c.open.head != nil {
		c.revoke(c.open.head)
	}
}

func (c *Core) restore(ev Restore) {
	until := ev.Until
	if until == 0 {
		until = c.now.Add(c.quantum + c.grace)
	}
	c.epoch = max(c.epoch, ev.Epoch)
	if ev.Client == 0 {
		c.holdOff = max(c.holdOff, until)
	} else {
		if len(c.clients) != 0 || ev.Epoch == 0 {
			panic(fmt.Sprintf("sched: %v: needs an epoch, and comes before any other client", ev))
		}
		cl := &client{id: ev.Client, epoch: ev.Epoch, since: c.now, base: until.Add(-c.grace)}
		c.clients[cl.id] = cl
		c.closing.insert(cl)
		c.holder = cl
		if c.mode == Concurrent {
			c.setConcurrent(cl)
		}
	}
	c.persisted = c.record() // that is where the event came from
}

// setConcurrent notes that a live grant is, or has become, a concurrent one.
func (c *Core) setConcurrent(cl *client) {
	if c.holder == cl {
		c.holder = nil
	}
	if !cl.concurrent {
		cl.concurrent = true
		c.concurrent++
	}
}

// endLive ends what a live grant means to others.
func (c *Core) endLive(cl *client) {
	if cl.in != nil {
		cl.in.remove(cl)
	}
	if c.holder == cl {
		c.holder = nil
	}
	if cl.concurrent {
		cl.concurrent = false
		c.concurrent--
	}
}

// endGrant takes the client's grant away: released, reclaimed, or never held.
func (c *Core) endGrant(cl *client) {
	c.endLive(cl)
	cl.held += c.now.Sub(cl.since)
	cl.epoch = 0
	cl.want = false
	cl.fenced = false
	cl.revoked = false
}

// startClosing lets the grace period of a grant begin, if it has not.
func (c *Core) startClosing(cl *client) {
	if cl.fenced || cl.in == &c.closing {
		return
	}
	if cl.in != nil {
		cl.in.remove(cl)
	}
	cl.base = c.now
	c.closing.insert(cl)
}
