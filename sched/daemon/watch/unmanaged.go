// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
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
	*tenants.Book
	Look      *timer.Timer // which processes use GPUs
	LookPause time.Duration
	KillPause time.Duration                 // from the start, in which nobody is killed
	LateMost  time.Duration                 // of a turn, that a limit is not charged for the way to the warden
	Strangers map[*node.GPU][]stranger      // processes that are no clients, by pid
	outsiders map[*node.Attachment]*outside // clients

	// managed are the pids of those that are on GPUs by our doing.
	managed func() map[uint32]bool
	// looked hears what else the driver says.
	looked func([]metrics.GPUSample)

	Holder *holder // nil: no warden is wanted
	// HoldsFenced: a warden that comes holds those that are fenced by then.
	HoldsFenced bool
}

// New returns a watch that looks once Begin was called.
func New(b *tenants.Book, managed func() map[uint32]bool, looked func([]metrics.GPUSample)) *Watch {
	w := &Watch{Book: b, LookPause: lookPause, KillPause: killPause, LateMost: lateMost, Strangers: map[*node.GPU][]stranger{}, outsiders: map[*node.Attachment]*outside{}, managed: managed, looked: looked}
	w.Look = b.Timers.New(w.lookForStrangers)
	w.openHolder()
	return w
}

// Begin looks from now on, again and again.
func (w *Watch) Begin() {
	if w.Opts.Sample != nil {
		w.Look.Set(loop.Now().Add(w.LookPause))
	}
	if w.Holder != nil {
		w.Holder.next.Set(loop.Now())
	}
}

// stranger is a process on a GPU that is no client.
type stranger struct {
	peer  *peer.Peer // closed: only what it says is used
	bytes uint64     // of the GPU's memory; 0: not known
	seen  bool       // twice or more: a process may be on the GPU before it registers
	draws bool       // and does not compute
}

// Rest closes the driver where nobody shares a GPU, so that it can be unloaded, and a GPU reset. It tells
// whether nobody does.
func (w *Watch) Rest() bool {
	if len(w.Clients)+len(w.Names) != 0 || w.Holder != nil && w.anyToHold() {
		return false
	}
	if w.Opts.Release != nil {
		w.Go(func() {
			ctx, cancel := context.WithTimeout(w.Life, lookTimeout)
			defer cancel()
			w.Opts.Release(ctx)
		})
	}
	return true
}

// lookForStrangers asks the driver, beside the loop, which processes use GPUs. Where
// nobody shares a GPU nobody is overlapped.
func (w *Watch) lookForStrangers() {
	if w.Rest() {
		for _, g := range w.Order {
			delete(w.Strangers, g)
		}
		w.Look.Set(loop.Now().Add(w.LookPause))
		return
	}
	w.sample(func(samples []metrics.GPUSample, found map[string][]stranger, err error) {
		w.looked(samples)
		w.noteUse(samples)
		w.FinishLook(found, err)
	})
}

// sample asks the driver beside the loop which processes use GPUs, and tells then, in the loop, which of
// them are strangers.
func (w *Watch) sample(then func(samples []metrics.GPUSample, found map[string][]stranger, err error)) {
	managed := w.managed()
	ctx, cancel := context.WithTimeout(w.Life, lookTimeout)
	w.Go(func() {
		defer cancel()
		samples, err := w.Opts.Sample(ctx)
		found := w.StrangersIn(samples, managed)
		w.Do(func() { then(samples, found, err) })
	})
}

// StrangersIn finds out who the processes are that are not managed, by GPU. It reads
// /proc.
func (w *Watch) StrangersIn(samples []metrics.GPUSample, managed map[uint32]bool) map[string][]stranger {
	found := map[string][]stranger{}
	for _, s := range samples {
		for pid, bytes := range s.Processes {
			if managed[pid] {
				continue
			}
			if p, err := w.Peers.Look(int32(pid)); err == nil { // else it has just ended
				found[s.UUID] = append(found[s.UUID], stranger{peer: p, bytes: bytes, draws: s.Draws[pid]})
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
		slices.SortFunc(found[g.UUID], func(a, b stranger) int { return cmp.Compare(a.peer.PID, b.peer.PID) })
		for _, s := range found[g.UUID] {
			if len(all) == maxUnmanaged {
				break
			}
			if w.ByProc[s.peer.Process] != nil {
				continue // it has registered meanwhile
			}
			if s.draws && !w.holds(g, s.peer.Account, s.peer.Container) {
				continue // a desktop's
			}
			i := slices.IndexFunc(w.Strangers[g], func(o stranger) bool { return o.peer.Process == s.peer.Process })
			if s.seen = i >= 0; s.seen && !w.Strangers[g][i].seen {
				w.Tell(node.Subject{Peer: s.peer}, logrus.WarnLevel, w.describeStranger(g, s))
				e := &history.Event{Kind: api.EventType_EVENT_TYPE_UNMANAGED, Peer: s.peer, Names: w.Names[s.peer.Container],
					Bytes: s.bytes, Text: "uses the GPU without nvshare: nvshare does not schedule its work"}
				w.Turn(time.Now(), g, 0, e)
			}
			all = append(all, s)
		}
		w.Strangers[g] = all
	}
}

func (w *Watch) describeStranger(g *node.GPU, s stranger) string {
	c := w.ContainerOf(s.peer)
	if how := w.describeHeld(g, s.peer); how != "" {
		return fmt.Sprintf("GPU %d: %s (pid %d, %s) uses the GPU without the shim: %s", g.Index, api.Tenant(c, s.peer.UID), s.peer.PID, strings.ToValidUTF8(s.peer.Command, "?"), how)
	}
	return fmt.Sprintf("GPU %d: %s (pid %d, %s) uses the GPU without nvshare: nvshare does not schedule its work (it unset LD_PRELOAD or hides the shim, or is a static program)",
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
			Held: w.describeHeld(g, s.peer),
		})
		problems = append(problems, w.describeStranger(g, s))
	}
	return all, node.FirstProblems(problems, fmt.Sprintf("GPU %d: %%d more processes use it without nvshare", g.Index))
}

