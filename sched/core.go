// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
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
	Tuning    Tuning
	SwapShare int    // percent of the time that moving memory may take: turns are as long as that needs; 0: as Quantum says
	LastEpoch Epoch  // the last epoch persisted; the next grant's is higher
	GPU       string // its name in Gangs.Pending
	Gangs     *Gangs // of the node; nil: of this GPU alone
}

// Core schedules one GPU. Make one with New.
type Core struct {
	quantum, grace time.Duration
	mode           Mode // as it was set
	effective      Mode // Exclusive or Concurrent
	auto           auto
	tuning         Tuning
	swapShare      int
	epoch          Epoch // of the latest grant, or of the next one if that is fixed
	restarted      bool  // no epoch was given out yet since a restart, see takeEpoch
	counters       Counters

	started     bool
	now         Time // of the latest Step; never runs backwards
	claimsUntil Time // see attach
	holdOff     Time // no exclusive grant before; 0: none

	clients   map[ClientID]*client
	connected int // clients with a connection
	tenants   map[string]*tenant
	ghosts    []*tenant // without clients, see leave
	metered   []*tenant // see meter

	gpu   string
	gangs *Gangs
	moves []*client // those that move

	// What moving costs, and who may be worth waiting for; see moving.go and pause.go.
	owedUntil   Time          // nobody is to move before, if others can work
	sparedUntil Time          // the free GPU is not given to who has to move before
	fillTook    time.Duration // about what moving takes
	fills       int           // so often memory has come in
	linkRate    float64       // the best of that, bytes a second
	pausing     []*client     // those that gave the GPU back as they had nothing to do

	ganged []*tenant // of gangs, with clients here
	kept   *tenant   // the gang that has the GPU, or is about to; see gang.go

	// Where tenants with waiting clients stand.
	ready, afar, urgent, throttled tenantHeap
	waiting                        int    // clients of those in ready and urgent
	seq                            uint64 // of the latest request

	// The tenants that are active, and what they may have in sum.
	active, requests, weights int
	special                   int   // tenants that ask for more than turns, see review
	exact                     int   // those of them with a limit or a request
	vtime                     int64 // see virtualNow

	// The live grants: those that keep others from an exclusive one, but for
	// the ones given to latency tenants.
	open         list // gate open or paused, in the order of their grants
	latency      list // the same, of latency grants
	closing      list // draining or lost, the earliest end of grace first
	closingBatch int  // of closing, those that are not latency grants
	toldWaits    bool // somebody waits for latency grants to end
	tellAll      bool // the mode or a share has changed, which every holder is to know
	keptOut      bool // latency grants keep batch tenants from the GPU
	fenced       int  // grants that are fenced, and not released yet

	// Who is granted when the holder has released, if nothing happens to it
	// before, and under which epoch: decided, and recorded, while it drains.
	next      *client
	nextEpoch Epoch

	persisted Persist

	acts []Action // reused by each Step
}

// client is what the core knows of one process.
type client struct {
	id        ClientID
	account   string // as in Attach
	tenant    *tenant
	connected bool
	want      bool   // has a grant, and asked for the next one already
	seq       uint64 // of its request

	standing bool // has no grant, and was told that it may go ahead, see Stand

	// The grant; epoch is 0 if it has none, and the rest then means nothing.
	epoch     Epoch
	since     Time
	latency   bool // given to a latency tenant, beside others
	paused    bool // gate shut for the moment, by a latency grant
	revoked   bool // asked back, or never ours to adopt
	claimed   bool // the client says so; there is no record of it
	fenced    bool
	base      Time // end of grace = base + Core.grace; while in closing
	revokedAt Time
	ran       time.Duration // of its turn, up to runFrom
	runFrom   Time          // means nothing while paused
	startVT   int64         // of the tenant, when it began

	// Memory; see moving.go.
	away        bool          // it has some that is not on the GPU
	moving      bool          // under its grant, and its gate is not open yet
	movingSince Time          // means nothing else
	movedAt     Time          // the latest piece
	ready       bool          // it has opened its gate after that
	moved       time.Duration // under this grant, up to movingSince
	stranded    bool          // there is no place for it
	later       bool          // it wants a grant once there is

	// Its pauses; see pause.go.
	idleSince Time // it has no grant and wants none, from then on
	pausing   bool // by itself
	pauses    [pausesKept]time.Duration
	nPauses   int // ever

	told Notice // what its page says

	waitingSince Time
	longestWait  time.Duration
	held         time.Duration // under grants that have ended
	grants       uint64

	prev, next *client // within in
	in         *list
}

