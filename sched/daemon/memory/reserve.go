// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// noRoomLately is for how long the refusal of a reservation is a problem.
const noRoomLately = time.Minute

var apiKeeps = map[residency.Keep]api.MemoryMode{
	residency.Swapped:  api.MemoryMode_MEMORY_MODE_SWAP,
	residency.Resident: api.MemoryMode_MEMORY_MODE_RESIDENT,
	residency.Managed:  api.MemoryMode_MEMORY_MODE_MANAGED,
}

// SwapStatus describes where the memory of a GPU's clients is, and who waits for
// whom for too long.
func (mem *Memory) SwapStatus(g *node.GPU, share int) (out *api.Swap, problems []string) {
	s := g.Core.MemorySnapshot()
	if s == nil {
		return nil, nil
	}
	out = &api.Swap{
		CapacityBytes: s.Capacity, PromisedBytes: s.Promised,
		ArenaLimitBytes: mem.Pool.Limit, ArenaAuto: mem.Opts.SwapAuto, ArenaUsedBytes: mem.Pool.Used(), ArenaReadyBytes: mem.Pool.Ready(), ArenaFileBytes: mem.Pool.Filed(),
		OutBytes: s.Out.Bytes, InBytes: s.In.Bytes, OutNs: int64(s.Out.Took), InNs: int64(s.In.Took),
		Outs: s.Out.Times, Ins: s.In.Times, OutBytesPerSecond: s.Out.Rate, InBytesPerSecond: s.In.Rate,
		Refused: s.Refused, SharePercent: uint32(share), Suspends: s.Suspends,
	}
	pinned := map[string]uint64{} // by account
	for i := range s.Clients {
		has := &s.Clients[i]
		out.ResidentBytes += has.Resident
		out.FixedBytes += has.Fixed
		out.AwayBytes += has.Away
		if has.Suspended {
			out.Suspended++
		}
		m := mem.MemberOf(g, has.Client)
		if m == nil {
			continue
		}
		out.ArenaBytes += m.Arena.Given() - m.Arena.Filed()
		pinned[m.Client.Account] += has.Fixed
		if has.Stranded != 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) is not granted: %s", g.Index, m.Client.PID, m.Client.Command, strandedText(has.Stranded)))
		}
		waits := fmt.Sprintf("; others wait for %d MiB", s.Lacking>>20)
		if s.Lacking == 0 {
			waits = fmt.Sprintf(", %d times in a row", has.Stalls)
		}
		if has.Stalled && s.Lacking > 0 || has.Stalls > 1 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) does not move its memory off the GPU%s: %s", g.Index, m.Client.PID, m.Client.Command, waits, m.whyStalled()))
		}
	}
	return out, append(problems, mem.largestPinner(g, pinned)...)
}

// whyStalled says why a client does not move, as far as that is known, and what helps.
func (m *Member) whyStalled() string {
	switch {
	case m.stuck&wire.MovedError != 0:
		return "the driver does not let it; end it"
	case m.stuck&wire.MovedNoArena != 0:
		return fmt.Sprintf("it says that it lacks host memory, of which it was given %d of %d MiB; raise --swap-memory, or free some of the host's", m.Arena.Given()>>20, max(m.want, m.Arena.Given())>>20)
	}
	return "it may be stopped, or hang in a call of the driver; let it go on, or end it"
}

// ShortOfHost says that memory of a GPU was refused of late because of host memory.
func (mem *Memory) ShortOfHost(g *node.GPU) (problem []string) {
	if place := (*residency.Unplaceable)(nil); !refusedLately(g) || errors.As(g.WhyNo, &place) || mem.Swaps[g] == nil {
		return nil
	}
	return []string{fmt.Sprintf("GPU %d: memory was refused recently: %v", g.Index, g.WhyNo)}
}

// refusedLately says whether a reservation was refused of late for which there was no room.
func refusedLately(g *node.GPU) bool {
	return g.NoRoom != 0 && loop.Now().Sub(g.NoRoom) <= noRoomLately
}

// largestPinner names the tenant with most memory that cannot be moved, where memory was
// refused of late that would have had a place without.
func (mem *Memory) largestPinner(g *node.GPU, pinned map[string]uint64) (problem []string) {
	if place := (*residency.Unplaceable)(nil); !refusedLately(g) || !errors.As(g.WhyNo, &place) || place.Largest > place.Capacity {
		return nil
	}
	largest, sum := "", uint64(0)
	for account, n := range pinned {
		sum += n
		if n > pinned[largest] || n == pinned[largest] && n > 0 && account < largest {
			largest = account
		}
	}
	if sum == 0 {
		return nil
	}
	c, uid := mem.TenantOf(largest)
	return []string{fmt.Sprintf("GPU %d: memory was refused recently; processes have %d MiB that cannot be moved, of which %s has most, %d MiB",
		g.Index, sum>>20, api.Tenant(c, uid), pinned[largest]>>20)}
}