// A client may use the GPU outside its grants: its process puts the channels on that the
// shim took off, or calls the driver past the shim. It can do no more than a process
// without the shim. The driver knows which part of the GPU's time each process has had, in
// periods of at most a second that have ended since the look before: who had no grant from
// one look to the next, and used the GPU, used it outside. Turns that are shorter than that
// hide it.

const (
	// outsidePart is which part of the GPU's time nobody is named for: a program that
	// ends, or destroys a context, may finish what it had begun.
	outsidePart = 0.05
	// outsideLooks in a row see it before it is told: the period of the first one may
	// have begun within a grant.
	outsideLooks = 2
	// parts is what those of all processes are together at most, with the error of each.
	// A driver that says more does not tell processes apart.
	parts = 1.5
)

// outside is what looks have found out about a client on a GPU.
type outside struct {
	known   bool          // a look has been there
	held    time.Duration // under grants, up to the latest look
	granted bool          // had a grant then
	looks   int           // that saw use outside, in a row
	part    float64       // of the GPU's time, the latest
}

// look takes note of what the driver says of a client; it returns true when that is to be
// told.
func (o *outside) look(cs sched.ClientSnapshot, part float64) bool {
	granted := cs.Epoch != 0
	idle := o.known && !granted && !o.granted && cs.Held == o.held
	o.known, o.held, o.granted = true, cs.Held, granted
	if !idle || part < outsidePart {
		o.looks = 0
		return false
	}
	o.part = part
	o.looks++
	return o.looks == outsideLooks
}

// outsider returns what looks have found out about a client on a GPU.
func (w *Watch) outsider(att *node.Attachment) *outside {
	o := w.outsiders[att]
	if o == nil {
		o = &outside{}
		w.outsiders[att] = o
	}
	return o
}

// useOf returns the GPU of a sample, nil if it is none of the node's; which part of its time all processes had together, and
// whether the driver tells them apart.
func (w *Watch) useOf(s metrics.GPUSample) (g *node.GPU, sum float64, said bool) {
	for _, part := range s.Busy {
		sum += part
	}
	if i := slices.IndexFunc(w.Order, func(g *node.GPU) bool { return g.UUID == s.UUID }); i >= 0 {
		g = w.Order[i]
	}
	return g, sum, s.Busy != nil && sum <= parts
}

// noteUse compares what the driver says processes had of the GPUs with their grants.
func (w *Watch) noteUse(samples []metrics.GPUSample) {
	maps.DeleteFunc(w.outsiders, func(att *node.Attachment, _ *outside) bool { return att.Client.Attached[att.GPU] != att })
	for _, s := range samples {
		g, _, said := w.useOf(s)
		if g == nil || !said {
			continue
		}
		for _, cs := range g.Core.Snapshot(loop.Now()).Clients {
			var att *node.Attachment
			if cl := w.Clients[cs.ID]; cl != nil {
				att = cl.Attached[g]
			}
			if att != nil && w.outsider(att).look(cs, s.Busy[uint32(att.Client.PID)]) {
				w.Tell(node.Subject{Peer: att.Client.Peer}, logrus.WarnLevel, w.describeOutside(att))
			}
		}
	}
}

func (w *Watch) describeOutside(att *node.Attachment) string {
	p := att.Client.Peer
	return fmt.Sprintf("GPU %d: %s (pid %d) used %.0f %% of the GPU's time while it had no grant: it enables its channels itself, or its calls bypass the shim: end it",
		att.GPU.Index, api.Tenant(w.ContainerOf(p), p.UID), p.PID, 100*w.outsiders[att].part)
}

// OutsideProblems names the clients that use a GPU without a grant.
func (w *Watch) OutsideProblems(g *node.GPU) (problems []string) {
	for _, id := range slices.Sorted(maps.Keys(w.Clients)) {
		if att := w.Clients[id].Attached[g]; att != nil && w.outsiders[att] != nil && w.outsiders[att].looks >= outsideLooks {
			problems = append(problems, w.describeOutside(att))
		}
	}
	return node.FirstProblems(problems, fmt.Sprintf("GPU %d: %%d more processes use it while they have no grant", g.Index))
}
