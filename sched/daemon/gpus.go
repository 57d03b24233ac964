// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
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
	g := &node.GPU{Found: info, Restored: map[base.ClientID]bool{}, Fenced: map[base.ClientID]bool{}, Quantum: quantum, Mode: mode, Drained: slices.Contains(d.settings.Set.Drained, info.UUID), Fault: d.faultBefore(info.UUID)}
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
	d.moves.FindStrayed(g)
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