// MemoryOfClient fills in where a client's memory is; false: that is not known.
func (mem *Memory) MemoryOfClient(g *node.GPU, cl *node.Client, c *api.Client) (known bool) {
	has, known := g.Core.ClientMemory(cl.ID)
	m := mem.MemberOf(g, cl.ID)
	if !known || m == nil {
		return false
	}
	c.MemoryMode = apiKeeps[has.Keep]
	c.ResidentBytes, c.FixedBytes, c.AwayBytes = has.Resident, has.Fixed, has.Away
	c.RoomBytes, c.LacksBytes, c.Stalled, c.Suspended = has.Room, has.Lacks, has.PassedOver, has.Suspended
	if att := cl.Attached[g]; att != nil {
		c.FixedReason = node.FixedText(att.Fixed)
	}
	if !cl.CanMove {
		c.FixedReason = "its driver has no virtual memory management, as on some vGPUs, or its shim is older than swapping"
	}
	c.ArenaBytes, c.FileBytes = m.Arena.Given()-m.Arena.Filed(), m.Arena.Filed()
	c.SwappedOutBytes, c.SwappedInBytes = has.Out, has.In
	return true
}

func strandedText(lacks uint64) string {
	return fmt.Sprintf("it waits for a place: others have made memory unmovable since (by exporting or registering it), and %d MiB do not fit beside that", lacks>>20)
}

// LimitsOn is what the page of a tenant's process says of its limits on the GPU; client 0: of one that
// uses none.
func (mem *Memory) LimitsOn(g *node.GPU, account string, id base.ClientID) wire.Limits {
	s := g.Core.Standing(account, id)
	return wire.Limits{Core: uint32(mem.ShareOf(g, account).Limit), Memory: s.Limit, Used: s.Used}
}

// ShowLimits brings the pages of a tenant's processes into line with the
// ledger of a GPU that they use.
func (mem *Memory) ShowLimits(g *node.GPU, account string) {
	all := mem.ByAccount[account]
	mem.ExtraWork += uint64(len(all)) / node.ClientsPerWork
	for cl := range all {
		if att := cl.Attached[g]; att != nil && cl.Conn != nil && cl.Conn.Channels[att.Channel] == att {
			cl.Page.SetLimits(att.Channel, mem.LimitsOn(g, account, cl.ID))
		}
	}
}

// Reserve passes RESERVE on.
func (mem *Memory) Reserve(att *node.Attachment, f *wire.Frame) {
	r := f.Reserve
	att.Reserves = true
	mem.Step(att.GPU, residency.Reserve{Client: att.Client.ID, Total: r.Total, Least: r.Least, Force: f.Code&wire.ReserveForce != 0, Serial: r.Serial})
}

// reserved answers RESERVE.
func (mem *Memory) reserved(g *node.GPU, a residency.Reserved) {
	att := mem.AttachmentOf(g, a.Client)
	if att == nil {
		return
	}
	cl := att.Client
	answer := wire.Frame{Type: wire.TypeReserved, Channel: att.Channel,
		Reserved: wire.Reserved{Total: a.Stands.Total, Used: a.Stands.Used, Limit: a.Stands.Limit, Serial: a.Serial}}
	switch a.Refused {
	case residency.NoPlace:
		answer.Code = wire.ErrArena
		if !cl.CanMove {
			answer.Code = wire.ErrMemory // all that it knows
		}
		mem.noteNoRoom(g, cl, a.Asked, a.Why)
	case residency.OverCeiling:
		answer.Code = wire.ErrMemory
		mem.noteNoRoom(g, cl, a.Asked, fmt.Errorf("all of its container or user together may have %d MiB (--gpu-memory), and have %d", mem.Opts.GPUMemory>>20, a.Stands.Used>>20))
	case residency.OverLimit:
		answer.Code = wire.ErrMemory
		mem.noteOutOfMemory(g, cl, a.Asked, a.Stands)
	}
	mem.Reach(node.BeforeReserved)
	mem.Send(cl.Conn, &answer, nil)
	mem.Reach(node.AfterReserved)
}

