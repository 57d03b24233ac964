// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/warden/order"
)

// Nothing refuses a process without a shim memory above its tenant's limit. So one of a tenant that stays above it is
// killed, as the kernel kills one of a cgroup above memory.max. A process that has the shim never is: it reserves what it
// has, or will once it can register (it is stopped, or being debugged).

const (
	// overFor is how long a tenant may be above its limit.
	overFor = time.Second
	// contextBytes is for each process: NVML counts its context, which is nobody's doing.
	contextBytes = 640 << 20
	// killPause is how long after the scheduler's start nobody is killed: clients register again.
	killPause = 30 * time.Second
)

// tellKernel has the kernel hold tenants with a memory limit to it as well, where it can: each cgroup of theirs, with a
// process on the GPU. The kernel's limit is higher by cgroup.Slack, so the shim has always refused before.
func (w *Watch) tellKernel(found map[string][]stranger) {
	h := w.Holder
	now := map[limitedOn]uint64{}
	tell := func(g *node.GPU, p *peer.Peer) {
		at := limitedOn{g, p.Process}
		limit := g.Core.Standing(p.Account, 0).Limit
		was, known := h.told[at]
		now[at] = limit
		if h.noRegion[g] || known && was == limit { // that there is none is told once too: one may be left from before
			return
		}
		o := order.Order{Op: order.Limit, PID: int(p.PID), Start: p.Start, Container: p.Container, UID: p.UID, GPU: []string{g.PCIBusID, g.UUID}, Bytes: limit}
		h.order(w, o, func(r order.Result) {
			switch {
			case r.Error == order.NoRegion:
				h.noRegion[g] = true
			case r.Error != "" && !r.Gone:
				delete(h.told, at)
				w.Log.Debugf("GPU %d: the kernel does not hold process %d to its memory limit: %s", g.Index, p.PID, r.Error)
			}
		})
	}
	for _, g := range w.Order {
		for _, s := range found[g.UUID] {
			tell(g, s.peer)
		}
		for _, cl := range w.Clients {
			if cl.Attached[g] != nil {
				tell(g, cl.Peer)
			}
		}
	}
	h.told = now
}

type limitedOn struct {
	gpu     *node.GPU
	process peer.Process
}

// tenantOn is a tenant on a GPU.
type tenantOn struct {
	gpu     *node.GPU
	account string
}

// killOverLimit looks which tenants have more memory than they may, and has the largest process of each that is so for
// too long be killed.
func (w *Watch) killOverLimit(found map[string][]stranger) {
	h, t := w.Holder, loop.Now()
	over, shims := map[tenantOn]base.Time{}, map[peer.Process]bool{}
	for _, g := range w.Order {
		most, sum := map[string]stranger{}, map[string]uint64{}
		for _, s := range found[g.UUID] {
			account := s.peer.Account
			if w.ByProc[s.peer.Process] != nil || !w.holds(g, account, s.peer.Container) {
				continue
			}
			sum[account] += s.bytes - min(s.bytes, contextBytes)
			if h.shims[s.peer.Process] {
				shims[s.peer.Process] = true
			} else if s.bytes > most[account].bytes {
				most[account] = s
			}
		}
		for account, s := range most {
			limit, used := g.Core.Standing(account, 0).Limit, sum[account]
			for cl := range w.ByAccount[account] {
				used += g.Core.ReservedBy(account, cl.ID).Total
			}
			if limit == 0 || used <= limit {
				continue
			}
			at := tenantOn{g, account}
			since, was := h.over[at]
			switch {
			case !was:
				over[at] = t
			case t.Sub(since) < overFor || t.Sub(h.opened) < w.KillPause:
				over[at] = since
			default: // and another one after as long again
				w.killForMemory(g, s, used, limit)
			}
		}
	}
	h.over, h.shims = over, shims
}

func (w *Watch) killForMemory(g *node.GPU, s stranger, used, limit uint64) {
	w.Holder.order(w, order.Order{Op: order.Kill, PID: int(s.peer.PID), Start: s.peer.Start}, func(r order.Result) {
		if r.Error == order.HasShim {
			w.Holder.shims[s.peer.Process] = true
			return
		}
		if r.Error != "" {
			if !r.Gone {
				w.Log.Errorf("GPU %d: process %d is above the memory limit of its tenant and cannot be killed: %s", g.Index, s.peer.PID, r.Error)
			}
			return
		}
		g.OOMKills++
		why := fmt.Sprintf("process %d (%q) is killed: it has %d MiB without nvshare, its tenant %d MiB, and the limit is %d MiB", s.peer.PID, s.peer.Command, s.bytes>>20, used>>20, limit>>20)
		w.Tell(node.Subject{Peer: s.peer}, logrus.WarnLevel, fmt.Sprintf("GPU %d: out of memory: %s", g.Index, why))
		e := w.EventOf(time.Now(), g, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_OOM_KILL, Peer: s.peer, Names: w.Names[s.peer.Container], Bytes: s.bytes, Text: why})
		w.History.AddCaused(e)
	})
}
