// SPDX-License-Identifier: Apache-2.0

// Package sched decides which client may use a GPU. It is a pure state machine with one value
// of type GPU for each UUID: no I/O, no goroutines, no clock. The caller tells what happened
// (Step), carries out the actions that Step returns, in order, and calls again when Deadline
// says so. The same events always give the same actions.
//
// It puts together residency (who may have how much memory, and who makes room), account (what
// tenants are billed, are due, and owe), timeslice (how long slices are, how fast clients get
// on), gang (when gangs have their turns) and base (times, clients, epochs), which do not know
// it. sharing.md says how GPUs are shared.
//
// # Words
//
// A grant is the permission to submit work; its epoch is its number. A holder is a client with
// a grant. When its turn is over and somebody waits, the grant is revoked: the client closes
// its gate, drains what it submitted, and releases the grant within the grace period, or it is
// fenced. The grant of a dead client is reclaimed. A drain may be cut: the grant was preempted
// if it is released with work left. A tenant is the clients whose time is counted together.
//
// # States
//
// A client without a grant is idle, or it waits. One function changes the state of a grant
// (GPU.change). The grace period of a lost grant ends with a fence too.
//
//	        Request           grant                 Revoke            grace over
//	idle ───────────► waiting ─────► granted, paused ─────► draining ──────────► fenced
//	 ▲                   ▲              │       ▲              │  ▲                 │
//	 │                   │         Lost ▼       │ Adopt        │  │ cannot          │
//	 │                   │              lost ───┴──────────────┼──┘ go on           │
//	 │                   │ it asked again                      │                    │
//	 └───────────────────┴────────────────────────── Release ◄─┴────────────────────┘
//
// # Policies
//
// Who is granted, and when a grant is asked back, is decided by policies (gpu.go), which each
// Step asks until nothing changes. In mode Auto, ways.go chooses how clients share the GPU.
// The tenant that is behind in virtual time is next (newQueues): its time on the GPU divided by its part.
//
// # The way of a core limit
//
//	daemon: SetShare, or Attach, with Share.Limit ─► gpu.go ─► tenant.go (setShare) ─► account (SetLimit)
//	each Step bills the time of grants:  tenant.go (bill) ─► account (Bill)
//	it is used up:  account (CreditEnds) ─► turns.go (limits, revokeLimited) ─► Revoke{Why: LimitReached} ─► daemon
//	the tenant waits (throttled) until account says that it is earned back:  turns.go (unthrottle) ─► Grant
//
// # Guarantees
//
// In exclusive mode nobody is granted while another client holds, drains or is lost, but for
// latency tenants, and members of one cohort or gang; only a fence ends that without the client.
// Every client that waits is granted within the turns and grace periods of those ahead of it,
// unless its tenant's limit keeps it. The epochs of a client rise strictly. What a restart must
// know is handed out as a Persist before the Grant that depends on it; in mode Auto a restart
// takes the GPU from none of up to MaxRecorded holders. Check tests all this, except what is
// about time, in O(clients).
//
// Step costs O(log n) in the number of clients, and one look at each tenant with a limit that has a grant, at each
// latency tenant that keeps others out or has no patience, at each gang, and at each GPU's deadline. It costs O(n)
// where a limit is reached or the mode changes, for what is judged once in some seconds, and where memory is swapped
// and more is promised than the GPU has. Work counts the passes. A GPU is not safe for use by several goroutines at once.
package sched