// New returns the core of a GPU that nobody uses yet. The last epoch and, by
// Restore, the holders must be those that were persisted before a restart.
func New(cfg Config) *Core {
	c := &Core{
		quantum:   clamp(cmp.Or(cfg.Quantum, DefaultQuantum), MinQuantum, MaxQuantum),
		grace:     clamp(cmp.Or(cfg.Grace, DefaultGrace), MinGrace, MaxGrace),
		mode:      cfg.Mode,
		tuning:    cfg.Tuning.clamped(),
		swapShare: clampShareOfSwap(cfg.SwapShare),
		epoch:     cfg.LastEpoch,
		clients:   make(map[ClientID]*client),
		tenants:   make(map[string]*tenant),
		gpu:       cfg.GPU,
		gangs:     cfg.Gangs,
	}
	if c.gangs == nil {
		c.gangs = NewGangs()
	}
	c.effective, c.auto.reason = cfg.Mode, reasonSet
	if cfg.Mode == Auto {
		c.effective, c.auto.reason = Exclusive, reasonTurns
	}
	c.ready.less, c.afar.less, c.urgent.less, c.throttled.less = behind, behind, before, backFirst
	c.persisted.Epoch = cfg.LastEpoch
	c.restarted = cfg.LastEpoch != 0
	return c
}

// unrecorded is more than the latency grants of one Step, which are given before
// they are recorded: their epochs may have been used before a restart.
const unrecorded = 10_000

// takeEpoch returns the epoch of a grant to come.
func (c *Core) takeEpoch() Epoch {
	if c.restarted {
		c.restarted = false
		c.epoch += unrecorded
	}
	c.epoch = NextEpoch(c.epoch)
	return c.epoch
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
		if _, restores := ev.(Restore); restores || c.restarted {
			c.gangs.gather = max(c.gangs.gather, now.Add(gatherTime))
		}
	}
	c.standStill(now)
	c.now = max(c.now, now)
	c.gangs.now = max(c.gangs.now, c.now)
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
	case SetShare:
		c.reshare(ev.Tenant, ev.Share)
	case GangMoved:
	case SetTuning:
		c.setTuning(ev.Tuning)
	case SetMemory:
		c.auto.reserved, c.auto.total, c.auto.swap = ev.Reserved, ev.Total, ev.Swap
	case SetAway:
		c.setAway(ev)
	case SetStranded:
		c.setStranded(ev)
	case Moving:
		c.movesOn(ev)
	case Ready:
		c.isReady(ev)
	case SetSwapShare:
		c.swapShare, c.owedUntil = clampShareOfSwap(ev.Percent), c.now
	case Restore:
		c.restore(ev)
	default:
		panic(fmt.Sprintf("sched: unknown event %T", ev))
	}

	c.fenceOverdue()
	c.lookAtMode()
	c.unthrottle()
	for done := -1; done != len(c.acts)+c.gangs.changes; { // one may make another due
		done = len(c.acts) + c.gangs.changes
		c.conduct()
		c.lookWhoIsOut()
		c.revokeOverdue()
		c.pauseOrResume()
		c.grantNext()
	}
	c.settle()
	c.exorcise()
	return c.acts
}

// Deadline returns when Step must be called next, with a Tick if nothing else
// happens until then; false if never.
func (c *Core) Deadline() (Time, bool) {
	t, ok := c.due()
	if look := c.now.Add(fencedLook); c.fenced > 0 && (!ok || look < t) {
		return look, true
	}
	return t, ok
}

// due returns when something has to be done.
func (c *Core) due() (Time, bool) {
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
	if at, over := c.turnOver(); over {
		earliest(at)
	}
	for _, t := range c.metered {
		if at, ends := c.endsAt(t); ends {
			earliest(at)
		}
	}
	if t := c.throttled.top(); t != nil {
		earliest(t.backAt())
	}
	if at, has := c.auto.deadline(c); has {
		earliest(at)
	}
	if c.holdOff != 0 {
		earliest(c.holdOff)
	}
	if at, has := c.movingDeadline(); has {
		earliest(at)
	}
	for _, t := range c.ganged {
		if g := t.gang; g.phase == wanted && g.isDue() {
			earliest(g.gangs.gather)
		}
	}
	if c.kept != nil && c.kept.hold == leaving {
		if at, has := c.kept.gang.nextStep(); has {
			earliest(at)
		}
	}
	return t, ok
}

