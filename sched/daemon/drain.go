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
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// A drained GPU admits no new tenants. Those that use the GPU, or were given it by the
// plugin, go on. The clients of others are attached and wait: the core is not told that
// they want the GPU, until it is undrained.

// belongs says whether a client's tenant is on a GPU already, or was given the GPU by the
// plugin.
func (d *Daemon) belongs(g *gpu, cl *client) bool {
	for other := range d.byAccount[cl.Account] {
		if att := other.attached[g]; att != nil && !att.held {
			return true
		}
	}
	return slices.Contains(d.names[cl.Container].GetGpus(), g.UUID)
}

// holds says whether a client is to wait because the GPU is drained. An epoch is of a grant.
func (d *Daemon) holds(g *gpu, cl *client, again bool, epoch uint64) bool {
	if !g.drained || epoch != 0 || d.belongs(g, cl) {
		return false
	}
	return !again || slices.Contains(d.settings.set.Held[g.UUID], cl.Process)
}

// noteHeld records that a client waits because the GPU is drained.
func (d *Daemon) noteHeld(g *gpu, cl *client) {
	held := d.settings.set.Held[g.UUID]
	if slices.Contains(held, cl.Process) {
		return
	}
	if d.settings.set.Held == nil {
		d.settings.set.Held = map[string][]peer.Process{}
	}
	d.settings.set.Held[g.UUID] = append(held, cl.Process)
	d.extraWork += persistCost
	d.settings.keepSettings()
}

// drain answers the control call.
func (d *Daemon) drain(req *api.DrainRequest) (*api.DrainResponse, error) {
	g := d.findGPU(req.Gpu)
	if g == nil {
		return nil, noSuchGPU(req.Gpu)
	}
	resp := &api.DrainResponse{Uuid: g.UUID, Index: uint32(g.Index), WasDrained: g.drained}
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

func (d *Daemon) setDrained(g *gpu, on bool) error {
	next := d.settings.set
	next.Drained = slices.DeleteFunc(slices.Clone(next.Drained), func(uuid string) bool { return uuid == g.UUID })
	if on {
		next.Drained = append(next.Drained, g.UUID)
	} else {
		next.Held, next.Faults = maps.Clone(next.Held), maps.Clone(next.Faults)
		delete(next.Held, g.UUID)
		delete(next.Faults, g.UUID)
	}
	if g.drained != on || !on && g.fault != "" {
		if err := d.settings.changeSettings(next); err != nil {
			return err
		}
		d.noteSetting(g, "", false, "drained", fmt.Sprint(g.drained), fmt.Sprint(on))
		d.log.Infof("GPU %d: drained: %v", g.Index, on)
	}
	g.drained = on
	if !on {
		g.fault = ""
		d.admitHeld(g)
		if g.MemoryBytes == 0 { // it could not be opened; it may have been reset
			d.search.Set(d.discovered.Add(rediscoverPause))
		}
	}
	return nil
}

// usesOf returns the tenants that use a GPU, by name, and why those stay that cannot move to
// another one. Who waits because the GPU is drained uses it only with memory there.
func (d *Daemon) usesOf(g *gpu) (all []*api.DrainTenant) {
	for account, clients := range d.byAccount {
		uses, waits := false, false
		for cl := range clients {
			att := cl.attached[g]
			if att != nil && att.held {
				waits = waits || att.stats.MemBytes > 0 || g.core.ReservedBy(account, cl.id).Total > 0
			} else {
				uses = uses || att != nil || g.restored[cl.id] || d.memberOf(g, cl.id) != nil
			}
		}
		if !uses && !waits {
			continue
		}
		u := &api.DrainTenant{}
		u.Container, u.Uid = d.tenantOf(account)
		all = append(all, u)
		if !uses {
			u.Stays = fmt.Sprintf("%s cannot move to another GPU: it waits for this one, where it has memory", d.nameOf(account))
			continue
		}
		from, _, why := d.movable(account)
		if why == nil {
			_, why = d.destination(account, from, "")
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
func (d *Daemon) admitHeld(g *gpu) {
	for _, id := range slices.Sorted(maps.Keys(d.clients)) {
		cl := d.clients[id]
		att := cl.attached[g]
		if att == nil || !att.held {
			continue
		}
		att.held = false
		if att.wants {
			att.wants = false
			d.step(g, sched.Request{Client: cl.id})
		}
	}
}

// held counts the clients that wait because the GPU is drained.
func (d *Daemon) held(g *gpu) (n uint32) {
	for _, cl := range d.clients {
		if att := cl.attached[g]; att != nil && att.held {
			n++
		}
	}
	return n
}

// recordFault has the next scheduler know of a GPU's fault: the driver tells of most of them once.
func (d *Daemon) recordFault(g *gpu) {
	if d.settings.set.Faults == nil {
		d.settings.set.Faults = map[string]fault{}
	}
	d.settings.set.Faults[g.UUID] = fault{d.bootID, g.fault}
	d.settings.keepSettings()
}

// faultBefore is a fault that an earlier scheduler has recorded; "": none since the machine's start.
func (d *Daemon) faultBefore(uuid string) string {
	if f := d.settings.set.Faults[uuid]; f.BootID == d.bootID {
		return f.Text
	}
	return ""
}

// noteFaults takes over what the driver tells of GPUs that do no more work.
func (d *Daemon) noteFaults(samples []metrics.GPUSample) {
	for _, s := range samples {
		for _, g := range d.order {
			if g.UUID != s.UUID || s.Faults <= g.faults {
				continue
			}
			g.faults, g.fault = s.Faults, s.Fault
			d.recordFault(g)
			d.log.Errorf("GPU %d: %s", g.Index, s.Fault)
			d.noteChange(g, &history.Event{Kind: api.EventType_EVENT_TYPE_GPU, Text: s.Fault})
		}
	}
}

// reportDrain adds what is wrong with a GPU, or waits for an administrator.
func (d *Daemon) reportDrain(r *api.StatusResponse, g *gpu) {
	if g.fault != "" {
		report(r, api.ProblemCode_PROBLEM_CODE_FAULT, fmt.Sprintf("GPU %d: %s: reset the GPU, then run nvsharectl undrain --gpu %d", g.Index, g.fault, g.Index))
	}
	if n := d.held(g); n > 0 {
		report(r, api.ProblemCode_PROBLEM_CODE_DRAINED, fmt.Sprintf("GPU %d is drained: %d new processes wait; nvsharectl undrain --gpu %d admits them", g.Index, n, g.Index))
	}
}
