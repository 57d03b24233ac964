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

// A tenant that has to move goes on while a gang waits long for another GPU: for its limit there, or behind many.
func TestGangWaitsElsewhere(t *testing.T) {
	const length = 300 * time.Second
	for _, c := range []struct {
		name   string
		limit  int // of the gang on GPU 1, percent
		others int // there
		least  float64
	}{
		{"no limit", 0, 1, 0.44},
		{"a limit", 10, 1, 0.75},
		{"a limit that allows nothing for minutes", 2, 1, 0.95},
		{"many others", 0, 5, 0.7},
	} {
		t.Run(c.name, func(t *testing.T) {
			jobs := [][]uint64{{60, 60}, {60, 0}}
			for range c.others {
				jobs = append(jobs, []uint64{0, 60})
			}
			w := newWaitModel(t, jobs...)
			if c.limit > 0 {
				w.step(1, SetShare{Tenant: "t0", Share: Share{Gang: "g0", Limit: c.limit}})
			}
			w.run(20 * time.Second)
			w.measure(length)
			if j := w.jobs[1]; j.worked.Seconds() < c.least*length.Seconds() || j.gap > 30*time.Second {
				t.Errorf("the tenant on GPU 0 worked %.1f %% of the time, and waited %.1f s", 100*j.worked.Seconds()/length.Seconds(), j.gap.Seconds())
			}
		})
	}
}

// moveAgain has a rank give the GPU back again and again, move some of its memory out by itself, and come back at once.
func (r *gangRank) moveAgain(every time.Duration, bytes uint64) {
	r.w.after(every, func() {
		if r.open {
			r.send(Release{Client: r.id, Epoch: r.epoch, Reason: Idle})
			r.epoch, r.open = 0, false
			r.job.look()
			r.resident, r.away, r.out = r.resident-bytes, r.away+bytes, r.out+bytes
			r.report(false)
			r.send(Request{r.id})
		}
		r.moveAgain(every, bytes)
	})
}

// What ranks move in a turn after their memory was there makes the turn no longer.
func TestGangMovesAgain(t *testing.T) {
	for name, jobs := range map[string][][]uint64{
		"a tenant":                      {{60, 60}, {60, 0}},
		"another gang":                  {{60, 60}, {60, 60}},
		"a tenant on each, one of them": {{20, 60}, {20, 0}, {0, 60}},
	} {
		for _, bytes := range []uint64{64 << 20, oneGiB} {
			for _, every := range []time.Duration{50 * time.Millisecond, 500 * time.Millisecond} {
				w := newWaitModel(t, jobs...)
				w.jobs[0].ranks[1].moveAgain(every, bytes)
				w.run(20 * time.Second)
				w.measure(100 * time.Second)
				for _, j := range w.jobs[1:] {
					if j.gap > 15*time.Second {
						t.Errorf("%s: %d MiB each %v: job %v waited %.1f s", name, bytes>>20, every, j.bytes, j.gap.Seconds())
					}
				}
			}
		}
	}
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

// moveForEver has a rank that is granted say each second that it moves, and never be ready.
func (r *gangRank) moveForEver() {
	switch {
	case r.draining:
		r.moving = false
		r.release()
	case r.epoch != 0:
		r.moving, r.open = true, false
		r.resident, r.away = min(r.resident, 59*oneGiB), max(r.away, oneGiB)
		r.report(false)
	}
	r.w.after(time.Second, r.moveForEver)
}

// Who says again and again that its memory moves, and is never ready, does not keep the GPU from others for ever.
func TestMovesForEver(t *testing.T) {
	const length = 30 * time.Minute
	for name, jobs := range map[string][][]uint64{
		"a tenant": {{0, 60}, {0, 60}, {0, 60}},
		"a rank":   {{60, 60}, {60, 0}, {0, 60}},
	} {
		w := newWaitModel(t, jobs...)
		w.jobs[0].ranks[len(w.jobs[0].ranks)-1].moveForEver()
		w.run(20 * time.Second)
		w.measure(length)
		for _, j := range w.jobs[1:] {
			if j.gap > maxFill+time.Minute || j.worked < length/4 {
				t.Errorf("%s: job %v worked %.1f %% of the time, and waited %.1f s", name, j.bytes, 100*j.worked.Seconds()/length.Seconds(), j.gap.Seconds())
			}
		}
	}
}
