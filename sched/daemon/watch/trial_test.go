// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// Trials take a small part of a GPU's time, whoever comes and goes there.
func TestTrialsAreFew(t *testing.T) {
	for _, c := range []struct {
		what  string
		found bool
		takes time.Duration // each
		most  float64       // of an hour
	}{
		{"each finds one that keeps the GPU busy", true, 5 * time.Second, 0.08},
		{"none finds one", false, 5 * time.Second, 0.02},
		{"none ends before its time", false, trialMost, 0.03},
	} {
		now, in := base.Time(time.Hour), time.Duration(0)
		x := newTrial(now)
		for now < base.Time(2*time.Hour) {
			if now < x.next {
				now = x.next
			}
			x.begin(now)
			now, in = now.Add(c.takes), in+c.takes
			x.end(now, c.found)
		}
		if part := in.Hours(); part > c.most || x.on() || x.next <= now {
			t.Errorf("%s: trials take %.3f of the time, at most %.2f is wanted", c.what, part, c.most)
		}
	}
}

// One that had gaps while it began is known to keep the GPU busy after a trial, and one that has gaps is not.
func TestTrialTells(t *testing.T) {
	for used, saturates := range map[float64]bool{0.99: true, 0.8: false} {
		s := newSampled()
		for range 3 {
			s.inTurns(0.5, 1)
		}
		for range useSamples {
			s.inSlices(0.99)
		}
		if s.saturates() || !s.isFull() {
			t.Errorf("before the trial: %+v", s)
		}
		s.forgetTurns()
		for range useSamples + 1 { // the first may be of both times
			if s.isKnown() {
				t.Error("it is known too early")
			}
			s.inTurns(used, 0.99)
		}
		if !s.isKnown() || s.saturates() != saturates || s.isFull() {
			t.Errorf("after it, %.2f of its turns used: %+v", used, s)
		}
	}
}

// A GPU's trials are remembered over the end of the last process that is held there: processes that come one after the
// other do not begin them anew.
func TestTrialsOutliveWhoIsHeld(t *testing.T) {
	g := &node.GPU{Found: node.Found{UUID: "GPU-0"}, Core: sched.New(sched.Config{})}
	w := &Watch{Book: &tenants.Book{Node: &node.Node{Loop: loop.New(), Order: []*node.GPU{g}}}}
	w.Holder = &holder{Holdings: map[holdingKey]*holding{}, trials: map[*node.GPU]*trial{}}
	w.Holder.renew = w.Timers.New(func() {})
	look := func() { w.noteUseOfHeld([]metrics.GPUSample{{UUID: g.UUID}}) }
	held := func(pid int32) (key holdingKey) {
		p := &peer.Peer{Process: peer.Process{PID: pid}}
		w.hold(g, p).id = base.ClientID(pid)
		return holdingKey{g, p.Process}
	}

	first := held(1)
	look()
	was := w.Holder.trials[g]
	if was == nil {
		t.Fatal("nothing is known of trials where a process is held")
	}
	was.begin(1)
	was.end(2, false)
	want := *was
	delete(w.Holder.Holdings, first)
	look()
	held(2)
	look()
	if got := w.Holder.trials[g]; got == nil || *got != want {
		t.Errorf("after the last process has ended, and another one has come: %+v, want %+v", got, want)
	}
}
