// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// OpenArena makes the pool of host memory; host is where the memory comes from.
func (mem *Memory) OpenArena(host arena.Host, maxReady, maxHeld int) {
	mem.Pool = arena.New(arena.Config{
		Limit: mem.Opts.SwapMemory, Ready: mem.Opts.SwapReady, Leave: arena.Total() / leavePart, MaxReady: maxReady, MaxHeld: maxHeld,
		Spare: func(more uint64) bool {
			mem.ObserveHost()
			return mem.Cores.Arenas.Fits(more) == nil
		},
		Loop: mem.Loop, Timers: &mem.Timers, Host: host, Log: mem.Log,
	})
}

// leavePart is the part of the host's memory that memory which nobody needs yet leaves to
// others: an eighth. With 512 MiB left, the host's other programs were killed by its
// out-of-memory killer.
const leavePart = 8

// AutoSwapMemory is how much host memory there may be for what is away if nobody has said:
// half of what the host has free beyond the part that is left to others. What clients have
// of it since an earlier scheduler counts as free: a restart changes nothing.
func AutoSwapMemory(o *node.Config, before map[string][]MemberState, peers *peer.Finder) uint64 {
	pages, huge, known := arena.Kernel{}.Free()
	total := arena.Total()
	if !known || total == 0 {
		o.Log.Warn("nothing is swapped, because the host does not tell how much memory is free: --swap-memory with a size does without")
		return 0
	}
	bytes := HalfOfSpare(pages+huge+HeldBefore(before, peers.Find), total)
	if bytes == 0 {
		o.Log.Warnf("nothing is swapped, because the host has no memory to spare: %d MiB of %d MiB are free", (pages+huge)>>20, total>>20)
	}
	return bytes
}

// HalfOfSpare is half of what a host has free beyond the part that is left to others, in segments.
func HalfOfSpare(free, total uint64) uint64 {
	spare := free - min(free, total/leavePart)
	return spare / 2 / arena.MinSegment * arena.MinSegment
}

// owner is a client with memory on a GPU, for the pool.
type owner struct {
	mem *Memory
	g   *node.GPU
	*Member
}

// Needs is how much host memory a client needs, now or soon.
func (m *Member) Needs() (now, soon uint64) {
	if m.copied {
		return min(m.want, m.Arena.Bytes()), 0
	}
	return m.want, m.soon
}

func (o owner) Changed() {
	if bytes, c := o.Arena.Bytes(), o.Client.Conn; bytes > o.charged && c != nil {
		c.Account.ChargeArena(bytes-o.charged, time.Now())
		o.charged = bytes
	}
	o.mem.NoteMembers()
	o.mem.Step(o.g, residency.ArenaChanged{Client: o.Client.ID, Bytes: o.Arena.Bytes()})
}

func (o owner) Send(number uint64, s arena.Segment) bool {
	att, c := o.Client.Attached[o.g], o.Client.Conn
	if att == nil || c == nil || c.Dead || c.Channels[att.Channel] != att || !att.Answered {
		return false
	}
	f := wire.Frame{Type: wire.TypeArena, Channel: att.Channel, Arena: wire.Arena{Segment: number, Size: s.Size}}
	if s.Huge {
		f.Arena.Flags = wire.ArenaHuge
	}
	o.mem.Reach(node.BeforeArena)
	o.mem.Send(c, &f, unix.UnixRights(int(s.File.Fd())))
	o.mem.Reach(node.AfterArena)
	return true
}
