// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

// A client may use the GPU outside its grants: its process puts the channels on that the
// shim took off, or calls the driver past the shim. It can do no more than a process
// without the shim. The driver knows which part of the GPU's time each process has had, in
// a period of at most a second. That is shorter than lookPause: who had no grant from one
// look to the next, and used the GPU, used it outside. Turns that are shorter than that
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

// noteUse compares what the driver says processes had of the GPUs with their grants.
func (w *Watch) noteUse(samples []metrics.GPUSample) {
	maps.DeleteFunc(w.outsiders, func(att *node.Attachment, _ *outside) bool { return att.Client.Attached[att.GPU] != att })
	for _, s := range samples {
		sum := 0.0
		for _, part := range s.Busy {
			sum += part
		}
		i := slices.IndexFunc(w.Order, func(g *node.GPU) bool { return g.UUID == s.UUID })
		if i < 0 || s.Busy == nil || sum > parts {
			continue
		}
		for _, cs := range w.Order[i].Core.Snapshot(loop.Now()).Clients {
			var att *node.Attachment
			if cl := w.Clients[cs.ID]; cl != nil {
				att = cl.Attached[w.Order[i]]
			}
			if att != nil && w.outsider(att).look(cs, s.Busy[uint32(att.Client.PID)]) {
				w.Tell(node.Subject{Peer: att.Client.Peer}, logrus.WarnLevel, w.describeOutside(att))
			}
		}
	}
}

func (w *Watch) describeOutside(att *node.Attachment) string {
	p := att.Client.Peer
	return fmt.Sprintf("GPU %d: %s (pid %d) used %.0f %% of the GPU's time while it had no grant: it puts its channels on again, or calls the driver past the shim",
		att.GPU.Index, api.Tenant(w.ContainerOf(p), p.UID), p.PID, 100*w.outsiders[att].part)
}

// OutsideProblems names the clients that use a GPU without a grant.
func (w *Watch) OutsideProblems(g *node.GPU) (problems []string) {
	more := 0
	for _, id := range slices.Sorted(maps.Keys(w.Clients)) {
		att := w.Clients[id].Attached[g]
		switch {
		case att == nil || w.outsiders[att] == nil || w.outsiders[att].looks < outsideLooks:
		case len(problems) == node.MaxNamed:
			more++
		default:
			problems = append(problems, w.describeOutside(att))
		}
	}
	if more > 0 {
		problems = append(problems, fmt.Sprintf("GPU %d: %d more processes use it while they have no grant", g.Index, more))
	}
	return problems
}
