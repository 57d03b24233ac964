// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/settings"
)

// A drained GPU admits no new tenants. Those that use the GPU, or were given it by the
// plugin, go on. The clients of others are attached and wait: the core is not told that
// they want the GPU, until it is undrained.

// belongs says whether a client's tenant is on a GPU already, or was given the GPU by the
// plugin.
func (d *Daemon) belongs(g *node.GPU, cl *node.Client) bool {
	for other := range d.ByAccount[cl.Account] {
		if att := other.Attached[g]; att != nil && !att.Held {
			return true
		}
	}
	return slices.Contains(d.Names[cl.Container].GetGpus(), g.UUID)
}

// holds says whether a client is to wait because the GPU is drained. An epoch is of a grant.
func (d *Daemon) holds(g *node.GPU, cl *node.Client, again bool, epoch uint64) bool {
	if !g.Drained || epoch != 0 || d.belongs(g, cl) {
		return false
	}
	return !again || slices.Contains(d.settings.Set.Held[g.UUID], cl.Process)
}

// noteHeld records that a client waits because the GPU is drained.
func (d *Daemon) noteHeld(g *node.GPU, cl *node.Client) {
	held := d.settings.Set.Held[g.UUID]
	if slices.Contains(held, cl.Process) {
		return
	}
	if d.settings.Set.Held == nil {
		d.settings.Set.Held = map[string][]peer.Process{}
	}
	d.settings.Set.Held[g.UUID] = append(held, cl.Process)
	d.ExtraWork += persistCost
	d.settings.Keep()
}

// drain answers the control call.
func (d *Daemon) drain(req *api.DrainRequest) (*api.DrainResponse, error) {
	g := d.FindGPU(req.Gpu)
	if g == nil {
		return nil, node.NoSuchGPU(req.Gpu)
	}
	resp := &api.DrainResponse{Uuid: g.UUID, Index: uint32(g.Index), WasDrained: g.Drained}
	if !req.Look {
		if err := d.setDrained(g, !req.Undrain); err != nil {
			return nil, err
		}
	}
	resp.Uses = d.usesOf(g)
	for _, u := range resp.Uses {
		resp.Tenants = append(resp.Tenants, api.Tenant(u.Container, u.Uid))
	}
	return resp, nil
}

func (d *Daemon) setDrained(g *node.GPU, on bool) error {
	next := d.settings.Set
	next.Drained = slices.DeleteFunc(slices.Clone(next.Drained), func(uuid string) bool { return uuid == g.UUID })
	if on {
		next.Drained = append(next.Drained, g.UUID)
	} else {
		next.Held, next.Faults = maps.Clone(next.Held), maps.Clone(next.Faults)
		delete(next.Held, g.UUID)
		delete(next.Faults, g.UUID)
	}
	if g.Drained != on || !on && g.Fault != "" {
		if err := d.settings.Change(next); err != nil {
			return err
		}
		d.NoteSetting(g, "", false, "drained", fmt.Sprint(g.Drained), fmt.Sprint(on))
		d.Log.Infof("GPU %d: drained: %v", g.Index, on)
	}
	g.Drained = on
	if !on {
		g.Fault = ""
		d.admitHeld(g)
		if g.MemoryBytes == 0 { // it could not be opened; it may have been reset
			d.search.Set(d.discovered.Add(rediscoverPause))
		}
	}
	return nil
}

// usesOf returns the tenants that use a GPU, by name, and why those stay that cannot move to
// another one. Who waits because the GPU is drained uses it only with memory there.
func (d *Daemon) usesOf(g *node.GPU) (all []*api.DrainTenant) {
	for account, clients := range d.ByAccount {
		uses, waits := false, false
		for cl := range clients {
			att := cl.Attached[g]
			if att != nil && att.Held {
				waits = waits || att.Stats.MemBytes > 0 || g.Core.ReservedBy(account, cl.ID).Total > 0
			} else {
				uses = uses || att != nil || g.Restored[cl.ID] || d.memory.MemberOf(g, cl.ID) != nil
			}
		}
		if !uses && !waits {
			continue
		}
		u := &api.DrainTenant{}
		u.Container, u.Uid = d.TenantOf(account)
		all = append(all, u)
		if !uses {
			u.Stays = fmt.Sprintf("%s cannot move to another GPU: it waits for this one, where it has memory", d.NameOf(account))
			continue
		}
		from, _, why := d.moves.Movable(account)
		if why == nil {
			_, why = d.moves.Destination(account, from, "")
		}
		if why != nil {
			u.Stays = status.Convert(why).Message()
		}
	}
	slices.SortFunc(all, func(a, b *api.DrainTenant) int {
		return strings.Compare(api.Tenant(a.Container, a.Uid), api.Tenant(b.Container, b.Uid))
	})
	return all
}

// admitHeld tells the core what the clients want that waited.
func (d *Daemon) admitHeld(g *node.GPU) {
	for _, id := range slices.Sorted(maps.Keys(d.Clients)) {
		cl := d.Clients[id]
		att := cl.Attached[g]
		if att == nil || !att.Held {
			continue
		}
		att.Held = false
		if att.Wants {
			att.Wants = false
			d.step(g, sched.Request{Client: cl.ID})
		}
	}
}

// held counts the clients that wait because the GPU is drained.
func (d *Daemon) held(g *node.GPU) (n uint32) {
	for _, cl := range d.Clients {
		if att := cl.Attached[g]; att != nil && att.Held {
			n++
		}
	}
	return n
}

// recordFault has the next scheduler know of a GPU's fault: the driver tells of most of them once.
func (d *Daemon) recordFault(g *node.GPU) {
	if d.settings.Set.Faults == nil {
		d.settings.Set.Faults = map[string]settings.Fault{}
	}
	d.settings.Set.Faults[g.UUID] = settings.Fault{BootID: d.BootID, Text: g.Fault}
	d.settings.Keep()
}

// faultBefore is a fault that an earlier scheduler has recorded; "": none since the machine's start.
func (d *Daemon) faultBefore(uuid string) string {
	if f := d.settings.Set.Faults[uuid]; f.BootID == d.BootID {
		return f.Text
	}
	return ""
}

// noteFaults takes over what the driver tells of GPUs that do no more work.
func (d *Daemon) noteFaults(samples []metrics.GPUSample) {
	for _, s := range samples {
		for _, g := range d.Order {
			if g.UUID != s.UUID || s.Faults <= g.Faults {
				continue
			}
			g.Faults, g.Fault = s.Faults, s.Fault
			d.recordFault(g)
			d.Log.Errorf("GPU %d: %s", g.Index, s.Fault)
			d.NoteChange(g, &history.Event{Kind: api.EventType_EVENT_TYPE_GPU, Text: s.Fault})
		}
	}
}

// reportDrain adds what is wrong with a GPU, or waits for an administrator.
func (d *Daemon) reportDrain(r *api.StatusResponse, g *node.GPU) {
	if g.Fault != "" {
		report(r, api.ProblemCode_PROBLEM_CODE_FAULT, fmt.Sprintf("GPU %d: %s: reset the GPU, then run nvsharectl undrain --gpu %d", g.Index, g.Fault, g.Index))
	}
	if n := d.held(g); n > 0 {
		report(r, api.ProblemCode_PROBLEM_CODE_DRAINED, fmt.Sprintf("GPU %d is drained: %d new processes wait; nvsharectl undrain --gpu %d admits them", g.Index, n, g.Index))
	}
}