// Next returns the client whose turn is next: it gets a grant as soon as the GPU
// is free, if it does not leave before; 0 if nobody waits, or a gang is next.
func (c *Core) Next() ClientID {
	if c.next != nil {
		return c.next.id
	}
	if t := c.upNext(); t != nil && t.gang == nil {
		return t.queue.head.id
	}
	return 0
}

// Requested returns the sum of what tenants with clients are promised, percent,
// apart from one.
func (c *Core) Requested(except string) int {
	sum := 0
	for name, t := range c.tenants {
		if name != except && !t.ghost && !t.isOf(except) {
			sum += t.share.Request
		}
	}
	return sum
}

func (c *Core) do(a Action) { c.acts = append(c.acts, a) }

func (c *Core) attach(ev Attach) {
	if ev.Client == 0 {
		panic("sched: attach of client 0")
	}
	t := c.tenantOf(ev.Tenant, ev.Client, ev.Share)
	cl := c.clients[ev.Client]
	if cl == nil {
		cl = &client{id: ev.Client, idleSince: c.now}
		c.clients[ev.Client] = cl
	}
	cl.account, cl.away = ev.Tenant, ev.Away
	if cl.tenant != nil && cl.tenant != t && (cl.tenant.gang != nil || t.isGang()) && cl.epoch != 0 && !cl.fenced {
		cl.revoked, cl.revokedAt = true, c.now // it was given to it as another
		c.startClosing(cl)
	}
	c.join(cl, t)
	changed := t.share != clampShare(ev.Share)
	c.setShare(t, ev.Share)
	if !cl.connected {
		cl.connected = true
		c.connected++
	}
	cl.told = Notice{Client: cl.id} // a new page says nothing
	cl.standing = false
	cl.want = false
	cl.stranded, cl.later = false, false // it is tried again

	switch {
	case ev.Held == 0:
		// It does not hold what we thought: the release was lost with the
		// old connection, or the grant never reached it.
		if cl.epoch != 0 {
			c.endGrant(cl, EndLost)
		}
		if !ev.Want {
			c.unqueue(cl)
		}
	case ev.Held == cl.epoch && c.adoptable(cl):
		c.adopt(cl)
	case cl.epoch != 0:
		// Revoked, or it names another epoch than ours. It sees a word that
		// is not its epoch, drains, and releases the epoch it named.
		cl.epoch = ev.Held
		if !cl.revoked {
			cl.revoked, cl.revokedAt = true, c.now
		}
		c.startClosing(cl)
	default:
		c.claim(cl, ev.Held)
	}
	if ev.Want {
		c.request(cl)
	}
	if changed {
		c.standAll(t)
	} else {
		c.stand(cl)
	}
}

// adoptable says whether a client that is back may go on under its grant.
func (c *Core) adoptable(cl *client) bool {
	if cl.revoked || cl.fenced {
		return false
	}
	if c.effective == Concurrent || c.adoptsLatency(cl) {
		return true
	}
	if c.holdOff != 0 {
		return false // others may be on the GPU that are not recorded, from when all could be
	}
	if cl.tenant.gang != nil {
		return cl.tenant.hold == playing && cl.tenant.gang.phase == running
	}
	// After a restart several may be recorded that held at the same time, or
	// that were next; who really holds is known only when all are back.
	others := c.open.n + c.closingBatch
	if !cl.latency {
		others-- // itself
	}
	// A lost holder is not revoked by the clock, there is nobody to tell. It
	// is now; or cutting the connection would buy another grace period.
	next := c.inTurn()
	return others == 0 && c.kept == nil && (next == nil || next.place == afar && c.now < c.owedUntil || c.ranAt(cl) < c.turn(cl.tenant))
}

// adoptsLatency says whether a grant that is adopted is a latency one: after a
// restart that is known by the tenant's share alone.
func (c *Core) adoptsLatency(cl *client) bool {
	return c.effective == Exclusive && (cl.latency || cl.tenant.share.Priority == Latency && !cl.tenant.demoted)
}

func (c *Core) adopt(cl *client) {
	latency := c.adoptsLatency(cl)
	ran := c.ranAt(cl)
	c.unlist(cl)
	cl.latency, cl.paused = latency, false
	cl.ran, cl.runFrom = ran, c.now
	if latency {
		c.enlist(cl, &c.latency)
	} else {
		c.enlist(cl, &c.open)
	}
	c.do(Adopt{cl.id, cl.epoch})
	c.notice(cl)
}

