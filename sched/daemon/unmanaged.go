// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// The driver knows which processes use a GPU, by whatever way. One that is no client
// is arbitrated by nobody: it unset LD_PRELOAD, mounted something over the shim, or is
// a static program.

const (
	// lookPause is the time between two questions to the driver, and lookRest where
	// the driver did not answer.
	lookPause = 5 * time.Second
	lookRest  = time.Minute
	// lookTimeout bounds a question: NVML can hang on a broken GPU.
	lookTimeout = 10 * time.Second
	// maxUnmanaged is how many of these processes are named for each GPU.
	maxUnmanaged = 64
)

// stranger is a process on a GPU that is no client.
type stranger struct {
	peer  *peer.Peer // closed: only what it says is used
	bytes uint64     // of the GPU's memory; 0: not known
	seen  bool       // twice or more: a process may be on the GPU before it registers
}

// lookForStrangers asks the driver, beside the loop, which processes use GPUs. Where
// nobody shares a GPU nobody is overlapped, and NVML need not keep the GPU awake.
func (d *Daemon) lookForStrangers() {
	if len(d.clients)+len(d.names) == 0 && (d.holder == nil || !d.anyLimit()) {
		for _, g := range d.order {
			g.strangers = nil
		}
		d.look.Set(now().Add(d.lookPause))
		return
	}
	managed := d.managed()
	ctx, cancel := context.WithTimeout(d.life, lookTimeout)
	d.wg.Go(func() {
		defer cancel()
		samples, err := d.opts.Sample(ctx)
		found := d.strangersIn(samples, managed)
		d.do(func() {
			d.noteFaults(samples)
			d.noteFilled(samples)
			d.noteUse(samples)
			d.finishLook(found, err)
		})
	})
}

// managed are the pids of those that are on GPUs by our doing: clients, and what runs for them.
func (d *Daemon) managed() map[uint32]bool {
	all := make(map[uint32]bool, len(d.clients))
	for _, cl := range d.clients {
		all[uint32(cl.PID)] = true
	}
	for pid := range d.copiers { // they have memory on two GPUs
		all[uint32(pid)] = true
	}
	if d.overlap != nil { // the driver counts what members do to their MPS server
		for _, group := range d.overlap.States() {
			all[uint32(group.Server)] = true
		}
	}
	return all
}

// strangersIn finds out who the processes are that are not managed, by GPU. It reads
// /proc.
func (d *Daemon) strangersIn(samples []metrics.GPUSample, managed map[uint32]bool) map[string][]stranger {
	found := map[string][]stranger{}
	for _, s := range samples {
		for pid, bytes := range s.Processes {
			if managed[pid] || len(found[s.UUID]) == maxUnmanaged {
				continue
			}
			if p, err := d.peers.Look(int32(pid)); err == nil { // else it has just ended
				found[s.UUID] = append(found[s.UUID], stranger{peer: p, bytes: bytes})
			}
		}
	}
	return found
}

// finishLook takes over what was found. A process is told of when it is found a second
// time.
func (d *Daemon) finishLook(found map[string][]stranger, err error) {
	d.look.Set(now().Add(d.lookPause))
	if err != nil {
		d.log.WithError(err).Debug("ask the driver which processes use GPUs")
		d.look.Set(now().Add(lookRest))
		return
	}
	for _, g := range d.order {
		var all []stranger
		for _, s := range found[g.UUID] {
			if d.byProc[s.peer.Process] != nil {
				continue // it has registered meanwhile
			}
			i := slices.IndexFunc(g.strangers, func(o stranger) bool { return o.peer.Process == s.peer.Process })
			if s.seen = i >= 0; s.seen && !g.strangers[i].seen {
				d.tell(subject{Peer: s.peer}, logrus.WarnLevel, d.describeStranger(g, s))
				e := &history.Event{Kind: api.EventType_EVENT_TYPE_UNMANAGED, Peer: s.peer, Names: d.names[s.peer.Container],
					Bytes: s.bytes, Text: "uses the GPU without nvshare: nobody arbitrates its work"}
				d.turn(time.Now(), g, 0, e)
			}
			all = append(all, s)
		}
		slices.SortFunc(all, func(a, b stranger) int { return cmp.Compare(a.peer.PID, b.peer.PID) })
		g.strangers = all
	}
}

func (d *Daemon) describeStranger(g *gpu, s stranger) string {
	c := d.containerOf(s.peer)
	if how := d.describeHeld(g, s.peer); how != "" {
		return fmt.Sprintf("GPU %d: %s (pid %d, %s) uses the GPU without the shim: %s", g.Index, api.Tenant(c, s.peer.UID), s.peer.PID, strings.ToValidUTF8(s.peer.Command, "?"), how)
	}
	return fmt.Sprintf("GPU %d: %s (pid %d, %s) uses the GPU without nvshare: nobody arbitrates its work (it unset LD_PRELOAD or hides the shim, or is a static program)",
		g.Index, api.Tenant(c, s.peer.UID), s.peer.PID, strings.ToValidUTF8(s.peer.Command, "?"))
}

// containerOf is what the API says for a process's container.
func (d *Daemon) containerOf(p *peer.Peer) *api.Container {
	if names := d.names[p.Container]; names != nil {
		return names
	}
	return &api.Container{Id: p.Container, PodUid: p.PodUID}
}

// strangersStatus describes the processes on a GPU that are no clients.
func (d *Daemon) strangersStatus(g *gpu) (all []*api.Unmanaged, problems []string) {
	for _, s := range g.strangers {
		if !s.seen {
			continue
		}
		all = append(all, &api.Unmanaged{
			Uuid: g.UUID, Index: uint32(g.Index), Pid: uint32(s.peer.PID), Uid: s.peer.UID,
			Command: strings.ToValidUTF8(s.peer.Command, "?"), Container: d.containerOf(s.peer), MemoryBytes: s.bytes,
			Held: d.describeHeld(g, s.peer),
		})
		if len(problems) < maxNamed {
			problems = append(problems, d.describeStranger(g, s))
		}
	}
	if more := len(all) - len(problems); more > 0 {
		problems = append(problems, fmt.Sprintf("GPU %d: %d more processes use it without nvshare", g.Index, more))
	}
	return all, problems
}
