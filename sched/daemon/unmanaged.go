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

// watch finds the processes that use GPUs without nvshare, or without a grant.
type watch struct {
	*node
	look      *timer.Timer // which processes use GPUs
	lookPause time.Duration
	strangers map[*gpu][]stranger      // processes that are no clients, by pid
	outsiders map[*attachment]*outside // clients

	// managed are the pids of those that are on GPUs by our doing.
	managed func() map[uint32]bool
	// looked hears what else the driver says.
	looked func([]metrics.GPUSample)
}

func newWatch(n *node, managed func() map[uint32]bool, looked func([]metrics.GPUSample)) *watch {
	w := &watch{node: n, lookPause: lookPause, strangers: map[*gpu][]stranger{}, outsiders: map[*attachment]*outside{}, managed: managed, looked: looked}
	w.look = n.timers.New(w.lookForStrangers)
	return w
}

// begin looks from now on, again and again.
func (w *watch) begin() {
	if w.opts.Sample != nil {
		w.look.Set(now().Add(w.lookPause))
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
func (w *watch) lookForStrangers() {
	if len(w.clients)+len(w.names) == 0 {
		for _, g := range w.order {
			delete(w.strangers, g)
		}
		w.look.Set(now().Add(w.lookPause))
		return
	}
	managed := w.managed()
	ctx, cancel := context.WithTimeout(w.life, lookTimeout)
	w.Go(func() {
		defer cancel()
		samples, err := w.opts.Sample(ctx)
		found := w.strangersIn(samples, managed)
		w.Do(func() {
			w.looked(samples)
			w.noteUse(samples)
			w.finishLook(found, err)
		})
	})
}

// strangersIn finds out who the processes are that are not managed, by GPU. It reads
// /proc.
func (w *watch) strangersIn(samples []metrics.GPUSample, managed map[uint32]bool) map[string][]stranger {
	found := map[string][]stranger{}
	for _, s := range samples {
		for pid, bytes := range s.Processes {
			if managed[pid] || len(found[s.UUID]) == maxUnmanaged {
				continue
			}
			if p, err := w.peers.Look(int32(pid)); err == nil { // else it has just ended
				found[s.UUID] = append(found[s.UUID], stranger{peer: p, bytes: bytes})
			}
		}
	}
	return found
}

// finishLook takes over what was found. A process is told of when it is found a second
// time.
func (w *watch) finishLook(found map[string][]stranger, err error) {
	w.look.Set(now().Add(w.lookPause))
	if err != nil {
		w.log.WithError(err).Debug("ask the driver which processes use GPUs")
		w.look.Set(now().Add(lookRest))
		return
	}
	for _, g := range w.order {
		var all []stranger
		for _, s := range found[g.UUID] {
			if w.byProc[s.peer.Process] != nil {
				continue // it has registered meanwhile
			}
			i := slices.IndexFunc(w.strangers[g], func(o stranger) bool { return o.peer.Process == s.peer.Process })
			if s.seen = i >= 0; s.seen && !w.strangers[g][i].seen {
				w.tell(subject{Peer: s.peer}, logrus.WarnLevel, w.describeStranger(g, s))
				e := &history.Event{Kind: api.EventType_EVENT_TYPE_UNMANAGED, Peer: s.peer, Names: w.names[s.peer.Container],
					Bytes: s.bytes, Text: "uses the GPU without nvshare: nobody arbitrates its work"}
				w.turn(time.Now(), g, 0, e)
			}
			all = append(all, s)
		}
		slices.SortFunc(all, func(a, b stranger) int { return cmp.Compare(a.peer.PID, b.peer.PID) })
		w.strangers[g] = all
	}
}

func (w *watch) describeStranger(g *gpu, s stranger) string {
	c := w.containerOf(s.peer)
	return fmt.Sprintf("GPU %d: %s (pid %d, %s) uses the GPU without nvshare: nobody arbitrates its work (it unset LD_PRELOAD or hides the shim, or is a static program)",
		g.Index, api.Tenant(c, s.peer.UID), s.peer.PID, strings.ToValidUTF8(s.peer.Command, "?"))
}

// strangersStatus describes the processes on a GPU that are no clients.
func (w *watch) strangersStatus(g *gpu) (all []*api.Unmanaged, problems []string) {
	for _, s := range w.strangers[g] {
		if !s.seen {
			continue
		}
		all = append(all, &api.Unmanaged{
			Uuid: g.UUID, Index: uint32(g.Index), Pid: uint32(s.peer.PID), Uid: s.peer.UID,
			Command: strings.ToValidUTF8(s.peer.Command, "?"), Container: w.containerOf(s.peer), MemoryBytes: s.bytes,
		})
		if len(problems) < maxNamed {
			problems = append(problems, w.describeStranger(g, s))
		}
	}
	if more := len(all) - len(problems); more > 0 {
		problems = append(problems, fmt.Sprintf("GPU %d: %d more processes use it without nvshare", g.Index, more))
	}
	return all, problems
}
