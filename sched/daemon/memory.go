// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/wire"
)

// limitsOn is what the page of a tenant's process says of the GPU; client 0: of one that
// uses none.
func limitsOn(g *gpu, account string, id sched.ClientID) wire.Limits {
	s := g.core.Standing(account, id)
	return wire.Limits{Memory: s.Limit, Used: s.Used}
}

// showLimits brings the pages of a tenant's processes into line with the
// ledger of a GPU that they use.
func (mem *memory) showLimits(g *gpu, account string) {
	all := mem.byAccount[account]
	mem.extraWork += uint64(len(all)) / clientsPerWork
	for cl := range all {
		if att := cl.attached[g]; att != nil && cl.conn != nil && cl.conn.channels[att.channel] == att {
			cl.page.SetLimits(att.channel, limitsOn(g, account, cl.id))
		}
	}
}

// reserve passes RESERVE on.
func (mem *memory) reserve(att *attachment, f *wire.Frame) {
	r := f.Reserve
	att.reserves = true
	mem.step(att.gpu, sched.Reserve{Client: att.client.id, Total: r.Total, Least: r.Least, Force: f.Code&wire.ReserveForce != 0, Serial: r.Serial})
}

// reserved answers RESERVE.
func (mem *memory) reserved(g *gpu, a sched.Reserved) {
	att := mem.attachmentOf(g, a.Client)
	if att == nil {
		return
	}
	cl := att.client
	answer := wire.Frame{Type: wire.TypeReserved, Channel: att.channel,
		Reserved: wire.Reserved{Total: a.Stands.Total, Used: a.Stands.Used, Limit: a.Stands.Limit, Serial: a.Serial}}
	switch a.Refused {
	case sched.NoPlace:
		answer.Code = wire.ErrArena
		if !cl.canMove {
			answer.Code = wire.ErrMemory // all that it knows
		}
		mem.noteNoRoom(g, cl, a.Asked, a.Why.Error())
	case sched.OverCeiling:
		answer.Code = wire.ErrMemory
		mem.noteNoRoom(g, cl, a.Asked, fmt.Sprintf("all of its container or user together may have %d MiB (--gpu-memory), and have %d", mem.opts.GPUMemory>>20, a.Stands.Used>>20))
	case sched.OverLimit:
		answer.Code = wire.ErrMemory
		mem.noteOutOfMemory(g, cl, a.Asked, a.Stands)
	}
	mem.reach(beforeReserved)
	mem.send(cl.conn, &answer, nil)
	mem.reach(afterReserved)
}

// noteNoRoom notes and logs why a reservation was refused that its tenant's limit allows.
func (mem *memory) noteNoRoom(g *gpu, cl *client, bytes uint64, why string) {
	g.noRoom = now()
	mem.turn(time.Now(), g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_NO_ROOM, Bytes: bytes, Text: why})
	mem.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: refuse %d MiB: %s", g.Index, bytes>>20, why))
}

// noteOutOfMemory counts a reservation that its tenant's limit refused. Programs try
// again and again, so the tenant causes an event in refusalPause only.
func (mem *memory) noteOutOfMemory(g *gpu, cl *client, bytes uint64, stands sched.Standing) {
	all := mem.outOfMemory[cl.Account]
	if all == nil {
		all = map[*gpu]uint64{}
		mem.outOfMemory[cl.Account] = all
	}
	all[g]++
	t := time.Now()
	if !mem.mayTell("memory of "+g.UUID+" "+cl.Account, t) {
		return
	}
	why := fmt.Sprintf("the limit of %d MiB: its process wanted %d MiB in all, and all of its processes have %d MiB", stands.Limit>>20, bytes>>20, stands.Used>>20)
	mem.history.AddCaused(mem.eventOf(t, g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_OUT_OF_MEMORY, Bytes: bytes, Text: why}))
	mem.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: out of memory by %s", g.Index, why))
}

// unlimited names the processes of a tenant with a memory limit whose shims have memory
// that they did not reserve: they are older than limits.
func (mem *memory) unlimited(g *gpu, account string) (problems []string) {
	for cl := range mem.byAccount[account] {
		if att := cl.attached[g]; att != nil && !att.reserves && att.stats.MemBytes > 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: %s (pid %d) has %d MiB in spite of its limit: its shim %s is too old to hold a memory limit",
				g.Index, api.Tenant(mem.containerOf(cl.Peer), cl.UID), cl.PID, att.stats.MemBytes>>20, shimVersion(cl.reg.ShimVersion)))
		}
	}
	slices.Sort(problems)
	return problems
}

// memoryStatus describes a GPU's ledger, and what is wrong in it.
func (mem *memory) memoryStatus(g *gpu) (accounts []*api.MemoryAccount, problems []string) {
	tenants, stand := g.core.Reservations()
	for i, account := range tenants {
		r := stand[i]
		a := &api.MemoryAccount{LimitBytes: r.Limit, UsedBytes: r.Used}
		a.Container, a.Uid = mem.tenantOf(account)
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
