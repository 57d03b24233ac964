// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"cmp"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// Where more memory is promised than a GPU has, clients move theirs out and in. Package
// sched decides all of that; this file tells it what clients say, and brings its
// decisions to pages, frames and arenas.

// DefaultHeadroom is a thirty-second of the GPU's memory: on one of 141 GiB enough for
// the contexts of eight processes.
const DefaultHeadroom = -1

// Memory is that of clients: what they have reserved, what is where, and the host memory for it.
type Memory struct {
	*node.Node
	*tenants.Book
	Contexts contexts // set by away.New; used only after that
	// sysfs is where that is; not /sys in tests.
	sysfs       string
	Pool        *arena.Pool                     // of host memory
	NoHost      string                          // why there is none for what is away, where SwapMemory is 0
	Swaps       map[*node.GPU]*swap             // of GPUs where memory is swapped
	OutOfMemory map[string]map[*node.GPU]uint64 // by account, of those with a client: what its limit refused
	Members     *state.Keeper                   // of who has memory
	Before      map[string][]MemberState        // of GPUs not found yet, by UUID; see swap_record.go
}

// contexts knows where the contexts of clients are, whose memory may be in files.
type contexts interface {
	// IsAway tells whether a client is off its GPUs, or on its way.
	IsAway(cl *node.Client) bool
	// WasAway notes that a client had left under an earlier scheduler.
	WasAway(cl *node.Client)
	// MemoryLeaves is called when a client's memory is to leave until it is called for.
	MemoryLeaves(cl *node.Client)
	// FoundFiled counts what an earlier scheduler has in a file of a client's memory.
	FoundFiled(has *Member)
	IsFiled(cl *node.Client) bool
	LargestFiled() uint64
}

// New returns the memory of nobody: call OpenArena. Package away makes itself known.
func New(b *tenants.Book) *Memory {
	m := &Memory{Node: b.Node, Book: b, sysfs: "/sys", Swaps: map[*node.GPU]*swap{}, OutOfMemory: map[string]map[*node.GPU]uint64{}}
	m.Members = state.NewKeeper(&m.Timers, m.Log, MembersPath(m.Opts.RunDir), "processes with memory on GPUs", m.membersFile)
	return m
}

// swap is what a GPU has where memory is swapped.
type swap struct {
	Arenas  *arena.GPU
	members map[base.ClientID]*Member
	wanting bool                   // somebody wants an arena of another size
	found   []residency.ArenaFound // to be counted
}

// Member is what one client of the GPU has, over its connections. It ends
// with the process, or its program.
type Member struct {
	Client  *node.Client
	want    uint64 // its arena, as residency.ArenaWanted has it
	charged uint64 // of its arena, to its account
	stuck   uint32 // why it says that it cannot go on, as MOVED has it; 0: it does not
	Arena   *arena.Client
}

// AddMember makes a client known on a GPU where memory is swapped.
func (mem *Memory) AddMember(g *node.GPU, cl *node.Client) *Member {
	s, has := mem.Swaps[g], &Member{Client: cl}
	has.Arena = s.Arenas.AddClient(owner{mem, g, has})
	s.members[cl.ID] = has
	return has
}

// TakeMember has a client leave a GPU with what it has, if memory is swapped there.
func (mem *Memory) TakeMember(cl *node.Client, g *node.GPU) *Member {
	has := mem.MemberOf(g, cl.ID)
	if has != nil {
		delete(mem.Swaps[g].members, cl.ID)
	}
	return has
}

// PutMember has who was taken from a GPU come to another one with its host memory.
func (mem *Memory) PutMember(has *Member, from, g *node.GPU) {
	if has == nil || mem.Swaps[g] == nil {
		return
	}
	has.want = 0
	mem.Swaps[g].members[has.Client.ID] = has
	has.Arena.Move(mem.Swaps[g].Arenas, owner{mem, g, has})
	mem.Swaps[from].Arenas.Prepare()
	mem.NoteMembers()
}

// OpenMemory is Daemon.newGPU's part: it says how the memory of a GPU is shared.
func (mem *Memory) OpenMemory(g *node.GPU, physical uint64) residency.Config {
	m := residency.Config{Ceiling: mem.Opts.GPUMemory, DefaultLimit: mem.Opts.DefaultMemoryLimit}
	if mem.Opts.SwapMemory == 0 {
		return m
	}
	if physical == 0 { // with room for nothing, everything would be refused
		return m
	}
	headroom := uint64(mem.Opts.SwapHeadroom)
	if mem.Opts.SwapHeadroom == DefaultHeadroom {
		headroom = physical / 32
	}
	m.Swap, m.SuspendAfter, m.Contexts = true, mem.Opts.SuspendAfter, mem.Opts.Checkpoint != nil
	m.Physical = min(physical, g.MemoryBytes)
	m.Capacity = min(physical-min(physical, headroom), g.MemoryBytes)
	m.MoveUnit = min(physical/64, 128<<20) // as the shim has it (PIECES)
	m.ArenaUnit = arena.MinSegment
	node := arena.NUMANode(mem.sysfs, g.PCIBusID)
	mem.Swaps[g] = &swap{Arenas: mem.Pool.AddGPU(node), members: map[base.ClientID]*Member{}}
	near := ""
	if node != arena.NoNode {
		near = fmt.Sprintf(", of NUMA node %d first", node)
	}
	mem.Log.Infof("GPU %d: memory is swapped: %d MiB for clients at a time, %d MiB of host memory for all GPUs%s", g.Index, m.Capacity>>20, mem.Opts.SwapMemory>>20, near)
	return m
}

