// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/settings"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// mayRediscover starts a search for GPUs unless one ended just now, and
// reports whether its result is to be waited for.
func (d *Daemon) mayRediscover() bool {
	if d.discovering {
		return true
	}
	if d.discovered != 0 && loop.Now().Sub(d.discovered) < rediscoverPause {
		return false
	}
	d.search.Set(loop.Now())
	d.discovering = true
	return true
}

// startDiscovery searches for GPUs beside the loop: the driver may take its
// time, and clients of known GPUs must not wait for it.
func (d *Daemon) startDiscovery() {
	d.discovering = true
	ctx, cancel := context.WithTimeout(d.Life, discoverTimeout)
	d.Go(func() {
		defer cancel()
		found, err := d.own.List(ctx)
		d.Do(func() { d.finishDiscovery(found, err) })
	})
}

func (d *Daemon) finishDiscovery(found []node.Found, err error) {
	first := d.discovered == 0
	d.discovering = false
	d.discovered = loop.Now()
	if err != nil && (d.discoverErr == nil || err.Error() != d.discoverErr.Error()) {
		d.Log.WithError(err).Warn("search for GPUs")
	}
	d.discoverErr = err
	for _, info := range found {
		if err := d.addGPU(info); err != nil {
			d.Log.WithError(err).Warn("ignore a GPU")
		}
	}
	d.memory.Pool.Prepare()
	d.reviewOverlap()
	if len(d.Order) == 0 {
		if first && err == nil {
			d.Log.Warnf("no GPU found (is the NVIDIA driver loaded? nvidia-smi -L lists its GPUs): looking again every %v", rescanPause)
		}
		d.search.Set(loop.Now().Add(rescanPause))
	}
	pending := d.pending
	d.pending = nil
	for _, p := range pending {
		p.Conn.Waiting[p.Frame.Channel] = nil
		if !p.Conn.Dead {
			d.attach(p.Conn, &p.Frame, true)
		}
		for i := range p.Reserves {
			d.frame(p.Conn, &p.Reserves[i])
		}
	}
}

// addGPU takes in a GPU that was found.
func (d *Daemon) addGPU(info node.Found) error {
	uuid, err := wire.ParseUUID(info.UUID)
	if err != nil {
		return err
	}
	physical := info.MemoryBytes
	if d.Gpus[uuid] != nil && physical == 0 {
		return nil // nothing new: NVML cannot open it, at least now
	}
	if info.Unopened && d.faultBefore(info.UUID) == "" && !slices.Contains(d.settings.Set.Drained, info.UUID) {
		return nil // it is found with its memory when it is well, and somebody uses it
	}
	if d.Opts.GPUMemory != 0 && physical == 0 { // not known: no NVML
		physical, info.MemoryBytes = d.Opts.GPUMemory, d.Opts.GPUMemory
	} else if d.Opts.GPUMemory != 0 {
		info.MemoryBytes = min(info.MemoryBytes, d.Opts.GPUMemory)
	}
	if g := d.Gpus[uuid]; g != nil {
		d.foundAgain(g, info, physical)
	} else {
		d.newGPU(uuid, info, physical)
	}
	return nil
}

// foundAgain is for a GPU that is known: its index, its name or its memory may be others since.
func (d *Daemon) foundAgain(g *node.GPU, info node.Found, physical uint64) {
	changed := g.MemoryBytes != info.MemoryBytes
	g.Found = info
	d.sortGPUs() // its index may be another one since
	if !changed {
		return
	}
	switch {
	case d.memory.Swaps[g] != nil || d.Opts.SwapMemory == 0:
	case g.Core.Unused():
		m := d.memory.OpenMemory(g, physical)
		d.step(g, residency.SetGPUMemory{Swap: &m})
	default:
		d.Log.Warnf("GPU %d: it has %d MiB, as is known now; they are swapped once nvshare-scheduler was restarted", g.Index, info.MemoryBytes>>20)
	}
}

