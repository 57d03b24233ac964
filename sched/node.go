// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
	"github.com/nvshare/nvshare/sched/residency"
)

// Node is what the GPUs of a node have in common: one clock, the gangs, and the host
// memory for what is away from GPUs. Its GPUs are used by one goroutine at a time.
type Node struct {
	clock base.Clock
	gangs *gang.Gangs
	// Arenas bounds what clients are promised; NewNode's are without bounds.
	Arenas residency.Arenas
}

// NewNode returns a node without GPUs. New adds them.
func NewNode() *Node {
	n := &Node{Arenas: residency.NewArenas()}
	n.gangs = gang.New(func() base.Time { return n.clock.Now })
	return n
}

// Check returns an error that names the first broken invariant of the gangs, which
// is a bug in this package, or nil. Each StepGPU was carried out.
func (n *Node) Check() error { return n.gangs.Check() }

// fencedLook is the time between two Steps, at most, while a grant is fenced.
// Nothing is due then, but the tenant pays for the GPU, and must not pay for the
// time in which the scheduler was stopped.
const fencedLook = time.Second
