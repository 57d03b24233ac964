// SPDX-License-Identifier: Apache-2.0

package watch

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
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/timer"
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

// Watch finds the processes that use GPUs without nvshare, or without a grant.
type Watch struct {
	*node.Node
	Look      *timer.Timer // which processes use GPUs
	LookPause time.Duration
	Strangers map[*node.GPU][]stranger      // processes that are no clients, by pid
	outsiders map[*node.Attachment]*outside // clients

	// managed are the pids of those that are on GPUs by our doing.
	managed func() map[uint32]bool
	// looked hears what else the driver says.
	looked func([]metrics.GPUSample)
}

// New returns a watch that looks once Begin was called.
func New(n *node.Node, managed func() map[uint32]bool, looked func([]metrics.GPUSample)) *Watch {
	w := &Watch{Node: n, LookPause: lookPause, Strangers: map[*node.GPU][]stranger{}, outsiders: map[*node.Attachment]*outside{}, managed: managed, looked: looked}
	w.Look = n.Timers.New(w.lookForStrangers)
	return w
}

// Begin looks from now on, again and again.
func (w *Watch) Begin() {
	if w.Opts.Sample != nil {
		w.Look.Set(loop.Now().Add(w.LookPause))
	}
}

// stranger is a process on a GPU that is no client.
type stranger struct {
	peer  *peer.Peer // closed: only what it says is used
	bytes uint64     // of the GPU's memory; 0: not known
	seen  bool       // twice or more: a process may be on the GPU before it registers
}

// lookForStrangers asks the driver, beside the loop, which processes use GPUs. Where
// nobody shares a GPU nobody is overlapped, and NVML need not keep the GPU awake.
func (w *Watch) lookForStrangers() {
	if len(w.Clients)+len(w.Names) == 0 {
		for _, g := range w.Order {
			delete(w.Strangers, g)
		}
		w.Look.Set(loop.Now().Add(w.LookPause))
		return
	}
	managed := w.managed()
	ctx, cancel := context.WithTimeout(w.Life, lookTimeout)
	w.Go(func() {
		defer cancel()
		samples, err := w.Opts.Sample(ctx)
		found := w.StrangersIn(samples, managed)
		w.Do(func() {
			w.looked(samples)
			w.noteUse(samples)
			w.FinishLook(found, err)
		})
	})
}

// StrangersIn finds out who the processes are that are not managed, by GPU. It reads
// /proc.
func (w *Watch) StrangersIn(samples []metrics.GPUSample, managed map[uint32]bool) map[string][]stranger {
	found := map[string][]stranger{}
	for _, s := range samples {
		for pid, bytes := range s.Processes {
			if managed[pid] || len(found[s.UUID]) == maxUnmanaged {
				continue
			}
			if p, err := w.Peers.Look(int32(pid)); err == nil { // else it has just ended
				found[s.UUID] = append(found[s.UUID], stranger{peer: p, bytes: bytes})
			}
		}
	}
	return found
}

// FinishLook takes over what was found. A process is told of when it is found a second
// time.
func (w *Watch) FinishLook(found map[string][]stranger, err error) {
	w.Look.Set(loop.Now().Add(w.LookPause))
	if err != nil {
		w.Log.WithError(err).Debug("ask the driver which processes use GPUs")
		w.Look.Set(loop.Now().Add(lookRest))
		return
	}
	for _, g := range w.Order {
		var all []stranger
		for _, s := range found[g.UUID] {
			if w.ByProc[s.peer.Process] != nil {
				continue // it has registered meanwhile
			}
			i := slices.IndexFunc(w.Strangers[g], func(o stranger) bool { return o.peer.Process == s.peer.Process })
			if s.seen = i >= 0; s.seen && !w.Strangers[g][i].seen {
				w.Tell(node.Subject{Peer: s.peer}, logrus.WarnLevel, w.describeStranger(g, s))
				e := &history.Event{Kind: api.EventType_EVENT_TYPE_UNMANAGED, Peer: s.peer, Names: w.Names[s.peer.Container],
					Bytes: s.bytes, Text: "uses the GPU without nvshare: nobody arbitrates its work"}
				w.Turn(time.Now(), g, 0, e)
			}
			all = append(all, s)
		}
		slices.SortFunc(all, func(a, b stranger) int { return cmp.Compare(a.peer.PID, b.peer.PID) })
		w.Strangers[g] = all
	}
}

func (w *Watch) describeStranger(g *node.GPU, s stranger) string {
	c := w.ContainerOf(s.peer)
	return fmt.Sprintf("GPU %d: %s (pid %d, %s) uses the GPU without nvshare: nobody arbitrates its work (it unset LD_PRELOAD or hides the shim, or is a static program)",
		g.Index, api.Tenant(c, s.peer.UID), s.peer.PID, strings.ToValidUTF8(s.peer.Command, "?"))
}

// StrangersStatus describes the processes on a GPU that are no clients.
func (w *Watch) StrangersStatus(g *node.GPU) (all []*api.Unmanaged, problems []string) {
	for _, s := range w.Strangers[g] {
		if !s.seen {
			continue
		}
		all = append(all, &api.Unmanaged{
			Uuid: g.UUID, Index: uint32(g.Index), Pid: uint32(s.peer.PID), Uid: s.peer.UID,
			Command: strings.ToValidUTF8(s.peer.Command, "?"), Container: w.ContainerOf(s.peer), MemoryBytes: s.bytes,
		})
		if len(problems) < node.MaxNamed {
			problems = append(problems, w.describeStranger(g, s))
		}
	}
	if more := len(all) - len(problems); more > 0 {
		problems = append(problems, fmt.Sprintf("GPU %d: %d more processes use it without nvshare", g.Index, more))
	}
	return all, problems
}