// noteNoRoom notes and logs why a reservation was refused that its tenant's limit allows.
func (mem *Memory) noteNoRoom(g *node.GPU, cl *node.Client, bytes uint64, why error) {
	g.NoRoom, g.WhyNo = loop.Now(), why
	mem.Turn(time.Now(), g, cl.ID, &history.Event{Kind: api.EventType_EVENT_TYPE_NO_ROOM, Bytes: bytes, Text: why.Error()})
	mem.Tell(cl.Subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: refuse %d MiB: %v", g.Index, bytes>>20, why))
}

// noteOutOfMemory counts a reservation that its tenant's limit refused. Programs try
// again and again, so the tenant causes an event in node.RefusalPause only.
func (mem *Memory) noteOutOfMemory(g *node.GPU, cl *node.Client, bytes uint64, stands residency.Standing) {
	all := mem.OutOfMemory[cl.Account]
	if all == nil {
		all = map[*node.GPU]uint64{}
		mem.OutOfMemory[cl.Account] = all
	}
	all[g]++
	t := time.Now()
	if !mem.MayTell("memory of "+g.UUID+" "+cl.Account, t) {
		return
	}
	why := fmt.Sprintf("the limit of %d MiB: its process wanted %d MiB in all, and all of its processes have %d MiB", stands.Limit>>20, bytes>>20, stands.Used>>20)
	mem.History.AddCaused(mem.EventOf(t, g, cl.ID, &history.Event{Kind: api.EventType_EVENT_TYPE_OUT_OF_MEMORY, Bytes: bytes, Text: why}))
	mem.Tell(cl.Subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: out of memory by %s", g.Index, why))
}

// unlimited names the processes of a tenant with a memory limit whose shims have memory
// that they did not reserve: they are older than limits.
func (mem *Memory) unlimited(g *node.GPU, account string) (problems []string) {
	for cl := range mem.ByAccount[account] {
		if att := cl.Attached[g]; att != nil && !att.Reserves && att.Stats.MemBytes > 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: %s (pid %d) has %d MiB in spite of its limit: its shim %s is too old to hold a memory limit",
				g.Index, api.Tenant(mem.ContainerOf(cl.Peer), cl.UID), cl.PID, att.Stats.MemBytes>>20, node.ShimVersion(cl.Reg.ShimVersion)))
		}
	}
	slices.Sort(problems)
	return problems
}

// MemoryStatus describes a GPU's ledger, and what is wrong in it.
func (mem *Memory) MemoryStatus(g *node.GPU) (accounts []*api.MemoryAccount, problems []string) {
	tenants, stand := g.Core.Reservations()
	for i, account := range tenants {
		r := stand[i]
		a := &api.MemoryAccount{LimitBytes: r.Limit, UsedBytes: r.Used}
		a.Container, a.Uid = mem.TenantOf(account)
		accounts = append(accounts, a)
		if r.Limit != 0 && r.Used > r.Limit {
			problems = append(problems, fmt.Sprintf("GPU %d: %s uses %d MiB of memory, over its limit of %d MiB; it gets no more until it has freed enough",
				g.Index, api.Tenant(a.Container, a.Uid), r.Used>>20, r.Limit>>20))
		}
		if r.Limit != 0 {
			problems = append(problems, mem.unlimited(g, account)...)
		}
	}
	return accounts, problems
}

// OpenArena makes the pool of host memory, and looks how much of it there is; host is where the memory comes from.
func (mem *Memory) OpenArena(host arena.Host, maxReady, maxHeld int) {
	leave, floor := arena.Total()/leavePart, uint64(arena.HostReserve)
	if mem.Opts.SwapAuto { // nobody has said that this host can spare more
		floor = max(floor, leave/2)
	}
	mem.Pool = arena.New(arena.Config{
		Limit: mem.Opts.SwapMemory, Ready: mem.Opts.SwapReady, Leave: leave, Floor: floor, MaxReady: maxReady, MaxHeld: maxHeld,
		Spare: func(more uint64) bool {
			mem.ObserveHost()
			return mem.Cores.Arenas.Fits(more) == nil
		},
		Loop: mem.Loop, Timers: &mem.Timers, Host: host, Log: mem.Log,
	})
	mem.ObserveHost()
}

// leavePart is the part of the host's memory that memory which nobody needs yet leaves to
// others: an eighth. With 512 MiB left, the host's other programs were killed by its
// out-of-memory killer.
const leavePart = 8

// AutoSwapMemory is the most host memory that there may ever be for what is away if nobody has said how
// much: see ObserveHost. 0: there is none; why says so.
func AutoSwapMemory(host arena.Host, total uint64) (bytes uint64, why string) {
	if _, _, known := host.Free(); !known || total == 0 {
		return 0, "the host does not tell how much memory it has free: --swap-memory with a size does without"
	}
	if bytes = HalfOfSpare(total, total); bytes == 0 {
		why = fmt.Sprintf("the host, or the cgroup of the scheduler, has %d MiB of memory only", total>>20)
	}
	return bytes, why
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

// Needs is how much host memory a client needs.
func (m *Member) Needs() uint64 { return m.want }

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
