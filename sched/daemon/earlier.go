// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"

	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// What an earlier scheduler has recorded of a process holds if that lives. Where the kernel
// cannot say so, as where descriptors are short, it stays recorded until that is known.

// unsure is what is recorded of a process of which nobody can say whether it lives.
type unsure struct {
	record  any
	restore func() error
}

// onceKnown has what is recorded of a process restored. restore fails as long as nobody can say
// whether the process lives.
func (d *Daemon) onceKnown(record any, what string, restore func() error) {
	if err := restore(); err != nil {
		d.log.WithError(err).Warnf("whether %s is not known; trying again every %v", what, recordRetry)
		d.unsure = append(d.unsure, unsure{record, restore})
		d.again.Set(now().Add(recordRetry))
	}
}

func (d *Daemon) restoreAgain() {
	// Of a copy: what is restored may have the records written, which lists d.unsure.
	d.unsure = slices.DeleteFunc(slices.Clone(d.unsure), func(u unsure) bool { return u.restore() == nil })
	if len(d.unsure) > 0 {
		d.again.Set(now().Add(recordRetry))
	}
}

// unsureOf returns the records of one kind that are still to be restored.
func unsureOf[R any](d *Daemon) (all []R) {
	for _, u := range d.unsure {
		if r, ok := u.record.(R); ok {
			all = append(all, r)
		}
	}
	return all
}

// clientOf returns the client of a recorded process; nil: the process has ended.
func (d *Daemon) clientOf(was peer.Process) (*client, error) {
	if cl := d.byProc[was]; cl != nil {
		return cl, nil
	}
	p, err := d.find(was)
	switch {
	case peer.Ended(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return d.addClient(p), nil
}
