// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
	"github.com/nvshare/nvshare/sched/residency"
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
	Tuning    Tuning
	SwapShare int    // percent of the time that moving memory may take: turns are as long as that needs; 0: as Quantum says
	LastEpoch Epoch  // the last epoch persisted; the next grant's is higher
	Way       Way    // as persisted with that; means something in mode Auto
	Intact    bool   // what was persisted is known: a client that claims another grant is mistaken, or lies
	GPU       string // its name in StepGPU
	Node      *Node  // nil: of this GPU alone
	Memory    Memory
}

// GPU is the machine that schedules one GPU. Make one with New. Its parts are where their fields are
// used most.
type GPU struct {
	settings
	effective Mode // Exclusive or Concurrent
	auto      auto
	cohort    cohort
	looks     spaceLook

	gpu   string
	clock *clock      // of the node
	gangs *gang.Gangs // of the node

	started     bool
	intact      bool // as Config says
	now         Time // of the latest Step; never runs backwards
	claimsUntil Time // see attach
	earlier     Way  // from before a restart, until that way begins again; see resumeWay

	clients   map[ClientID]*client
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
	acts     []Action // reused by each Step
}

// settings are what the user has chosen.
type settings struct {
	quantum, grace time.Duration
	mode           Mode
	tuning         Tuning
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
		clients:  make(map[ClientID]*client),
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
	node.clock.gpus = append(node.clock.gpus, c)
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
func (c *GPU) Step(now Time, ev Event) []Action {
	now = c.clock.advance(now)
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
func (c *GPU) set(ev Event) bool {
	switch ev := ev.(type) {
	case SetQuantum:
		c.quantum = base.Clamp(ev.D, MinQuantum, MaxQuantum)
		if c.swapShare == 0 {
			c.owedUntil = min(c.owedUntil, c.now.Add(c.quantum))
		}
	case SetGrace:
		c.grace = base.Clamp(ev.D, MinGrace, MaxGrace)
		c.mem.Begin(c.now, c.grace)
	case SetMode:
		c.setMode(ev.M)
	case SetShare:
		c.reshare(ev.Tenant, ev.Share)
		c.mem.Regroup(ev.Tenant, ev.Share.Group())
	case SetTuning:
		c.setTuning(ev.Tuning)
	case SetSwapShare:
		c.swapShare, c.owedUntil = clampShareOfSwap(ev.Percent), c.now
	case SetTenantMemory:
		if c.mem.SetTenant(ev) {
			c.lookForIdle()
		}
	case SetGPUMemory:
		c.mem.Resize(ev, c.Unused())
	default:
		return false
	}
	return true
}

// ofMemory is for events about memory. It reports whether this is one.
func (c *GPU) ofMemory(ev Event) bool {
	switch ev := ev.(type) {
	case Reserve:
		c.mem.Reserve(ev)
	case Moved:
		c.mem.Moved(ev)
	case Suspend:
		c.suspend(ev.Tenant)
	case ResumeTenant:
		c.resumeTenant(ev.Tenant)
	case ArenaChanged:
		c.mem.ArenaChanged(ev)
	case RestoreMemory:
		c.restoreMemory(ev)
	default:
		return false
	}
	return true
}

// ofClient is for events of clients. It reports whether this is one.
func (c *GPU) ofClient(ev Event) bool {
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
			c.withdraw(cl)
		}
	case Lost:
		c.lost(ev.Client)
	case Gone:
		c.gone(ev.Client)
	case HeldOff:
		if cl := c.clients[ev.Client]; cl != nil && cl.grant != nil && cl.grant.state == fenced {
			c.recount(cl.grant, func() { cl.grant.off = ev.Off })
		}
	case Exec:
		c.exec(ev.Client)
	case Called:
		c.called(ev.Client)
	case Utilization:
		c.utilization(ev)
	case Filled:
		c.filled(ev)
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
func (c *GPU) Deadline() (Time, bool) {
	t, ok := c.deadline()
	return c.clock.toCaller(t), ok
}

// deadline is Deadline by the node's clock.
func (c *GPU) deadline() (Time, bool) {
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
func (c *GPU) Next() ClientID {
	if c.next != nil {
		return c.next.id
	}
	if t := c.upNext(); t != nil && !t.byGang() {
		return c.nextOf(t).id
	}
	return 0
}

func (c *GPU) do(a Action) { c.acts = append(c.acts, a) }
