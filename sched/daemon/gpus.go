// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/wire"
)

// mayRediscover starts a search for GPUs unless one ended just now, and
// reports whether its result is to be waited for.
func (d *Daemon) mayRediscover() bool {
	if d.discovering {
		return true
	}
	if d.discovered != 0 && now().Sub(d.discovered) < rediscoverPause {
		return false
	}
	d.search.Set(now())
	d.discovering = true
	return true
}

// startDiscovery searches for GPUs beside the loop: the driver may take its
// time, and clients of known GPUs must not wait for it.
func (d *Daemon) startDiscovery() {
	d.discovering = true
	ctx, cancel := context.WithTimeout(d.life, discoverTimeout)
	d.Go(func() {
		defer cancel()
		found, err := d.own.List(ctx)
		d.Do(func() { d.finishDiscovery(found, err) })
	})
}

func (d *Daemon) finishDiscovery(found []GPU, err error) {
	first := d.discovered == 0
	d.discovering = false
	d.discovered = now()
	if err != nil && (d.discoverErr == nil || err.Error() != d.discoverErr.Error()) {
		d.log.WithError(err).Warn("search for GPUs")
	}
	d.discoverErr = err
	for _, info := range found {
		if err := d.addGPU(info); err != nil {
			d.log.WithError(err).Warn("ignore a GPU")
		}
	}
	d.pool.Prepare()
	d.reviewOverlap()
	if len(d.order) == 0 {
		if first && err == nil {
			d.log.Warnf("no GPU found (is the NVIDIA driver loaded? nvidia-smi -L lists its GPUs): looking again every %v", rescanPause)
		}
		d.search.Set(now().Add(rescanPause))
	}
	pending := d.pending
	d.pending = nil
	for _, p := range pending {
		p.conn.waiting[p.frame.Channel] = nil
		if !p.conn.dead {
			d.attach(p.conn, &p.frame, true)
		}
		for i := range p.reserves {
			d.frame(p.conn, &p.reserves[i])
		}
	}
}

// addGPU makes the core of a GPU that is not known yet, from what the state file
// says about the GPU.
func (d *Daemon) addGPU(info GPU) error {
	uuid, err := wire.ParseUUID(info.UUID)
	if err != nil {
		return err
	}
	physical := info.MemoryBytes
	if d.gpus[uuid] != nil && physical == 0 {
		return nil // nothing new: NVML cannot open it, at least now
	}
	if info.Unopened && d.faultBefore(info.UUID) == "" && !slices.Contains(d.settings.set.Drained, info.UUID) {
		return nil // it is found with its memory when it is well, and somebody uses it
	}
	if d.opts.GPUMemory != 0 && physical == 0 { // not known: no NVML
		physical, info.MemoryBytes = d.opts.GPUMemory, d.opts.GPUMemory
	} else if d.opts.GPUMemory != 0 {
		info.MemoryBytes = min(info.MemoryBytes, d.opts.GPUMemory)
	}
	if g := d.gpus[uuid]; g != nil {
		changed := g.MemoryBytes != info.MemoryBytes
		g.GPU = info
		d.sortGPUs() // its index may be another one since
		if !changed {
			return nil
		}
		ev := sched.SetGPUMemory{Bytes: info.MemoryBytes}
		switch {
		case d.swaps[g] != nil || d.opts.SwapMemory == 0:
		case g.core.Unused():
			m := d.openMemory(g, physical)
			ev.Swap = &m
		default:
			d.log.Warnf("GPU %d: it has %d MiB, as is known now; they are swapped once nvshare-scheduler was restarted", g.Index, info.MemoryBytes>>20)
		}
		d.step(g, ev)
		return nil
	}
	last := d.state.GPUs[info.UUID]
	intact := last != nil
	if !intact {
		last = &state.GPU{}
		if d.cautious {
			// Above every earlier epoch, as long as there was less than one
			// grant per microsecond on average.
			last.Epoch = sched.NextEpoch(sched.Epoch(time.Now().UnixMicro()))
			last.Unrecorded = true
		}
		d.state.GPUs[info.UUID] = last
	}
	quantum, mode := d.settings.settingOf(info.UUID)
	g := &gpu{GPU: info, restored: map[sched.ClientID]bool{}, fenced: map[sched.ClientID]bool{}, quantum: quantum, mode: mode, drained: slices.Contains(d.settings.set.Drained, info.UUID), fault: d.faultBefore(info.UUID)}
	g.core = sched.New(sched.Config{
		Quantum:   quantum,
		Grace:     d.own.Grace,
		Mode:      mode,
		Tuning:    d.own.Tuning,
		SwapShare: d.settings.swapShareOf(info.UUID),
		LastEpoch: last.Epoch,
		Way:       last.Way,
		Intact:    intact,
		GPU:       info.UUID,
		Node:      d.cores,
		Memory:    d.openMemory(g, physical),
	})
	g.turn = d.timers.New(func() { d.step(g, sched.Tick{}) })
	g.retry = d.timers.New(func() { d.flush(g) })
	d.gpus[uuid] = g
	d.order = append(d.order, g)
	d.sortGPUs()
	d.log.Infof("GPU %d: %s %s, %d MiB", info.Index, info.UUID, info.Name, info.MemoryBytes>>20)
	d.noteChange(g, &history.Event{Kind: api.EventType_EVENT_TYPE_GPU, Text: info.Name})
	unrecorded, holders := last.Unrecorded, slices.Clone(last.Holders) // steps write to last
	if unrecorded {
		d.step(g, sched.RestoreUnknown{Epoch: last.Epoch})
	}
	for _, h := range holders {
		d.restore(g, peer.Process{PID: h.PID, Start: h.StartTime}, h.Epoch)
	}
	for account := range d.shares.Tenants {
		d.setTenantMemory(g, account)
	}
	d.findStrayed(g)
	d.awaitMembers(g)
	return nil
}

func (d *Daemon) sortGPUs() {
	slices.SortStableFunc(d.order, func(a, b *gpu) int { return cmp.Compare(a.Index, b.Index) })
}

// restore keeps the GPU for the process that held the GPU when an earlier scheduler
// ended, if that process lives.
func (d *Daemon) restore(g *gpu, proc peer.Process, epoch sched.Epoch) {
	cl, err := d.clientOf(proc)
	switch {
	case err != nil: // it may live, and hold the GPU
		d.log.WithError(err).Warnf("GPU %d: whether the earlier holder lives is not known; the first grant waits for one quantum and grace period", g.Index)
		d.step(g, sched.RestoreUnknown{Epoch: epoch})
		return
	case cl == nil:
		d.log.Infof("GPU %d: the earlier holder, process %d, has ended", g.Index, proc.PID)
		return
	}
	d.reach(beforeRestore)
	share := d.shareOf(g, cl.Account)
	g.restored[cl.id] = true
	d.log.Infof("GPU %d: process %d held it before the restart; nothing is granted until it is back, ends, or its time is over", g.Index, cl.PID)
	d.step(g, sched.Restore{Client: cl.id, Epoch: epoch, Tenant: cl.Account, Gang: share.Gang, Overlap: share.Overlap})
	d.reach(afterRestore)
}
