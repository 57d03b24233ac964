// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Where more memory is promised than a GPU has, clients move theirs out and in. Package
// sched decides all of that; this file tells it what clients say, and brings its
// decisions to pages, frames and arenas.

// DefaultHeadroom is a thirty-second of the GPU's memory: on one of 141 GiB enough for
// the contexts of eight processes.
const DefaultHeadroom = -1

// memory is that of clients: what they have reserved, what is where, and the host memory for it.
type memory struct {
	*node
	*tenants
	contexts contexts // package away is that
	// copied takes note of what a process says of its copier; package moves does that.
	copied func(att *attachment, noArena, elsewhere bool)
	// sysfs is where that is; not /sys in tests.
	sysfs       string
	pool        *arena.Pool                // of host memory
	swaps       map[*gpu]*swap             // of GPUs where memory is swapped
	outOfMemory map[string]map[*gpu]uint64 // by account, of those with a client: what its limit refused
	members     *timer.Timer               // write the file of who has memory
	before      map[string][]memberState   // of GPUs not found yet, by UUID; see swap_record.go
	unrecorded  bool                       // who has memory could not be recorded
}

// contexts knows where the contexts of clients are, whose memory may be in files.
type contexts interface {
	// isAway tells whether a client is off its GPUs, or on its way.
	isAway(cl *client) bool
	// wasAway notes that a client had left under an earlier scheduler.
	wasAway(cl *client)
	// memoryLeaves is called when a client's memory is to leave until it is called for.
	memoryLeaves(cl *client)
	// foundFiled counts what an earlier scheduler has in a file of a client's memory.
	foundFiled(has *clientMemory)
	isFiled(cl *client) bool
	largestFiled() uint64
}

func newMemory(b *tenants) *memory {
	m := &memory{node: b.node, tenants: b, sysfs: "/sys", swaps: map[*gpu]*swap{}, outOfMemory: map[string]map[*gpu]uint64{}}
	m.members = m.timers.New(m.recordMembers)
	return m
}

// swap is what a GPU has where memory is swapped.
type swap struct {
	arenas  *arena.GPU
	members map[sched.ClientID]*clientMemory
	wanting bool               // somebody wants an arena of another size
	found   []sched.ArenaFound // to be counted
}

// clientMemory is what one client of the GPU has, over its connections. It ends
// with the process, or its program.
type clientMemory struct {
	client     *client
	want, soon uint64 // its arena, as sched.ArenaWanted has it
	charged    uint64 // of its arena, to its account
	arena      *arena.Client
	copied     bool // what leaves is copied to another GPU: it needs no more arena
}

// addMember makes a client known on a GPU where memory is swapped.
func (mem *memory) addMember(g *gpu, cl *client) *clientMemory {
	s, has := mem.swaps[g], &clientMemory{client: cl}
	has.arena = s.arenas.AddClient(arenaOwner{mem, g, has})
	s.members[cl.id] = has
	return has
}

// takeMember has a client leave a GPU with what it has, if memory is swapped there.
func (mem *memory) takeMember(cl *client, g *gpu) *clientMemory {
	has := mem.memberOf(g, cl.id)
	if has != nil {
		delete(mem.swaps[g].members, cl.id)
	}
	return has
}

// putMember has who was taken from a GPU come to another one with its host memory.
func (mem *memory) putMember(has *clientMemory, from, g *gpu) {
	if has == nil || mem.swaps[g] == nil {
		return
	}
	has.want, has.soon, has.copied = 0, 0, false
	mem.swaps[g].members[has.client.id] = has
	has.arena.Move(mem.swaps[g].arenas, arenaOwner{mem, g, has})
	mem.swaps[from].arenas.Prepare()
	mem.noteMembers()
}

// setCopied says whether what leaves is copied to another GPU: then a client needs no more arena.
func (mem *memory) setCopied(cl *client, g *gpu, on bool) {
	if has := mem.memberOf(g, cl.id); has != nil && has.copied != on {
		has.copied = on
		mem.swaps[g].arenas.Prepare()
	}
}

