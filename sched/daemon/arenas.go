// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// openArena makes the pool of host memory; host is where the memory comes from.
func (mem *memory) openArena(host arena.Host, maxReady, maxHeld int) {
	mem.pool = arena.New(arena.Config{
		Limit: mem.opts.SwapMemory, Ready: mem.opts.SwapReady, Leave: arena.Total() / leavePart, MaxReady: maxReady, MaxHeld: maxHeld,
		Spare: func(more uint64) bool {
			mem.observeHost()
			return mem.cores.Arenas.Fits(more) == nil
		},
		Loop: mem.loop, Timers: &mem.timers, Host: host, Log: mem.log,
	})
}

// leavePart is the part of the host's memory that memory which nobody needs yet leaves to
// others: an eighth. With 512 MiB left, the host's other programs were killed by its
// out-of-memory killer.
const leavePart = 8

// autoSwapMemory is how much host memory there may be for what is away if nobody has said:
// half of what the host has free beyond the part that is left to others. What clients have
// of it since an earlier scheduler counts as free: a restart changes nothing.
func autoSwapMemory(o *Config, before map[string][]memberState, peers *peer.Finder) uint64 {
	pages, huge, known := arena.Kernel{}.Free()
	total := arena.Total()
	if !known || total == 0 {
		o.Log.Warn("nothing is swapped, because the host does not tell how much memory is free: --swap-memory with a size does without")
		return 0
	}
	bytes := halfOfSpare(pages+huge+heldBefore(before, peers.Find), total)
	if bytes == 0 {
		o.Log.Warnf("nothing is swapped, because the host has no memory to spare: %d MiB of %d MiB are free", (pages+huge)>>20, total>>20)
	}
	return bytes
}

func halfOfSpare(free, total uint64) uint64 {
	spare := free - min(free, total/leavePart)
	return spare / 2 / arena.MinSegment * arena.MinSegment
}

// arenaOwner is a client with memory on a GPU, for the pool.
type arenaOwner struct {
	mem *memory
	g   *gpu
	m   *clientMemory
}

func (o arenaOwner) Needs() (now, soon uint64) {
	if o.m.copied {
		return min(o.m.want, o.m.arena.Bytes()), 0
	}
	return o.m.want, o.m.soon
}

func (o arenaOwner) Changed() {
	if bytes, c := o.m.arena.Bytes(), o.m.client.conn; bytes > o.m.charged && c != nil {
		c.account.ChargeArena(bytes-o.m.charged, time.Now())
		o.m.charged = bytes
	}
	o.mem.noteMembers()
	o.mem.step(o.g, sched.ArenaChanged{Client: o.m.client.id, Bytes: o.m.arena.Bytes()})
}

func (o arenaOwner) Send(number uint64, s arena.Segment) bool {
	att, c := o.m.client.attached[o.g], o.m.client.conn
	if att == nil || c == nil || c.dead || c.channels[att.channel] != att || !att.answered {
		return false
	}
	f := wire.Frame{Type: wire.TypeArena, Channel: att.channel, Arena: wire.Arena{Segment: number, Size: s.Size}}
	if s.Huge {
		f.Arena.Flags = wire.ArenaHuge
	}
	o.mem.reach(beforeArena)
	o.mem.send(c, &f, unix.UnixRights(int(s.File.Fd())))
	o.mem.reach(afterArena)
	return true
}
