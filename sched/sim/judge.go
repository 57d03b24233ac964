// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"time"

	"github.com/nvshare/nvshare/sched"
)

// judge knows which process can submit work to the GPU, from the processes
// and their pages alone, and what it was promised.
type judge struct {
	w      *world
	fenced map[*client]bool
	grants map[sched.ClientID]grant

	overlap int // times that concurrent mode began

	// After a restart that knew only that unrecorded clients may hold: those
	// that have not attached to this run by then have had their time.
	holdOff  sched.Time // 0: none
	attached map[*client]int
}

type grant struct {
	concurrent bool
	overlap    int
}

func newJudge(w *world) *judge {
	return &judge{w: w, fenced: map[*client]bool{}, grants: map[sched.ClientID]grant{}, attached: map[*client]int{}}
}

func (j *judge) modeSet(m sched.Mode) {
	if m == sched.Concurrent {
		j.overlap++
	}
}

func (j *judge) restarted() {
	d := j.w.daemon
	j.endHoldOff(d.run - 1)
	j.modeSet(d.mode)
	j.holdOff = 0
	if d.persisted.Concurrent {
		j.holdOff = j.w.now.Add(d.quantum + d.grace)
	}
}

func (j *judge) attaches(c *client) { j.attached[c] = j.w.daemon.run }

// endHoldOff counts those as fenced that were away for too long.
func (j *judge) endHoldOff(run int) {
	if j.holdOff == 0 || j.w.now < j.holdOff {
		return
	}
	for _, c := range j.w.client {
		if c != nil && j.attached[c] != run {
			j.fenced[c] = true
		}
	}
	j.holdOff = 0
}

// occupies says whether a process can have work on the GPU now, or submit some
// without anybody else doing anything.
func occupies(c *client) bool {
	opens := c.attached && c.page.word != 0 && c.page.word != c.released
	return c.local != 0 || c.closing != 0 || opens
}

// alone fails unless nobody but fenced clients occupies the GPU beside c.
func (j *judge) alone(c sched.ClientID, what string, epoch sched.Epoch) {
	j.endHoldOff(j.w.daemon.run)
	for _, other := range j.w.client {
		switch {
		case other == nil || other.id == c || !occupies(other):
		case j.fenced[other]:
			j.w.report.Overlaps++
		default:
			j.w.fail("overlap: client %d %s under epoch %d, while client %d is on the GPU (gate %d, draining %d, page %d)",
				c, what, epoch, other.id, other.local, other.closing, other.page.word)
		}
	}
}

func (j *judge) granted(a sched.Grant) {
	for _, c := range j.w.client {
		if c != nil && c.id == a.Client {
			delete(j.fenced, c)
		}
	}
	j.grants[a.Client] = grant{a.Concurrent, j.overlap}
	if !a.Concurrent {
		j.alone(a.Client, "is granted", a.Epoch)
	}
}

func (j *judge) opened(c *client) {
	// A fenced one can still open: stopped after its word was written, and the
	// daemon that wrote it is dead.
	if g := j.grants[c.id]; !g.concurrent && g.overlap == j.overlap && !j.fenced[c] {
		j.alone(c.id, "opens its gate", c.local)
	}
}

func (j *judge) adopted(a sched.Adopt) {
	for _, c := range j.w.client {
		if c != nil && c.id == a.Client {
			delete(j.fenced, c)
		}
	}
	if j.w.daemon.mode == sched.Exclusive {
		j.alone(a.Client, "is adopted", a.Epoch)
	}
}

func (j *judge) fence(id sched.ClientID) {
	for _, c := range j.w.client {
		if c != nil && c.id == id {
			j.fenced[c] = true
		}
	}
}

// drained says that the client has no work on the GPU; dead, it has none.
func (j *judge) drained(c *client) {
	delete(j.fenced, c)
	if !c.alive {
		delete(j.attached, c)
		delete(j.grants, c.id)
	}
}

func (j *judge) waited(c *client) {
	j.w.report.LongestWait = max(j.w.report.LongestWait, j.w.now.Sub(c.blockedSince))
}

// checkStarvation holds the core to its word that everybody gets a turn: each
// other client can be before this one with a quantum and a grace period. A
// restart, or claims after it, cost one more of each; the rest is latency.
func (j *judge) checkStarvation() {
	n := time.Duration(len(j.w.client))
	bound := (n+2)*(maxQuantum+maxGrace+20*time.Millisecond) + maxGrace
	for _, c := range j.w.client {
		if c == nil || !c.blocked || !c.attached || c.closing != 0 || c.hostile || j.w.now < c.stopped {
			continue
		}
		if wait := j.w.now.Sub(c.blockedSince); wait > bound {
			j.w.fail("client %d waits for %v, more than %v", c.id, wait, bound)
		}
	}
}