// NotSwapped says why the memory of a GPU is not swapped; "": it is.
func (mem *Memory) NotSwapped(g *node.GPU) string {
	switch {
	case mem.Swaps[g] != nil:
		return ""
	case mem.Opts.SwapMemory == 0:
		return mem.NoHost
	case g.MemoryBytes == 0:
		return "NVML does not tell how much memory the GPU has: --gpu-memory does"
	}
	return "how much memory the GPU has was not known when its tenants began: nvshare-scheduler, restarted, swaps it"
}

// KeepOf is how a tenant's memory is to be kept.
func KeepOf(t api.Terms) residency.Keep {
	switch t.MemoryMode {
	case api.MemoryMode_MEMORY_MODE_MANAGED:
		return residency.Managed
	case api.MemoryMode_MEMORY_MODE_RESIDENT:
		return residency.Resident
	}
	return residency.Swapped
}

// ShowMemoryMode tells a client's page how its tenant asks for memory to be kept.
func (mem *Memory) ShowMemoryMode(g *node.GPU, cl *node.Client, channel uint16) {
	mode := map[residency.Keep]uint32{residency.Managed: wire.SlotManaged, residency.Resident: wire.SlotResident}
	cl.Page.SetMemoryMode(channel, mode[KeepOf(mem.Shares.Tenants[cl.Account].On(g.UUID))])
}

// SetTenantMemory brings a GPU and the pages of a tenant's processes into line with what
// its shares say of memory.
func (mem *Memory) SetTenantMemory(g *node.GPU, account string) {
	t := mem.Shares.Tenants[account].On(g.UUID)
	for cl := range mem.ByAccount[account] {
		if att := cl.SlotOn(g); att != nil {
			mem.ShowMemoryMode(g, cl, att.Channel)
		}
	}
	mem.ShowLimits(g, account)
	mem.Step(g, residency.SetTenantMemory{Tenant: account, Limit: t.MemoryLimit, Keep: KeepOf(t), SuspendAfter: suspendAfter(t)})
}

// suspendAfter is what the core is told of a tenant's time.
func suspendAfter(t api.Terms) time.Duration {
	if t.SuspendAfter == api.SuspendNever {
		return -1
	}
	return time.Duration(t.SuspendAfter) * time.Second
}

// MemberOf returns what a client has of a GPU where memory is swapped; nil: it is not
// known there.
func (mem *Memory) MemberOf(g *node.GPU, id base.ClientID) *Member {
	if s := mem.Swaps[g]; s != nil {
		return s.members[id]
	}
	return nil
}

// DropUse forgets what a client has on GPUs, and tells these why: it is dead, or another
// program now.
func (mem *Memory) DropUse(cl *node.Client, why base.Event) {
	for _, g := range mem.Order {
		m := mem.MemberOf(g, cl.ID)
		if m == nil && cl.Attached[g] == nil && !g.Restored[cl.ID] {
			continue
		}
		if m != nil {
			m.Arena.Drop()
			delete(mem.Swaps[g].members, cl.ID)
		}
		mem.Step(g, why)
		delete(cl.Attached, g)
		delete(g.Restored, cl.ID)
		if m != nil {
			mem.Swaps[g].Arenas.Prepare() // others may have what it had
		}
	}
}

// ObserveHost tells the node how much host memory there is. With --swap-memory auto what is away may take half
// of what the host has free now, and of what it takes already, beyond the part that is left to others.
func (mem *Memory) ObserveHost() {
	pages, huge, known := mem.Pool.Host.Free()
	ready := mem.Pool.Held() // which is there for clients
	filed := mem.Pool.Filed()
	if mem.Opts.SwapAuto && known {
		mem.Pool.Limit = min(HalfOfSpare(pages+huge+ready+mem.Pool.Used(), arena.Total()), mem.Opts.SwapMemory)
		mem.Cores.Arenas.Bound(mem.Pool.Limit, arena.HostReserve)
	}
	mem.Cores.Arenas.Observe(residency.Host{Used: mem.Pool.Used() + filed, Filed: filed, Return: min(filed, mem.Contexts.LargestFiled()), Ready: ready, Free: pages + huge + ready, FreeKnown: known, Failed: mem.Pool.Err()})
}