// openMemory is addGPU's part: it says how the memory of a GPU is shared.
func (mem *memory) openMemory(g *gpu, physical uint64) sched.Memory {
	m := sched.Memory{Bytes: g.MemoryBytes, Ceiling: mem.opts.GPUMemory, DefaultLimit: mem.opts.DefaultMemoryLimit}
	if mem.opts.SwapMemory == 0 {
		return m
	}
	if physical == 0 { // with room for nothing, everything would be refused
		mem.log.Warnf("GPU %d: nothing is swapped, because NVML does not tell how much memory it has: --gpu-memory does", g.Index)
		return m
	}
	headroom := uint64(mem.opts.SwapHeadroom)
	if mem.opts.SwapHeadroom == DefaultHeadroom {
		headroom = physical / 32
	}
	m.Swap, m.SuspendAfter, m.Contexts = true, mem.opts.SuspendAfter, mem.opts.Checkpoint != nil
	m.Capacity = min(physical-min(physical, headroom), g.MemoryBytes)
	m.MoveUnit = min(physical/64, 128<<20) // as the shim has it (PIECES)
	m.ArenaUnit = arena.MinSegment
	node := arena.NUMANode(mem.sysfs, g.PCIBusID)
	mem.swaps[g] = &swap{arenas: mem.pool.AddGPU(node), members: map[sched.ClientID]*clientMemory{}}
	near := ""
	if node != arena.NoNode {
		near = fmt.Sprintf(", of NUMA node %d first", node)
	}
	mem.log.Infof("GPU %d: memory is swapped: %d MiB for clients at a time, %d MiB of host memory for all GPUs%s", g.Index, m.Capacity>>20, mem.opts.SwapMemory>>20, near)
	return m
}

// keepOf is how a tenant's memory is to be kept.
func keepOf(t api.Terms) sched.Keep {
	switch t.MemoryMode {
	case api.MemoryMode_MEMORY_MODE_MANAGED:
		return sched.Managed
	case api.MemoryMode_MEMORY_MODE_RESIDENT:
		return sched.Resident
	}
	return sched.Swapped
}

// showMemoryMode tells a client's page how its tenant asks for memory to be kept.
func (mem *memory) showMemoryMode(g *gpu, cl *client, channel uint16) {
	mode := map[sched.Keep]uint32{sched.Managed: wire.SlotManaged, sched.Resident: wire.SlotResident}
	cl.page.SetMemoryMode(channel, mode[keepOf(mem.shares.Tenants[cl.Account].on(g.UUID))])
}

// setTenantMemory brings a GPU and the pages of a tenant's processes into line with what
// its shares say of memory.
func (mem *memory) setTenantMemory(g *gpu, account string) {
	t := mem.shares.Tenants[account].on(g.UUID)
	for cl := range mem.byAccount[account] {
		if att := cl.slotOn(g); att != nil {
			mem.showMemoryMode(g, cl, att.channel)
		}
	}
	mem.step(g, sched.SetTenantMemory{Tenant: account, Limit: t.MemoryLimit, Keep: keepOf(t), SuspendAfter: suspendAfter(t)})
}

// suspendAfter is what the core is told of a tenant's time.
func suspendAfter(t api.Terms) time.Duration {
	if t.SuspendAfter == api.SuspendNever {
		return -1
	}
	return time.Duration(t.SuspendAfter) * time.Second
}

// memberOf returns what a client has of a GPU where memory is swapped; nil: it is not
// known there.
func (mem *memory) memberOf(g *gpu, id sched.ClientID) *clientMemory {
	if s := mem.swaps[g]; s != nil {
		return s.members[id]
	}
	return nil
}

// dropUse forgets what a client has on GPUs, and tells these why: it is dead, or another
// program now.
func (mem *memory) dropUse(cl *client, why sched.Event) {
	for _, g := range mem.order {
		m := mem.memberOf(g, cl.id)
		if m == nil && cl.attached[g] == nil && !g.restored[cl.id] {
			continue
		}
		if m != nil {
			m.arena.Drop()
			delete(mem.swaps[g].members, cl.id)
		}
		mem.step(g, why)
		delete(cl.attached, g)
		delete(g.restored, cl.id)
		if m != nil {
			mem.swaps[g].arenas.Prepare() // others may have what it had
		}
	}
}

// observeHost tells the node how much host memory there is.
func (mem *memory) observeHost() {
	pages, huge, known := mem.pool.Host.Free()
	ready := mem.pool.Held() // which is there for clients
	filed := mem.pool.Filed()
	mem.cores.Arenas.Observe(sched.Host{Used: mem.pool.Used() + filed, Filed: filed, Return: min(filed, mem.contexts.largestFiled()), Ready: ready, Free: pages + huge + ready, FreeKnown: known, Failed: mem.pool.Err()})
}

