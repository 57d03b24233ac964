// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

// While processes share a GPU by slices nobody can tell which of them keep it busy: the driver's samples say that the GPU is.
// So those of which that is not known have turns for a while, a trial, if the GPU is busy all the time. Without it a
// process would keep the driver's own slices for ever that had gaps in its first turns, while it began.
//
// A trial ends after trialMost. To a process with gaps it is a loss, so trials are a GPU's, for all processes that come and
// go there: the first begins after trialFirst, the next trialPause after one that found somebody, and after others each
// time twice as late, or trialRarest.
const (
	trialMost, trialFirst, trialPause, trialRarest = 10 * time.Second, 10 * time.Second, time.Minute, 10 * time.Minute
)

type trial struct {
	until base.Time     // 0: there is none
	next  base.Time     // none before that
	pause time.Duration // after one that finds nobody
}

func newTrial(now base.Time) *trial { return &trial{next: now.Add(trialFirst), pause: trialPause} }

func (t *trial) on() bool { return t.until != 0 }

func (t *trial) begin(now base.Time) { t.until = now.Add(trialMost) }

func (t *trial) end(now base.Time, found bool) {
	if t.until, t.next = 0, now.Add(t.pause); found {
		t.pause = trialPause
	} else {
		t.pause = min(2*t.pause, trialRarest)
	}
}

// try begins a GPU's trial, or ends it, after a look at the processes that are held there.
func (w *Watch) try(g *node.GPU, here []*holding, core sched.Snapshot) {
	now, t := loop.Now(), w.Holder.trials[g]
	if t == nil {
		t = newTrial(now)
		w.Holder.trials[g] = t
	}
	// Who has a latency tenant beside him is not to wait for turns.
	latency := slices.ContainsFunc(core.Tenants, func(s sched.TenantSnapshot) bool { return s.Clients > 0 && s.Share.Priority == sched.Latency })
	may := func(x *holding) bool { return x.id != 0 && x.own != 0 && !x.idle && !latency }
	if t.on() {
		left := func(x *holding) bool { return x.onTrial && may(x) && !x.samples.isKnown() }
		if now >= t.until || !slices.ContainsFunc(here, left) {
			w.endTrial(g, here)
		}
		return
	}
	unknown := slices.DeleteFunc(slices.Clone(here), func(x *holding) bool { return !may(x) || x.samples.saturates() })
	if now < t.next || core.Way != sched.WaySlices.String() && core.Way != sched.WayCohort.String() || !slices.ContainsFunc(unknown, func(x *holding) bool { return x.samples.isFull() }) {
		return
	}
	t.begin(now)
	for _, x := range unknown {
		x.onTrial, x.turnsBefore = true, x.samples.turns
		x.samples.forgetTurns()
		x.tellControls()
	}
}

// endTrial ends the trial of a GPU, if there is one.
func (w *Watch) endTrial(g *node.GPU, here []*holding) {
	t := w.Holder.trials[g]
	if t == nil || !t.on() {
		return
	}
	t.end(loop.Now(), slices.ContainsFunc(here, func(x *holding) bool { return x.onTrial && x.samples.saturates() }))
	for _, x := range here {
		if x.onTrial {
			x.onTrial = false
			if !x.samples.isKnown() { // it is what it was
				x.samples.turns = x.turnsBefore
			}
			x.tellControls()
		}
	}
}

// endTrials is for when the driver says nothing more.
func (w *Watch) endTrials() {
	for _, g := range w.Order {
		w.endTrial(g, w.Holder.heldOn(g))
	}
}

// heldOn are those that are clients of a GPU's core.
func (h *holder) heldOn(g *node.GPU) []*holding {
	return slices.DeleteFunc(h.inOrder(), func(x *holding) bool { return x.gpu != g || x.id == 0 })
}