import (
	"cmp"
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// Defaults of a Config's zero fields, and the limits to which a GPU clamps
// what it is given; callers that have a user to tell should refuse instead.
const (
	DefaultQuantum = 100 * time.Millisecond
	DefaultGrace   = 10 * time.Second

	MinQuantum = time.Millisecond
	MaxQuantum = 24 * time.Hour
	MinGrace   = time.Millisecond
	MaxGrace   = 24 * time.Hour
)

// Config is what a GPU starts with.
type Config struct {
	Quantum   time.Duration // 0: DefaultQuantum
	Grace     time.Duration // 0: DefaultGrace
	Mode      Mode
	Tuning    account.Tuning
	SwapShare int        // percent of the time that moving memory may take: turns are as long as that needs; 0: as Quantum says
	LastEpoch base.Epoch // the last epoch persisted; the next grant's is higher
	Way       Way        // as persisted with that; means something in mode Auto
	Intact    bool       // what was persisted is known: a client that claims another grant is mistaken, or lies
	GPU       string     // its name in StepGPU
	Node      *Node      // nil: of this GPU alone
	Memory    residency.Config
}

// GPU is the machine that schedules one GPU. Make one with New. Its parts are where their fields are
// used most.
type GPU struct {
	settings
	effective Mode // Exclusive or Concurrent
	auto      auto
	cohort    cohort

	gpu   string
	clock *base.Clock // of the node
	gangs *gang.Gangs // of the node

	started     bool
	intact      bool      // as Config says
	now         base.Time // of the latest Step; never runs backwards
	claimsUntil base.Time // see attach
	earlier     Way       // from before a restart, until that way begins again; see resumeWay

	clients   map[base.ClientID]*client
	order     []*client // the same, by id
	tally     tally
	connected int // clients with a connection
	roster
	queues
	grants
	transfers
	pool    latencyPool
	besides besides
	notices
	records
	counters Counters
	looked   uint64 // clients and tenants that were looked at, in passes over all

	mem            *residency.Memory
	residency.View               // of mem: what callers may ask
	idle           base.Earliest // when idle clients are looked for

	policies []policy
	slices   sliceState
	acts     []base.Action // reused by each Step
}

// settings are what the user has chosen.
type settings struct {
	quantum, grace time.Duration
	mode           Mode
	tuning         account.Tuning
	swapShare      int
}

// New returns the core of a GPU that nobody uses yet. The last epoch and, by
// Restore, the holders must be those that were persisted before a restart.
func New(cfg Config) *GPU {
	c := &GPU{
		settings: settings{
			quantum:   base.Clamp(cmp.Or(cfg.Quantum, DefaultQuantum), MinQuantum, MaxQuantum),
			grace:     base.Clamp(cmp.Or(cfg.Grace, DefaultGrace), MinGrace, MaxGrace),
			mode:      cfg.Mode,
			tuning:    cfg.Tuning.Clamped(),
			swapShare: clampShareOfSwap(cfg.SwapShare),
		},
		clients:  make(map[base.ClientID]*client),
		roster:   roster{tenants: make(map[tenantKey]*tenant)},
		queues:   newQueues(),
		records:  newRecords(cfg.LastEpoch, cfg.Way),
		intact:   cfg.Intact,
		gpu:      cfg.GPU,
		policies: policies(),
	}
	node := cfg.Node
	if node == nil {
		node = NewNode()
	}
	c.clock, c.gangs = &node.clock, node.gangs
	node.clock.Deadlines = append(node.clock.Deadlines, c.deadline)
	c.effective, c.auto.cause = cfg.Mode, because(reasonSet)
	switch cfg.Mode {
	case Auto:
		c.effective, c.auto.cause = Exclusive, because(reasonAlone)
		c.earlier = cfg.Way
	case Concurrent:
		c.auto.way = WayDriver
	}
	c.mem = residency.New(cfg.Memory, &node.Arenas, forMemory{c}, c.do)
	c.View = c.mem.View()
	return c
}

// Step takes note of an event at a time and returns what to do about it. The
// slice is reused by the next Step. A time before that of the latest Step
// counts as that one.
func (c *GPU) Step(now base.Time, ev base.Event) []base.Action {
	now = c.clock.Advance(now)
	if !c.started {
		c.started = true
		if !c.intact {
			c.claimsUntil = now.Add(c.quantum + c.grace)
		}
		if c.restarted {
			c.gangs.Await()
		}
	}
	c.gangs.Stepped(c.gpu)
	c.countCohort(now)
	c.now = now
	c.acts = c.acts[:0]
	c.mem.Begin(now, c.grace)

	if !c.ofClient(ev) && !c.ofMemory(ev) && !c.set(ev) {
		panic(fmt.Sprintf("sched: unknown event %T", ev))
	}
	c.applyPolicies()
	c.settle()
	c.mem.Settle()
	c.forgetTenants()
	for _, gpu := range c.gangs.Others(c.gpu) {
		c.do(StepGPU{gpu})
	}
	return c.acts
}

// set is for events that change a setting. It reports whether this is one.
func (c *GPU) set(ev base.Event) bool {
	switch ev := ev.(type) {
	case SetQuantum:
		c.quantum = base.Clamp(ev.D, MinQuantum, MaxQuantum)
		if c.swapShare == 0 {
			c.owedUntil = min(c.owedUntil, c.now.Add(c.quantum))
		}
	case SetMode:
		c.setMode(ev.M)
	case SetShare:
		c.reshare(ev.Tenant, ev.Share)
		c.mem.Regroup(ev.Tenant, ev.Share.Group())
	case SetSwapShare:
		c.swapShare, c.owedUntil, c.leastUntil = clampShareOfSwap(ev.Percent), c.now, c.now
	case residency.SetTenantMemory:
		if c.mem.SetTenant(ev) {
			c.lookForIdle()
		}
	case residency.SetGPUMemory:
		c.mem.Resize(ev, c.Unused())
	default:
		return false
	}
	return true
}

// ofMemory is for events about memory. It reports whether this is one.
func (c *GPU) ofMemory(ev base.Event) bool {
	switch ev := ev.(type) {
	case residency.Reserve:
		c.mem.Reserve(ev)
	case residency.Moved:
		c.mem.Moved(ev)
	case Suspend:
		c.suspend(ev.Tenant)
	case ResumeTenant:
		c.resumeTenant(ev.Tenant)
	case residency.ArenaChanged:
		c.mem.ArenaChanged(ev)
	case residency.RestoreMemory:
		c.restoreMemory(ev)
	default:
		return false
	}
	return true
}

// ofClient is for events of clients. It reports whether this is one.
func (c *GPU) ofClient(ev base.Event) bool {
	switch ev := ev.(type) {
	case Attach:
		c.attach(ev)
	case Request:
		if cl := c.clients[ev.Client]; cl != nil && cl.connected {
			c.request(cl)
		}
	case Release:
		c.release(ev)
	case Withdraw:
		if cl := c.clients[ev.Client]; cl != nil {
			c.withdraw(cl, ev.Exits)
		}
	case Lost:
		c.lost(ev.Client)
	case Gone:
		c.gone(ev.Client)
	case HeldOff:
		if cl := c.clients[ev.Client]; cl != nil && cl.grant != nil && cl.grant.state == fenced {
			c.recount(cl.grant, func() { cl.grant.off = ev.Off })
		}
	case HeldOn:
		if cl := c.clients[ev.Client]; cl != nil && cl.grant != nil {
			c.heldOn(cl.grant, ev.Late)
		}
	case Exec:
		c.exec(ev.Client)
	case Called:
		c.called(ev.Client)
	case timeslice.Utilization:
		c.utilization(ev)
	case Controls:
		c.control(ev)
	case Restore:
		c.restore(ev)
	case RestoreUnknown:
		c.restoreUnknown(ev)
	case Tick, GangMoved:
	default:
		return false
	}
	return true
}

// Deadline returns when Step must be called next, with a Tick if nothing else
// happens until then; false if never.
func (c *GPU) Deadline() (base.Time, bool) {
	t, ok := c.deadline()
	return c.clock.ToCaller(t), ok
}

// deadline is Deadline by the node's clock.
func (c *GPU) deadline() (base.Time, bool) {
	t, ok := c.due()
	if look := c.now.Add(fencedLook); c.fenced > 0 && (!ok || look < t) {
		return look, true
	}
	return t, ok
}

// lookedPerWork is how many clients a pass looks at for the cost of a Step.
const lookedPerWork = 32

// Work says what all Steps so far have cost, apart from their number: in units of
// about a Step that passes over no list of clients.
func (c *GPU) Work() uint64 {
	return (c.looked + c.mem.Looked()) / lookedPerWork
}

// Next returns the client whose turn is next: it gets a grant as soon as the GPU
// is free, if it does not leave before; 0 if nobody waits, or a gang is next.
func (c *GPU) Next() base.ClientID {
	if c.next != nil {
		return c.next.id
	}
	if t := c.upNext(); t != nil && !t.byGang() {
		return c.nextOf(t).id
	}
	return 0
}

func (c *GPU) do(a base.Action) { c.acts = append(c.acts, a) }

// Node is what the GPUs of a node have in common: one clock, the gangs, and the host
// memory for what is away from GPUs. Its GPUs are used by one goroutine at a time.
type Node struct {
	clock base.Clock
	gangs *gang.Gangs
	// Arenas bounds what clients are promised; NewNode's are without bounds.
	Arenas residency.Arenas
}

// NewNode returns a node without GPUs. New adds them.
func NewNode() *Node {
	n := &Node{Arenas: residency.NewArenas()}
	n.gangs = gang.New(func() base.Time { return n.clock.Now })
	return n
}

// Check returns an error that names the first broken invariant of the gangs, which
// is a bug in this package, or nil. Each StepGPU was carried out.
func (n *Node) Check() error { return n.gangs.Check() }

// fencedLook is the time between two Steps, at most, while a grant is fenced.
// Nothing is due then, but the tenant pays for the GPU, and must not pay for the
// time in which the scheduler was stopped.
const fencedLook = time.Second

// policy is one rule of who is granted, and when a grant is asked back. Each is a function, in the
// file of its matter, and has its line in policies. A Step asks all of them, again and
// again, until nothing changes: they leave nothing undone that is due, and do nothing
// twice. A way to share the GPU, as by time slices, is a policy that grants.
type policy struct {
	due    func(*GPU) (base.Time, bool) // when it has something to do if nothing else happens; nil: never
	revoke func(*GPU)                   // asks back the grants whose time is over; nil: none
	grant  func(*GPU)                   // gives the grants whose time has come; nil: none
}

// policies are in the order in which they are asked.
func policies() []policy {
	return []policy{
		gracePeriods(),
		chosenWay(),
		limits(),
		gangTurns(),
		tenantsBeside(),
		latencyTenants(),
		timeSlices(),
		idleClients(),
		finishingWork(),
		strandedMemory(),
		stalledMoves(),
		turns(),
		sharedTurns(),
		together(),
	}
}

// applyPolicies runs at the end of each Step.
func (c *GPU) applyPolicies() {
	for done := -1; done != c.changes(); { // one may make another due
		done = c.changes()
		for _, p := range c.policies {
			if p.revoke != nil {
				p.revoke(c)
			}
		}
		for _, p := range c.policies {
			if p.grant != nil {
				p.grant(c)
			}
		}
	}
}

// changes counts what policies change and others look at: actions, phases of gangs, and
// clients that begin to wait.
func (c *GPU) changes() int { return len(c.acts) + c.gangs.Changes() + int(c.seq) }

// due returns when something has to be done.
func (c *GPU) due() (base.Time, bool) {
	var e base.Earliest
	for _, p := range c.policies {
		if p.due != nil {
			e.Either(p.due(c))
		}
	}
	return e.At, e.OK
}
