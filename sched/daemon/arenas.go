// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/wire"
)

// openArena makes the pool of host memory; host is where the memory comes from.
func (d *Daemon) openArena(host arena.Host, maxReady, maxHeld int) {
	d.arena = arena.New(arena.Config{
		Limit: d.opts.SwapMemory, Ready: d.opts.SwapReady, MaxReady: maxReady, MaxHeld: maxHeld,
		Spare: func(more uint64) bool { return d.arenaFits(d.arenaNeeded(nil)+more) == nil },
		Loop:  arenaLoop{d}, Timers: &d.timers, Host: host, Log: d.log,
	})
}

// arenaLoop is the daemon's loop, for the pool.
type arenaLoop struct{ d *Daemon }

func (l arenaLoop) Do(f func()) bool       { return l.d.do(f) }
func (l arenaLoop) Go(f func())            { l.d.wg.Go(f) }
func (l arenaLoop) Ended() <-chan struct{} { return l.d.ended }
func (l arenaLoop) Now() sched.Time        { return now() }

// arenaOwner is a client with memory on a GPU, for the pool.
type arenaOwner struct {
	d *Daemon
	g *gpu
	m *clientMemory
}

// Needs says what the client needs; and, where all that is reserved just fits on
// the GPU, what the client will need if that goes on to grow.
func (o arenaOwner) Needs() (needs, soon uint64) {
	r, id := o.g.swap.residency, o.m.client.id
	needs = r.Arena(id, arena.MinSegment, 0)
	n, capacity := r.Promised(), r.Capacity()
	if len(o.g.swap.members) > 1 && n > capacity/5*4 && n <= capacity {
		return needs, r.Arena(id, arena.MinSegment, n/4)
	}
	return needs, needs
}

func (o arenaOwner) Changed() { o.d.noteMembers() }

func (o arenaOwner) Send(number uint64, s arena.Segment) bool {
	att, c := o.m.client.attached[o.g], o.m.client.conn
	if att == nil || c == nil || c.dead || c.channels[att.channel] != att || !att.answered {
		return false
	}
	f := wire.Frame{Type: wire.TypeArena, Channel: att.channel, Arena: wire.Arena{Segment: number, Size: s.Size}}
	if s.Huge {
		f.Arena.Flags = wire.ArenaHuge
	}
	o.d.reach(beforeArena)
	o.d.send(c, &f, unix.UnixRights(int(s.File.Fd())))
	o.d.reach(afterArena)
	return true
}

// addArena gives a client of a GPU its part of the pool.
func (d *Daemon) addArena(g *gpu, m *clientMemory) {
	m.arena = g.swap.arenas.AddClient(arenaOwner{d, g, m})
}

// arenaFits says why so much in all cannot be had.
func (d *Daemon) arenaFits(total uint64) error {
	used := d.arena.Used()
	if total <= used {
		return nil // it is there
	}
	if total > d.opts.SwapMemory {
		return fmt.Errorf("what is away then may take %d MiB of host memory, and there are %d MiB (--swap-memory), of which clients have %d", total>>20, d.opts.SwapMemory>>20, used>>20)
	}
	more, stock := total-used, d.arena.Held() // which is there for clients
	if err := d.arena.Err(); err != nil && more > stock {
		return fmt.Errorf("host memory for what is away cannot be had: %w", err)
	}
	if pages, huge, ok := d.arena.Host.Free(); ok && more+arena.HostReserve > pages+huge+stock {
		return fmt.Errorf("what is away then may take %d MiB more of host memory, and %d MiB are left", more>>20, (pages+huge+stock)>>20)
	}
	return nil
}

// countOldArena counts what a client says that it got from an earlier scheduler, as far
// as the client can have needed that.
func (g *gpu) countOldArena(m *clientMemory) {
	o, _ := g.swap.residency.Occupancy(m.client.id)
	if n := min(m.moved.Arena, o.Promised+arena.MaxSegment); n > m.arena.Given() {
		m.arena.Had(n)
	}
}
