// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
)

// State is what a client does on the GPU, as gpu.go draws.
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

// noticed is up to how many holders are told exactly how many others there are.
const noticed = 8

// notices are what decides whether more than a few holders are told.
type notices struct {
	told    announced
	tellAll bool // the mode or a share has changed, which every holder is to know
}

// announced is what each holder was told of, however many there are.
type announced struct {
	waiters  [besideGrant + 1]bool // somebody waits for grants of this kind to end
	together bool                  // all clients are of one overlap group
	pooled   bool                  // there are latency tenants, beside whom idle ranks leave
}

// neighbors is all that decides what a holder is told of the others.
type neighbors struct {
	mode     Mode      // in effect
	kind     grantKind // of its grant
	attached int       // other clients on the GPU
	waiting  int       // clients that may be granted and are not
	turns    int       // turn grants that are open or paused
	latency  int       // latency grants that are open
	limited  bool      // its tenant has a limit, which is charged while it is idle, too
	ganged   bool      // its tenant is a gang
	shared   bool      // its turn is that of its cohort, and what it has submitted can be cut
	patient  bool      // it is to keep the GPU over short pauses
	quiet    bool      // it has made no calls for long, see suspendIdle
	pooled   bool      // there are latency tenants
	moves    bool      // its tenant is a gang, and there is not room for all memory on one of its GPUs
}

// notice returns what a holder is to be told.
func (s neighbors) notice(id base.ClientID) Notice {
	n := Notice{Client: id, Present: s.attached}
	switch {
	case s.mode != Exclusive, s.kind == besideGrant:
		// Nobody waits for longer than this Step, or for this grant.
	case s.kind == latencyGrant:
		n.Waiters = s.waiting + s.turns // it keeps their gates shut
	default:
		n.Waiters = s.waiting + s.latency // its submitted work slows them down
	}
	switch {
	case s.ganged && s.mode == Exclusive:
		// Ranks that are idle are part of the job, and go when it does. But latency tenants do not
		// wait for a turn to end, and have half of the time while a gang has one; and where memory
		// moves, turns last for seconds.
		n.Leave, n.Bound = s.pooled || s.moves, true
	case s.limited:
		n.Leave, n.Bound = true, true // as if its limit were somebody who waits
	default:
		n.Leave, n.Bound = n.Waiters > 0 || s.quiet, n.Present > 0
	}
	if s.shared {
		n.Bound = false // it waits for others' slices, and the end of its turn cuts what it has submitted
	}
	n.Patient = n.Leave && (s.patient || s.ganged && s.mode == Exclusive || s.quiet && n.Waiters == 0)
	return n
}

// expected returns what a client with a grant is to be told.
func (c *GPU) expected(cl *client) Notice {
	t := cl.tenant
	return neighbors{
		mode:     c.effective,
		kind:     cl.grant.kind,
		attached: c.beyond(cl),
		waiting:  c.waiting,
		turns:    c.open.n,
		latency:  c.latency.n,
		limited:  t.limited() && !c.inCohort(t),
		ganged:   t.slot != nil && !t.overlaps(),
		shared:   cl.grant.shared && c.effective == Exclusive && !t.overlaps(),
		patient:  c.patient(cl),
		quiet:    cl.quiet,
		pooled:   c.pool.tenants > 0,
		moves:    t.slot != nil && t.slot.Moves(),
	}.notice(cl.id)
}

// beyond returns how many clients there are besides this one. Members of its overlap group do
// not count: they run at the same time, so its submitted work delays nobody.
func (c *GPU) beyond(cl *client) int {
	n := c.connected - 1
	if cl.tenant.overlaps() {
		for _, other := range cl.tenant.members {
			if other != cl && other.connected {
				n--
			}
		}
	}
	return n
}

// notice tells a client how many others there are, if that has changed.
func (c *GPU) notice(cl *client) {
	n := c.expected(cl)
	if n.Waiters > 0 != c.told.waiters[cl.grant.kind] { // in the middle of a Step: the others know something else
		c.tellAll = true
	}
	if n != cl.told {
		cl.told = n
		c.do(n)
	}
}

// noticeAll tells all holders. More than a few are told only when it changes whether
// there are others: Present is above zero for each of them, before this Step and
// after it, and nobody waits in concurrent mode. In turns many hold if they are a group.
func (c *GPU) noticeAll() {
	turns := c.effective == Exclusive
	first := c.open.head // of one group if all are
	now := announced{together: first != nil && first.tenant.overlaps() && c.beyond(first) == 0, pooled: c.pool.tenants > 0}
	now.waiters[latencyGrant] = turns && c.waiting+c.open.n > 0
	now.waiters[turnGrant] = turns && c.waiting+c.latency.n > 0
	if now != c.told {
		c.told, c.tellAll = now, true
	}
	for _, l := range []*list{&c.open, &c.latency, &c.beside} {
		if l.n > noticed && c.tellAll {
			c.looked += uint64(l.n)
		}
		for cl := l.head; cl != nil && (l.n <= noticed || c.tellAll); cl = cl.next {
			c.notice(cl)
		}
	}
	c.tellAll = false
}

// wasTold says whether a client was told what it is to be told, up to the numbers
// where there are many holders.
func (c *GPU) wasTold(cl *client) bool {
	want, got := c.expected(cl), cl.told
	if c.open.n > noticed || c.latency.n > noticed || c.beside.n > noticed {
		want.Waiters, want.Present, want.Patient = got.Waiters, got.Present, got.Patient
	}
	return got == want
}

// PatientIdle is how long a client with Notice.Patient is idle before it gives the GPU
// back.
const PatientIdle = 20 * time.Millisecond

// patient says whether a holder is to keep the GPU over short pauses: all that wait have
// to move first, and must not yet, and most of the holder's pauses are short. To give the
// GPU back and get it again costs some 0.2 ms each time. Beside a cohort a holder with a
// limit may be as well, see staysInTurn.
func (c *GPU) patient(cl *client) bool {
	if c.cohort.on && cl.in == &c.open && cl.tenant.limited() && cl.tenant.apart {
		return cl.staysInTurn()
	}
	if cl.in != &c.open || c.effective != Exclusive || c.now >= c.owedUntil ||
		c.ready.top() != nil || c.urgent.top() != nil || c.latency.n > 0 || cl.tenant.limited() {
		return false
	}
	return cl.pauses.ManyBelow(PatientIdle)
}