// claim takes note of a grant the core has no record of. The client will
// drain and release it; nothing is granted meanwhile, for a grace period at
// most. Only after a restart that lost what was persisted can that be honest,
// so late claims block nobody: else a process could keep the GPU from others
// by making claims for ever.
func (c *Core) claim(cl *client, held Epoch) {
	c.unqueue(cl)
	cl.epoch = held
	cl.since = c.now
	cl.revokedAt = c.now
	cl.ran, cl.runFrom = 0, c.now
	cl.revoked = true
	cl.claimed = true
	cl.latency, cl.paused = false, false
	if c.now < c.claimsUntil {
		c.startClosing(cl)
	} else {
		c.fence(cl)
	}
}

func (c *Core) request(cl *client) {
	c.endPause(cl)
	switch {
	case cl.epoch != 0:
		cl.want = true
	case cl.stranded:
		if !cl.later {
			cl.later, cl.waitingSince = true, c.now
		}
	case cl.in == nil:
		c.bill(cl.tenant)
		cl.waitingSince = c.now
		c.seq++
		cl.seq = c.seq
		cl.tenant.queue.push(cl)
		c.review(cl.tenant)
	}
}

// unqueue takes a client that waits, if it does, out of its tenant's queue.
func (c *Core) unqueue(cl *client) {
	cl.later = false
	if cl.in != &cl.tenant.queue {
		return
	}
	c.bill(cl.tenant)
	cl.in.remove(cl)
	c.review(cl.tenant)
	if c.next == cl {
		c.next = nil
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
			c.unqueue(cl)
		}
		return
	}
	how := EndRevoked
	if cl.in == &c.open || cl.in == &c.latency {
		how = EndIdle
		if !cl.paused {
			c.do(Close{cl.id})
		}
	}
	if ev.Reason == Exit {
		how = EndExit
	}
	want := cl.want && ev.Reason != Exit
	if how != EndExit && !want {
		c.beginPause(cl, how == EndIdle)
	}
	c.endGrant(cl, how)
	switch {
	case !cl.connected:
		c.forget(cl)
	case want:
		c.request(cl)
	}
	c.stand(cl)
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
	if cl.in == &c.open || cl.in == &c.latency {
		if !cl.paused {
			c.do(Close{id})
		}
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
		c.endGrant(cl, EndDeath)
	}
	if cl.connected {
		c.connected--
	}
	c.forget(cl)
}

// forget removes a client without a grant.
func (c *Core) forget(cl *client) {
	c.unqueue(cl)
	c.forgetPause(cl)
	delete(c.clients, cl.id)
	c.leave(cl)
}

func (c *Core) setMode(m Mode) {
	if m > Auto {
		panic(fmt.Sprintf("sched: unknown %v", m))
	}
	if m == c.mode {
		return
	}
	c.mode = m
	c.auto.since, c.auto.until, c.auto.short = c.now, 0, 0
	if m != Auto && !(m == Concurrent && c.auto.overfull()) {
		c.setEffective(m, reasonSet)
	}
}

// setEffective changes how grants are given from now on.
func (c *Core) setEffective(m Mode, reason string) {
	if m == c.effective && reason == c.auto.reason {
		return
	}
	c.auto.reason = reason
	c.do(ModeChosen{m, reason})
	if m == c.effective {
		return
	}
	c.tellAll = true
	c.next = nil
	if m == Concurrent {
		c.effective = m
		for cl := c.open.head; cl != nil; cl = cl.next {
			if cl.paused {
				c.resume(cl)
			}
		}
		c.kept = nil
		for _, t := range c.ganged {
			t.hold, t.due = nothing, false
		}
	} else {
		for cl := c.closing.head; cl != nil; cl = cl.next {
			cl.revoked = true
		}
		for _, l := range []*list{&c.open, &c.latency} {
			for l.head != nil {
				c.revoke(l.head, ModeChange)
			}
		}
		// What they had at the same time is nothing that one has before the other.
		c.effective = m
		for _, t := range c.tenants {
			c.bill(t)
		}
		for _, t := range c.tenants {
			c.vtime = max(c.vtime, t.vt)
		}
		for _, t := range c.tenants {
			t.vt = c.vtime
		}
		c.ready.reorder()
		c.afar.reorder()
	}
	for _, cl := range c.inOrder() {
		c.review(cl.tenant) // who is urgent depends on the mode
		c.stand(cl)
	}
	for _, t := range c.ganged {
		t.gang.tell(c)
	}
}

