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
	clock clock
	gangs *gang.Gangs
	// Arenas bounds what clients are promised; NewNode's are without bounds.
	Arenas residency.Arenas
}

// NewNode returns a node without GPUs. New adds them.
func NewNode() *Node {
	n := &Node{Arenas: residency.NewArenas()}
	n.gangs = gang.New(func() base.Time { return n.clock.now })
	return n
}

// Check returns an error that names the first broken invariant of the gangs, which
// is a bug in this package, or nil. Each StepGPU was carried out.
func (n *Node) Check() error { return n.gangs.Check() }

const (
	// maxLate is how late a Step may be, after the earliest Deadline of the node, for
	// the time before that Step to count in full.
	maxLate = 100 * time.Millisecond
	// suspended is how late a Step is that comes after a suspension. A busy machine is less late.
	suspended = time.Second
)

// fencedLook is the time between two Steps, at most, while a grant is fenced.
// Nothing is due then, but the tenant pays for the GPU, and must not pay for the
// time in which the scheduler was stopped.
const fencedLook = time.Second

// clock is the time of a node. It follows the caller's clock, but stands still
// while nobody is there to do what is due: the machine is suspended, or the
// scheduler is stopped. If that time counted, holders would owe hours to the
// others, and healthy clients would be fenced because they had no time to drain.
//
// All times inside this package are this clock's. Step and Snapshot convert the
// times that they are given; Deadline and Snapshot convert the times that they
// return.
type clock struct {
	lost time.Duration // the caller's clock is ahead by that much
	now  base.Time     // of the latest Step of any GPU; never runs backwards
	gpus []*GPU
}

// advance returns the time of a Step that comes at this time of the caller's clock.
func (k *clock) advance(caller base.Time) base.Time {
	now := k.fromCaller(caller)
	counts := max(k.now, now)
	if due, ok := k.deadline(); ok && now > k.now && now.Sub(due) > maxLate {
		counts = k.now
		if now.Sub(due) < suspended {
			// The wait counts up to a moment before the deadline: in that moment the caller reads
			// what has come meanwhile. After that moment the deadline passes, however late ticks are.
			counts = max(k.now, min(max(k.now.Add(maxLate), due.Add(-maxLate)), due.Add(maxLate)))
		}
		k.lost += now.Sub(counts)
	}
	k.now = counts
	return k.now
}

// deadline returns the earliest deadline of the node's GPUs.
func (k *clock) deadline() (earliest base.Time, any bool) {
	for _, c := range k.gpus {
		if at, ok := c.deadline(); ok && (!any || at < earliest) {
			earliest, any = at, true
		}
	}
	return earliest, any
}

func (k *clock) fromCaller(t base.Time) base.Time { return t.Add(-k.lost) }
func (k *clock) toCaller(t base.Time) base.Time   { return t.Add(k.lost) }
