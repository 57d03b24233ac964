// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// GPU is what the daemon wants to know of one.
type GPU struct {
	Index       int    // for display
	UUID        string // GPU-…
	Name        string
	MIG         string // see api.GPU
	MemoryBytes uint64
	PCIBusID    string        // 0000:17:00.0, or "": not known
	Model       *api.GPUModel // nil: not known
	Unopened    bool          // the driver knows it, and did not open it: only what is recorded of it counts
}

// gpu is one GPU with its core.
type gpu struct {
	GPU
	core     *sched.GPU
	restored map[sched.ClientID]bool // had a grant before the restart, not back yet
	quantum  time.Duration           // as the core has them
	mode     sched.Mode
	fenced   map[sched.ClientID]bool // those for whom FenceDemote is in force
	demoted  bool                    // and the core knows
	turns    metrics.Turns
	noRoom   sched.Time // the latest reservation was refused for which there was no room; 0: none was

	drained bool   // admits no new tenants; see drain.go
	fault   string // what ended all work on it; "": nothing
	faults  uint64 // how many faults the driver has told of
	arrived uint64 // tenants that have moved here from other GPUs

	// outbox holds what the core decided and is not carried out yet: normally
	// nothing between events, more while the state file cannot be written.
	outbox []work
	retry  *timer.Timer // to carry out the outbox

	turn *timer.Timer // the core's Deadline
}

// work is one thing to carry out for a GPU: an action of its core, or the
// answer to an ATTACH.
type work struct {
	action sched.Action
	att    *attachment // with answer
	answer *wire.Frame
}

// post adds actions to the outbox.
func (g *gpu) post(acts []sched.Action) {
	for _, a := range acts {
		g.outbox = append(g.outbox, work{action: a})
	}
}

// isStuck says that so much waits for a record that who adds to it is disconnected.
func (g *gpu) isStuck() bool { return len(g.outbox) > maxOutbox }

func noSuchGPU(name string) error {
	return status.Errorf(codes.NotFound, "GPU %.64q: no such UUID or index (nvsharectl status lists them)", name)
}

func (n *node) findGPU(name string) *gpu {
	for _, g := range n.order {
		if strings.EqualFold(g.UUID, name) || strconv.Itoa(g.Index) == name {
			return g
		}
	}
	return nil
}

// drained returns why a new container cannot have one of the GPUs that it was made for;
// nil: it can.
func (n *node) drained(c *api.Container) error {
	for _, g := range n.order {
		if g.drained && slices.Contains(c.Gpus, g.UUID) {
			return status.Errorf(codes.Aborted, "GPU %d is drained: it admits no new containers until nvsharectl undrain --gpu %d", g.Index, g.Index)
		}
	}
	return nil
}

// modeNow is the mode for the core: what is set, unless the GPU is demoted.
func (g *gpu) modeNow() sched.Mode {
	if g.demoted {
		return sched.Concurrent
	}
	return g.mode
}

// withoutEnded drops the grants that have ended before they could be recorded, so that they open no
// gate.
func withoutEnded(outbox []work) []work {
	given, ended := map[sched.Epoch]bool{}, map[sched.Epoch]bool{}
	for _, w := range outbox {
		switch a := w.action.(type) {
		case sched.Grant:
			given[a.Epoch] = true
		case sched.Released:
			ended[a.Epoch] = given[a.Epoch]
		}
	}
	return slices.DeleteFunc(outbox, func(w work) bool { return ended[w.epoch()] })
}

// epoch returns that of the grant which an action is about; 0: it is about none.
func (w *work) epoch() sched.Epoch {
	switch a := w.action.(type) {
	case sched.Grant:
		return a.Epoch
	case sched.Revoke:
		return a.Epoch
	case sched.StepOne:
		return a.Epoch
	case sched.Fence:
		return a.Epoch
	case sched.Released:
		return a.Epoch
	}
	return 0
}
