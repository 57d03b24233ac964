// SPDX-License-Identifier: Apache-2.0

package node

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

// Found is what the daemon wants to know of one.
type Found struct {
	Index       int    // for display
	UUID        string // GPU-…
	Name        string
	MIG         string // see api.GPU
	MemoryBytes uint64
	PCIBusID    string        // 0000:17:00.0, or "": not known
	Model       *api.GPUModel // nil: not known
	Unopened    bool          // the driver knows it, and did not open it: only what is recorded of it counts
}

// GPU is one GPU with its core.
type GPU struct {
	Found
	Core     *sched.GPU
	Restored map[sched.ClientID]bool // had a grant before the restart, not back yet
	Quantum  time.Duration           // as the core has them
	Mode     sched.Mode
	Fenced   map[sched.ClientID]bool // those for whom FenceDemote is in force
	Demoted  bool                    // and the core knows
	Turns    metrics.Turns
	NoRoom   sched.Time // the latest reservation was refused for which there was no room; 0: none was

	Drained  bool   // admits no new tenants; see drain.go
	Fault    string // what ended all work on it; "": nothing
	Faults   uint64 // how many faults the driver has told of
	OOMKills uint64 // processes without a shim that were killed for their tenant's memory limit
	Arrived  uint64 // tenants that have moved here from other GPUs

	// Outbox holds what the core decided and is not carried out yet: normally
	// nothing between events, more while the state file cannot be written.
	Outbox []Work
	Retry  *timer.Timer // to carry out the outbox

	Turn *timer.Timer // the core's Deadline
}

// Work is one thing to carry out for a GPU: an action of its core, or the
// answer to an ATTACH.
type Work struct {
	Action sched.Action
	Att    *Attachment // with answer
	Answer *wire.Frame
}

// Post adds actions to the outbox.
func (g *GPU) Post(acts []sched.Action) {
	for _, a := range acts {
		g.Outbox = append(g.Outbox, Work{Action: a})
	}
}

// IsStuck says that so much waits for a record that who adds to it is disconnected.
func (g *GPU) IsStuck() bool { return len(g.Outbox) > MaxOutbox }

// NoSuchGPU is the error for a name that no GPU has.
func NoSuchGPU(name string) error {
	return status.Errorf(codes.NotFound, "GPU %.64q: no such UUID or index (nvsharectl status lists them)", name)
}

// FindGPU returns the GPU with this UUID or index; nil: there is none.
func (n *Node) FindGPU(name string) *GPU {
	for _, g := range n.Order {
		if strings.EqualFold(g.UUID, name) || strconv.Itoa(g.Index) == name {
			return g
		}
	}
	return nil
}

// Drained returns why a new container cannot have one of the GPUs that it was made for;
// nil: it can.
func (n *Node) Drained(c *api.Container) error {
	for _, g := range n.Order {
		if g.Drained && slices.Contains(c.Gpus, g.UUID) {
			return status.Errorf(codes.Aborted, "GPU %d is drained: it admits no new containers until nvsharectl undrain --gpu %d", g.Index, g.Index)
		}
	}
	return nil
}

// ModeNow is the mode for the core: what is set, unless the GPU is demoted.
func (g *GPU) ModeNow() sched.Mode {
	if g.Demoted {
		return sched.Concurrent
	}
	return g.Mode
}

// WithoutEnded drops the grants that have ended before they could be recorded, so that they open no
// gate.
func WithoutEnded(outbox []Work) []Work {
	given, ended := map[sched.Epoch]bool{}, map[sched.Epoch]bool{}
	for _, w := range outbox {
		switch a := w.Action.(type) {
		case sched.Grant:
			given[a.Epoch] = true
		case sched.Released:
			ended[a.Epoch] = given[a.Epoch]
		}
	}
	return slices.DeleteFunc(outbox, func(w Work) bool {
		_, epoch := w.Grant()
		return ended[epoch]
	})
}

// Grant returns the client and the grant that an action is about; 0: it is about none.
func (w *Work) Grant() (sched.ClientID, sched.Epoch) {
	switch a := w.Action.(type) {
	case sched.Grant:
		return a.Client, a.Epoch
	case sched.Revoke:
		return a.Client, a.Epoch
	case sched.StepOne:
		return a.Client, a.Epoch
	case sched.Fence:
		return a.Client, a.Epoch
	case sched.Released:
		return a.Client, a.Epoch
	case sched.Adopt:
		return a.Client, 0
	case sched.Resume:
		return a.Client, 0
	case sched.Pause:
		return a.Client, 0
	case sched.Slice:
		return a.Client, 0
	case sched.Stand:
		return a.Client, 0
	case sched.Close:
		return a.Client, 0
	case sched.Notice:
		return a.Client, 0
	}
	return 0, 0
}
