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
	"github.com/nvshare/nvshare/sched/wire"
)

// Where more memory is promised than a GPU has, clients move theirs out and in. Package
// sched decides all of that; this file tells it what clients say, and brings its
// decisions to pages, frames and arenas.

// DefaultHeadroom is a thirty-second of the GPU's memory: on one of 141 GiB enough for
// the contexts of eight processes.
const DefaultHeadroom = -1

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
func (d *Daemon) addMember(g *gpu, cl *client) *clientMemory {
	m := &clientMemory{client: cl}
	m.arena = g.swap.arenas.AddClient(arenaOwner{d, g, m})
	g.swap.members[cl.id] = m
	return m
}

// openMemory is addGPU's part: it says how the memory of a GPU is shared.
func (d *Daemon) openMemory(g *gpu, physical uint64) sched.Memory {
	m := sched.Memory{Ceiling: d.opts.GPUMemory, DefaultLimit: d.opts.DefaultMemoryLimit}
	if d.opts.SwapMemory == 0 {
		return m
	}
	if physical == 0 { // with room for nothing, everything would be refused
		d.log.Warnf("GPU %d: nothing is swapped, because NVML does not tell how much memory it has: --gpu-memory does", g.Index)
		return m
	}
	headroom := uint64(d.opts.SwapHeadroom)
	if d.opts.SwapHeadroom == DefaultHeadroom {
		headroom = physical / 32
	}
	m.Swap, m.SuspendAfter, m.Contexts = true, d.opts.SuspendAfter, d.opts.Checkpoint != nil
	m.Capacity = min(physical-min(physical, headroom), g.MemoryBytes)
	m.MoveUnit = min(physical/64, 128<<20) // as the shim has it (PIECES)
	m.ArenaUnit = arena.MinSegment
	node := arena.NUMANode(d.sysfs, g.PCIBusID)
	g.swap = &swap{arenas: d.arena.AddGPU(node), members: map[sched.ClientID]*clientMemory{}}
	near := ""
	if node != arena.NoNode {
		near = fmt.Sprintf(", of NUMA node %d first", node)
	}
	d.log.Infof("GPU %d: memory is swapped: %d MiB for clients at a time, %d MiB of host memory for all GPUs%s", g.Index, m.Capacity>>20, d.opts.SwapMemory>>20, near)
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
func (d *Daemon) showMemoryMode(g *gpu, cl *client, channel uint16) {
	mode := map[sched.Keep]uint32{sched.Managed: wire.SlotManaged, sched.Resident: wire.SlotResident}
	cl.page.SetMemoryMode(channel, mode[keepOf(d.shares.Tenants[cl.Account].on(g.UUID))])
}

// setTenantMemory brings a GPU and the pages of a tenant's processes into line with what
// its shares say of memory.
func (d *Daemon) setTenantMemory(g *gpu, account string) {
	t := d.shares.Tenants[account].on(g.UUID)
	for cl := range d.byAccount[account] {
		if att := cl.slotOn(g); att != nil {
			d.showMemoryMode(g, cl, att.channel)
		}
	}
	d.step(g, sched.SetTenantMemory{Tenant: account, Limit: t.MemoryLimit, Keep: keepOf(t), SuspendAfter: suspendAfter(t)})
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
func (g *gpu) memberOf(id sched.ClientID) *clientMemory {
	if g.swap == nil {
		return nil
	}
	return g.swap.members[id]
}

// dropUse forgets what a client has on GPUs, and tells these why: it is dead, or another
// program now.
func (d *Daemon) dropUse(cl *client, why sched.Event) {
	for _, g := range d.order {
		m := g.memberOf(cl.id)
		if m == nil && cl.attached[g] == nil && !g.restored[cl.id] {
			continue
		}
		if m != nil {
			m.arena.Drop()
			delete(g.swap.members, cl.id)
		}
		d.step(g, why)
		delete(cl.attached, g)
		delete(g.restored, cl.id)
		if m != nil {
			g.swap.arenas.Prepare() // others may have what it had
		}
	}
}

// observeHost tells the node how much host memory there is.
func (d *Daemon) observeHost() {
	pages, huge, known := d.arena.Host.Free()
	ready := d.arena.Held() // which is there for clients
	filed := d.arena.Filed()
	d.node.Arenas.Observe(sched.Host{Used: d.arena.Used() + filed, Filed: filed, Return: min(filed, d.largestFiled()), Ready: ready, Free: pages + huge + ready, FreeKnown: known, Failed: d.arena.Err()})
}

// carryOutMemory carries out what was decided about memory. None of it depends on what
// was recorded before.
func (d *Daemon) carryOutMemory(g *gpu, action sched.Action) (done bool) {
	switch a := action.(type) {
	case sched.Room:
		if att := d.attachmentOf(g, a.Client); att != nil {
			d.reach(beforeRoom)
			att.client.page.SetRoom(att.channel, max(a.Bytes, 1)) // 0 means something else
			d.reach(inRoom)
			d.tellRoom(att, a.Bytes)
			d.reach(afterRoom)
		}
	case sched.Reserved:
		d.reserved(g, a)
	case sched.LimitsChanged:
		d.showLimits(g, a.Tenant)
	case sched.ArenaWanted:
		if m := g.memberOf(a.Client); m != nil {
			m.want, m.soon, g.swap.wanting = a.Bytes, a.Soon, true
		}
	case sched.ArenaFound:
		g.swap.found = append(g.swap.found, a)
	case sched.Promised:
		d.noteMembers()
	case sched.SwapDone:
		kind := api.EventType_EVENT_TYPE_SWAP_OUT
		if a.In {
			kind = api.EventType_EVENT_TYPE_SWAP_IN
		}
		d.turn(time.Now(), g, a.Client, &history.Event{Kind: kind, Bytes: a.Bytes, Took: a.Took})
	case sched.Suspended:
		why := "by order"
		if a.Idle {
			after := d.opts.SuspendAfter
			if cl := d.clients[a.Client]; cl != nil {
				after = cmp.Or(suspendAfter(d.shares.Tenants[cl.Account].on(g.UUID)), after)
			}
			why = fmt.Sprintf("it was idle for %v", after)
		}
		d.turn(time.Now(), g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_SUSPEND, Bytes: a.Bytes, Text: why})
		if cl := d.clients[a.Client]; cl != nil {
			d.expectCheckpoints(1) // while its memory leaves
			d.considerLeaving(cl)  // it may have nothing on the GPU but its context
		}
	case sched.SwapStalled:
		d.noteStall(g, a.Client, fmt.Sprintf("it does not move %d MiB off the GPU, for which others wait", a.Bytes>>20))
	case sched.Stranded:
		d.noteStall(g, a.Client, strandedText(a.Bytes))
	default:
		return false
	}
	return true
}

// noteStall notes and logs that a client does not get on.
func (d *Daemon) noteStall(g *gpu, id sched.ClientID, text string) {
	d.turn(time.Now(), g, id, &history.Event{Kind: api.EventType_EVENT_TYPE_STALL, Text: text})
	if cl := d.clients[id]; cl != nil {
		d.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: %s", g.Index, text))
	}
}

func (d *Daemon) tellRoom(att *attachment, bytes uint64) {
	c := att.client.conn
	if c == nil || c.channels[att.channel] != att || !att.answered {
		return
	}
	d.send(c, &wire.Frame{Type: wire.TypeRoom, Channel: att.channel, Room: wire.Room{Bytes: bytes}}, nil)
}

// moved passes MOVED on.
func (d *Daemon) moved(att *attachment, f *wire.Frame) {
	g, id, is := att.gpu, att.client.id, func(flag uint32) bool { return f.Code&flag != 0 }
	if g.memberOf(id) == nil {
		return
	}
	d.reach(atMoved)
	if is(wire.MovedStuck) {
		d.log.WithField("client", id).Debugf("GPU %d: cannot move memory: code %#x", g.Index, f.Code)
	}
	d.noteFixed(att, f.FixedBy())
	d.noteCopied(att, is(wire.MovedNoArena), is(wire.MovedElsewhere))
	d.step(g, sched.Moved{
		Client: id, Epoch: sched.Epoch(f.Epoch), Report: sched.Report{Resident: f.Moved.Resident, Fixed: f.Moved.Fixed, Away: f.Moved.Away, Arena: f.Moved.Arena, Out: f.Moved.Out, In: f.Moved.In},
		Ready: is(wire.MovedReady), Stuck: is(wire.MovedStuck), NoMemory: is(wire.MovedNoMemory), NoArena: is(wire.MovedNoArena),
	})
	if att.moves && f.Moved.Resident > f.Moved.Fixed {
		d.step(g, sched.Suspend{Tenant: att.client.Account}) // it came back after its tenant began to depart
	}
}

// residentFits says why a tenant's memory cannot be kept on a GPU.
func (d *Daemon) residentFits(g *gpu, account string, old, to tenantShares, who string) error {
	is := keepOf(to.on(g.UUID))
	if is == keepOf(old.on(g.UUID)) {
		return nil
	}
	if err := g.core.KeepFits(account, is); err != nil {
		return notResident(g, who, err)
	}
	return nil
}
