// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/nvshare/nvshare/sched/daemon/loop"
)

// What an earlier scheduler has recorded of a process holds if that lives. Where the kernel
// cannot say so, as where descriptors are short, it stays recorded until that is known.

// unsure is what is recorded of a process of which nobody can say whether it lives.
type unsure struct {
	record  any
	restore func() error
}

// OnceKnown has what is recorded of a process restored. restore fails as long as nobody can say
// whether the process lives.
func (n *Node) OnceKnown(record any, what string, restore func() error) {
	if err := restore(); err != nil {
		n.Log.WithError(err).Warnf("whether %s is not known; trying again every %v", what, RecordRetry)
		n.unsure = append(n.unsure, unsure{record, restore})
		n.again.Set(loop.Now().Add(RecordRetry))
	}
}

func (n *Node) restoreAgain() {
	// Of a copy: what is restored may have the records written, which lists n.unsure.
	n.unsure = slices.DeleteFunc(slices.Clone(n.unsure), func(u unsure) bool { return u.restore() == nil })
	if len(n.unsure) > 0 {
		n.again.Set(loop.Now().Add(RecordRetry))
	}
}

// UnsureOf returns the records of one kind that are still to be restored.
func UnsureOf[R any](n *Node) (all []R) {
	for _, u := range n.unsure {
		if r, ok := u.record.(R); ok {
			all = append(all, r)
		}
	}
	return all
}