// CarryOutMemory carries out what was decided about memory. None of it depends on what
// was recorded before.
func (mem *Memory) CarryOutMemory(g *node.GPU, action base.Action) (done bool) {
	switch a := action.(type) {
	case residency.Room:
		if att := mem.AttachmentOf(g, a.Client); att != nil {
			mem.Reach(node.BeforeRoom)
			att.Client.Page.SetRoom(att.Channel, max(a.Bytes, 1), a.Seq) // 0 means something else
			mem.Reach(node.InRoom)
			mem.tellRoom(att, a.Bytes)
			mem.Reach(node.AfterRoom)
		}
	case residency.Still:
		mem.ExtraWork += uint64(len(mem.Swaps[g].members)) / node.ClientsPerWork
		for _, m := range mem.Swaps[g].members {
			if att := m.Client.SlotOn(g); att != nil {
				m.Client.Page.SetStill(att.Channel, a.On)
			}
		}
	case residency.Reserved:
		mem.reserved(g, a)
	case residency.LimitsChanged:
		mem.ShowLimits(g, a.Tenant)
	case residency.ArenaWanted:
		if m := mem.MemberOf(g, a.Client); m != nil {
			m.want, mem.Swaps[g].wanting = a.Bytes, true
		}
	case residency.ArenaFound:
		mem.Swaps[g].found = append(mem.Swaps[g].found, a)
	case residency.Promised:
		mem.NoteMembers()
	case residency.SwapDone:
		kind := api.EventType_EVENT_TYPE_SWAP_OUT
		if a.In {
			kind = api.EventType_EVENT_TYPE_SWAP_IN
		}
		mem.Turn(time.Now(), g, a.Client, &history.Event{Kind: kind, Bytes: a.Bytes, Took: a.Took})
	case residency.Suspended:
		why := "by order"
		if a.Idle {
			after := mem.Opts.SuspendAfter
			if cl := mem.Clients[a.Client]; cl != nil {
				after = cmp.Or(suspendAfter(mem.Shares.Tenants[cl.Account].On(g.UUID)), after)
			}
			why = fmt.Sprintf("it was idle for %v", after)
		}
		mem.Turn(time.Now(), g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_SUSPEND, Bytes: a.Bytes, Text: why})
		if cl := mem.Clients[a.Client]; cl != nil {
			mem.Contexts.MemoryLeaves(cl)
		}
	case residency.SwapStalled:
		mem.noteStall(g, a.Client, fmt.Sprintf("it does not move %d MiB off the GPU, for which others wait", a.Bytes>>20))
	case residency.Stranded:
		mem.noteStall(g, a.Client, strandedText(a.Bytes))
	default:
		return false
	}
	return true
}

// noteStall notes and logs that a client does not get on.
func (mem *Memory) noteStall(g *node.GPU, id base.ClientID, text string) {
	mem.Turn(time.Now(), g, id, &history.Event{Kind: api.EventType_EVENT_TYPE_STALL, Text: text})
	if cl := mem.Clients[id]; cl != nil {
		mem.Tell(cl.Subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: %s", g.Index, text))
	}
}

func (mem *Memory) tellRoom(att *node.Attachment, bytes uint64) {
	c := att.Client.Conn
	if c == nil || c.Channels[att.Channel] != att || !att.Answered {
		return
	}
	mem.Send(c, &wire.Frame{Type: wire.TypeRoom, Channel: att.Channel, Room: wire.Room{Bytes: bytes}}, nil)
}

// Moved passes MOVED on.
func (mem *Memory) Moved(att *node.Attachment, f *wire.Frame) {
	g, id, is := att.GPU, att.Client.ID, func(flag uint32) bool { return f.Code&flag != 0 }
	m := mem.MemberOf(g, id)
	if m == nil {
		return
	}
	mem.Reach(node.AtMoved)
	m.stuck = 0
	if is(wire.MovedStuck) {
		m.stuck = f.Code & (wire.MovedNoArena | wire.MovedError)
		mem.Log.WithField("client", id).Debugf("GPU %d: cannot move memory: code %#x", g.Index, f.Code)
	}
	mem.NoteFixed(att, f.FixedBy())
	mem.Step(g, residency.Moved{
		Client: id, Epoch: base.Epoch(f.Epoch), Seen: f.Seen(), Report: residency.Report{Resident: f.Moved.Resident, Fixed: f.Moved.Fixed, Away: f.Moved.Away, Arena: f.Moved.Arena, Out: f.Moved.Out, In: f.Moved.In},
		Ready: is(wire.MovedReady), Stuck: is(wire.MovedStuck), NoMemory: is(wire.MovedNoMemory), NoArena: is(wire.MovedNoArena),
	})
}

// MakeArenas has arenas made where the step of a GPU has changed what is wanted.
func (mem *Memory) MakeArenas(g *node.GPU) {
	s := mem.Swaps[g]
	if s == nil {
		return
	}
	found := s.found
	s.found = nil
	for _, f := range found {
		if m := s.members[f.Client]; m != nil && f.Bytes > m.Arena.Given() {
			m.Arena.Had(f.Bytes)
			if mem.Contexts.IsFiled(m.Client) {
				m.Arena.SetFiled(true)
			}
		}
	}
	if s.wanting {
		s.wanting = false
		mem.ExtraWork += uint64(len(s.members)) / node.ClientsPerWork
		s.Arenas.Prepare()
	}
}