// newGPU makes the core of a GPU that is not known yet, from what the state file says about it.
func (d *Daemon) newGPU(uuid wire.UUID, info node.Found, physical uint64) {
	last := d.state.GPUs[info.UUID]
	intact := last != nil
	if !intact {
		last = &state.GPU{}
		if d.cautious {
			// Above every earlier epoch, as long as there was less than one
			// grant per microsecond on average.
			last.Epoch = base.NextEpoch(base.Epoch(time.Now().UnixMicro()))
			last.Unrecorded = true
		}
		d.state.GPUs[info.UUID] = last
	}
	quantum, mode := d.settings.Of(info.UUID)
	g := &node.GPU{Found: info, Restored: map[base.ClientID]bool{}, Quantum: quantum, Mode: mode, Drained: slices.Contains(d.settings.Set.Drained, info.UUID), Fault: d.faultBefore(info.UUID)}
	g.Core = sched.New(sched.Config{
		Quantum:   quantum,
		Grace:     d.own.Grace,
		Mode:      mode,
		Tuning:    d.own.Tuning,
		SwapShare: d.settings.SwapShare(info.UUID),
		LastEpoch: last.Epoch,
		Way:       last.Way,
		Intact:    intact,
		GPU:       info.UUID,
		Node:      d.Cores,
		Memory:    d.memory.OpenMemory(g, physical),
	})
	g.Turn = d.Timers.New(func() { d.step(g, sched.Tick{}) })
	g.Retry = d.Timers.New(func() { d.flush(g) })
	d.Gpus[uuid] = g
	d.Order = append(d.Order, g)
	d.sortGPUs()
	d.Log.Infof("GPU %d: %s %s, %d MiB", info.Index, info.UUID, info.Name, info.MemoryBytes>>20)
	d.NoteChange(g, &history.Event{Kind: api.EventType_EVENT_TYPE_GPU, Text: info.Name})
	unrecorded, holders := last.Unrecorded, slices.Clone(last.Holders) // steps write to last
	if unrecorded {
		d.step(g, sched.RestoreUnknown{Epoch: last.Epoch})
	}
	for _, h := range holders {
		d.restore(g, h)
	}
	for account := range d.tenants.Shares.Tenants {
		d.memory.SetTenantMemory(g, account)
	}
	d.moves.FindStrayed()
	d.memory.AwaitMembers(g)
}

func (d *Daemon) sortGPUs() {
	slices.SortStableFunc(d.Order, func(a, b *node.GPU) int { return cmp.Compare(a.Index, b.Index) })
}

// restore keeps the GPU for the process that held the GPU when an earlier scheduler
// ended, if that process lives.
func (d *Daemon) restore(g *node.GPU, h state.Holder) {
	proc, epoch := peer.Process{PID: h.PID, Start: h.StartTime}, h.Epoch
	cl, err := d.ClientOf(proc)
	switch {
	case err != nil: // it may live, and hold the GPU
		d.Log.WithError(err).Warnf("GPU %d: whether the earlier holder lives is not known; the first grant waits for one quantum and grace period", g.Index)
		d.step(g, sched.RestoreUnknown{Epoch: epoch})
		return
	case cl == nil:
		d.Log.Infof("GPU %d: the earlier holder, process %d, has ended", g.Index, proc.PID)
		return
	}
	d.Reach(node.BeforeRestore)
	share := d.tenants.ShareOf(g, cl.Account)
	g.Restored[cl.ID] = true
	d.Log.Infof("GPU %d: process %d held it before the restart; nothing is granted until it is back, ends, or its time is over", g.Index, cl.PID)
	d.step(g, sched.Restore{Client: cl.ID, Epoch: epoch, Tenant: cl.Account, Gang: share.Gang, Overlap: share.Overlap, Shared: h.Shared})
	d.Reach(node.AfterRestore)
}

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
	d.settings.Record.Keep()
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
	d.settings.Record.Keep()
}

// faultBefore is a fault that an earlier scheduler has recorded; "": none since the machine's start.
func (d *Daemon) faultBefore(uuid string) string {
	if f := d.settings.Set.Faults[uuid]; f.BootID == d.BootID {
		return f.Text
	}
	return ""
}

// noteSamples takes over what the driver says of GPUs, and which do no more work.
func (d *Daemon) noteSamples(samples []metrics.GPUSample) {
	for _, s := range samples {
		for _, g := range d.Order {
			if g.UUID != s.UUID {
				continue
			}
			if s.Utilization >= 0 {
				g.Load, g.LoadAt = &api.Load{BusyPercent: uint32(s.Utilization*100 + 0.5), Watts: s.Watts, Celsius: s.Celsius}, loop.Now()
			}
			if s.Faults <= g.Faults {
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