func (c *Core) setTuning(tuning Tuning) {
	for _, t := range c.tenants {
		c.bill(t) // so far by the old one
	}
	c.tuning = tuning.clamped()
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
		if c.connected != 0 || c.clients[ev.Client] != nil || ev.Epoch == 0 {
			panic(fmt.Sprintf("sched: %v: needs an epoch, and comes before any other event", ev))
		}
		cl := &client{id: ev.Client}
		if ev.Gang != "" {
			cl.account = ev.Tenant // others belong to nobody until they are back
		}
		c.clients[cl.id] = cl
		c.join(cl, c.tenantOf("", cl.id, Share{Gang: ev.Gang}))
		cl.epoch, cl.since, cl.runFrom, cl.base = ev.Epoch, c.now, c.now, until.Add(-c.grace)
		c.enlist(cl, &c.closing)
		c.restoreGang(cl.tenant)
	}
	c.persisted = c.record() // that is where the event came from
}

// ---- grants ----

// enlist puts a client whose grant is live, or becomes so, into one of open,
// latency and closing, and counts it.
func (c *Core) enlist(cl *client, l *list) {
	c.bill(cl.tenant)
	if l == &c.closing {
		l.insert(cl)
		if !cl.latency {
			c.closingBatch++
		}
	} else {
		l.push(cl)
	}
	c.count(cl, +1)
	c.review(cl.tenant)
}

// unlist takes it out again.
func (c *Core) unlist(cl *client) {
	c.bill(cl.tenant)
	c.count(cl, -1)
	c.stopMoving(cl)
	if cl.in == &c.closing && !cl.latency {
		c.closingBatch--
	}
	cl.in.remove(cl)
	c.review(cl.tenant)
}

// ranAt returns how much of its turn a grant has had.
func (c *Core) ranAt(cl *client) time.Duration {
	if cl.paused || cl.moving {
		return cl.ran
	}
	return cl.ran + c.now.Sub(cl.runFrom)
}

// endGrant takes the client's grant away: released, reclaimed, or never held.
func (c *Core) endGrant(cl *client, how EndReason) {
	held := c.now.Sub(cl.since)
	r := Released{Client: cl.id, Tenant: cl.tenant.displayName(), Epoch: cl.epoch, Reason: how, Held: held, Fenced: cl.fenced}
	if cl.revoked {
		r.Drained = c.now.Sub(cl.revokedAt)
	}
	if cl.in == &c.open || cl.in == &c.closing {
		c.spare()
		c.reserve() // those who wait go before it, should it want another one at once
	}
	c.unclose(cl)
	r.Moved = cl.moved
	cl.moved, cl.ready = 0, false
	cl.held += held
	cl.epoch = 0
	cl.want = false
	cl.revoked, cl.claimed = false, false
	cl.latency, cl.paused = false, false
	t := cl.tenant
	if t.gang != nil {
		t.gang.releasedAt = c.now
	}
	if t.credit < 0 && t.limited() {
		t.credit = t.credit * time.Duration(100-c.tuning.DropCarry) / 100
	}
	if t.limited() && t.credit < t.slice()/4 {
		t.capped = true // a turn of less is not worth its hand-over
	}
	c.review(t)
	if how == EndIdle && c.waiting > 0 {
		c.auto.short++
	}
	c.do(r)
}

// unclose takes the grant out of what it is in, as if it were none.
func (c *Core) unclose(cl *client) {
	if cl.fenced {
		c.bill(cl.tenant)
		c.count(cl, -1)
		cl.fenced = false
	} else if cl.in != nil {
		c.unlist(cl)
	}
}

// startClosing lets the grace period of a grant begin, if it has not.
func (c *Core) startClosing(cl *client) {
	if cl.fenced || cl.in == &c.closing {
		return
	}
	if cl.in != nil {
		cl.ran, cl.runFrom = c.ranAt(cl), c.now
		c.unlist(cl)
	}
	cl.paused = false
	cl.base = c.now
	c.enlist(cl, &c.closing)
}

// inOrder returns all clients in the order of their ids.
func (c *Core) inOrder() []*client {
	return slices.SortedFunc(maps.Values(c.clients), func(a, b *client) int { return cmp.Compare(a.id, b.id) })
}
