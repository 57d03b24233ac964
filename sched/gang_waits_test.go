// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

func newWaitModel(t *testing.T, jobs ...[]uint64) *gangModel {
	t.Helper()
	return newGangModel(t, 2, 80*oneGiB, Config{Quantum: 100 * time.Millisecond, Grace: 10 * time.Second, SwapShare: 10}, jobs...)
}

// measure has the jobs go on for so long, and counts from now on.
func (w *gangModel) measure(length time.Duration) {
	for _, j := range w.jobs {
		j.worked, j.gap, j.last = 0, 0, w.now
	}
	w.run(length)
}

// A tenant that was idle is not before others because a gang waited for another GPU meanwhile.
func TestGangWaitsForNobodyElse(t *testing.T) {
	w := newWaitModel(t, []uint64{1, 60}, []uint64{1, 0}, []uint64{1, 0}, []uint64{1, 0}, []uint64{0, 60})
	w.step(1, SetShare{Tenant: "t0", Share: Share{Gang: "g0", Limit: 2}})
	w.run(time.Second)
	idle := w.jobs[3].ranks[0]
	idle.rest()
	w.run(300 * time.Second)
	if w.jobs[0].since != 0 || idle.epoch != 0 {
		t.Fatalf("the gang works since %v, the idle one has %+v", w.jobs[0].since, *idle)
	}
	idle.goOn()
	w.measure(20 * time.Second)
	for _, j := range w.jobs[1:4] {
		if part := j.worked.Seconds() / 20; part < 0.25 || part > 0.4 {
			t.Errorf("one of three tenants worked %.1f %% of the time", 100*part)
		}
	}
}