// carryOutMemory carries out what was decided about memory. None of it depends on what
// was recorded before.
func (mem *memory) carryOutMemory(g *gpu, action sched.Action) (done bool) {
	switch a := action.(type) {
	case sched.Room:
		if att := mem.attachmentOf(g, a.Client); att != nil {
			mem.reach(beforeRoom)
			att.client.page.SetRoom(att.channel, max(a.Bytes, 1)) // 0 means something else
			mem.reach(inRoom)
			mem.tellRoom(att, a.Bytes)
			mem.reach(afterRoom)
		}
	case sched.Reserved:
		mem.reserved(g, a)
	case sched.LimitsChanged:
		mem.showLimits(g, a.Tenant)
	case sched.ArenaWanted:
		if m := mem.memberOf(g, a.Client); m != nil {
			m.want, m.soon, mem.swaps[g].wanting = a.Bytes, a.Soon, true
		}
	case sched.ArenaFound:
		mem.swaps[g].found = append(mem.swaps[g].found, a)
	case sched.Promised:
		mem.noteMembers()
	case sched.SwapDone:
		kind := api.EventType_EVENT_TYPE_SWAP_OUT
		if a.In {
			kind = api.EventType_EVENT_TYPE_SWAP_IN
		}
		mem.turn(time.Now(), g, a.Client, &history.Event{Kind: kind, Bytes: a.Bytes, Took: a.Took})
	case sched.Suspended:
		why := "by order"
		if a.Idle {
			after := mem.opts.SuspendAfter
			if cl := mem.clients[a.Client]; cl != nil {
				after = cmp.Or(suspendAfter(mem.shares.Tenants[cl.Account].on(g.UUID)), after)
			}
			why = fmt.Sprintf("it was idle for %v", after)
		}
		mem.turn(time.Now(), g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_SUSPEND, Bytes: a.Bytes, Text: why})
		if cl := mem.clients[a.Client]; cl != nil {
			mem.contexts.memoryLeaves(cl)
		}
	case sched.SwapStalled:
		mem.noteStall(g, a.Client, fmt.Sprintf("it does not move %d MiB off the GPU, for which others wait", a.Bytes>>20))
	case sched.Stranded:
		mem.noteStall(g, a.Client, strandedText(a.Bytes))
	default:
		return false
	}
	return true
}

// noteStall notes and logs that a client does not get on.
func (mem *memory) noteStall(g *gpu, id sched.ClientID, text string) {
	mem.turn(time.Now(), g, id, &history.Event{Kind: api.EventType_EVENT_TYPE_STALL, Text: text})
	if cl := mem.clients[id]; cl != nil {
		mem.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: %s", g.Index, text))
	}
}

func (mem *memory) tellRoom(att *attachment, bytes uint64) {
	c := att.client.conn
	if c == nil || c.channels[att.channel] != att || !att.answered {
		return
	}
	mem.send(c, &wire.Frame{Type: wire.TypeRoom, Channel: att.channel, Room: wire.Room{Bytes: bytes}}, nil)
}

// moved passes MOVED on.
func (mem *memory) moved(att *attachment, f *wire.Frame) {
	g, id, is := att.gpu, att.client.id, func(flag uint32) bool { return f.Code&flag != 0 }
	if mem.memberOf(g, id) == nil {
		return
	}
	mem.reach(atMoved)
	if is(wire.MovedStuck) {
		mem.log.WithField("client", id).Debugf("GPU %d: cannot move memory: code %#x", g.Index, f.Code)
	}
	mem.noteFixed(att, f.FixedBy())
	mem.copied(att, is(wire.MovedNoArena), is(wire.MovedElsewhere))
	mem.step(g, sched.Moved{
		Client: id, Epoch: sched.Epoch(f.Epoch), Report: sched.Report{Resident: f.Moved.Resident, Fixed: f.Moved.Fixed, Away: f.Moved.Away, Arena: f.Moved.Arena, Out: f.Moved.Out, In: f.Moved.In},
		Ready: is(wire.MovedReady), Stuck: is(wire.MovedStuck), NoMemory: is(wire.MovedNoMemory), NoArena: is(wire.MovedNoArena),
	})
	if att.moves && f.Moved.Resident > f.Moved.Fixed {
		mem.step(g, sched.Suspend{Tenant: att.client.Account}) // it came back after its tenant began to depart
	}
}

// makeArenas has arenas made where the step of a GPU has changed what is wanted.
func (mem *memory) makeArenas(g *gpu) {
	s := mem.swaps[g]
	if s == nil {
		return
	}
	found := s.found
	s.found = nil
	for _, f := range found {
		if m := s.members[f.Client]; m != nil && f.Bytes > m.arena.Given() {
			m.arena.Had(f.Bytes)
			if mem.contexts.isFiled(m.client) {
				m.arena.SetFiled(true)
			}
		}
	}
	if s.wanting {
		s.wanting = false
		mem.extraWork += uint64(len(s.members)) / clientsPerWork
		s.arenas.Prepare()
	}
}
