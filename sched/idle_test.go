// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// suspending runs tenants in the model of makespan_test.go, whose idle clients are
// suspended after a time; 0: never.
func suspending(t *testing.T, after time.Duration, uses ...use) *sharing {
	t.Helper()
	w := newSharing(t, 6*oneGiB, 0, 10)
	cfg := w.memory()
	cfg.SuspendAfter = after
	w.remake(cfg, forMemory{w.core})
	w.add(uses...)
	w.share()
	return w
}

// A tenant that pauses for longer than the time leaves within that time and a little more,
// each time, and one that works never does, though its calls come with gaps. The tenant that
// comes back gets its part as if it had never left: it ends later only by the moves.
func TestIdleTenantLeaves(t *testing.T) {
	const after, long, rounds = 20 * time.Second, 50 * time.Second, 5
	busy := use{work: 40 * time.Millisecond, pause: 5 * time.Millisecond, times: 6000, bytes: 2 * oneGiB}
	pauses := []time.Duration{long}
	for len(pauses) < 200 {
		pauses = append(pauses, 3*time.Millisecond)
	}
	idler := use{work: 20 * time.Millisecond, pauses: pauses, times: (rounds-1)*len(pauses) + 1, // the last pause is long too
		bytes: 2 * oneGiB}
	w, plain := suspending(t, after, busy, idler), suspending(t, 0, busy, idler)
	if n := len(w.order[0].suspends); n != 0 {
		t.Errorf("the tenant that works was suspended %d times", n)
	}
	p := w.order[1]
	left := 0
	for _, at := range p.suspends {
		if at < w.begun {
			continue // while the other one filled its memory
		}
		left++
		since := base.Time(0)
		for _, paused := range p.pausedAt {
			if paused <= at {
				since = paused
			}
		}
		if idle := at.Sub(since); idle < after || idle > after+quietLeast+time.Second {
			t.Errorf("suspended after %v", idle)
		}
	}
	if left != rounds {
		t.Errorf("suspended %d times in %d long pauses", left, rounds)
	}
	late := p.end.Sub(w.begun) - plain.order[1].end.Sub(plain.begun)
	t.Logf("%v against %v without: %v later", p.end.Sub(w.begun), plain.order[1].end.Sub(plain.begun), late)
	if late > rounds*500*time.Millisecond {
		t.Errorf("it ends %v later than if it had never left", late)
	}
}

// A tenant alone keeps its grant while it does nothing. It leaves all the same when it
// pauses, and never while one kernel runs for longer than the time.
func TestIdleTenantAloneLeaves(t *testing.T) {
	const after = 20 * time.Second
	w := suspending(t, after, use{work: 90 * time.Second, pause: 60 * time.Second, times: 4, bytes: 2 * oneGiB})
	p := w.order[0]
	if len(p.suspends) != 3 { // its last pause is the end of the process
		t.Fatalf("suspended %d times in 3 pauses", len(p.suspends))
	}
	for i, at := range p.suspends {
		paused := p.pausedAt[1+i] // the first was after it had filled its memory
		if idle := at.Sub(paused); idle < after || idle > after+quietLeast+time.Second {
			t.Errorf("suspended after %v", idle)
		}
	}
}

// A tenant with a time of its own is suspended after that, and one that is never suspended
// is not, whatever the GPU's time is. Without either nobody is.
func TestIdleTimeOfATenant(t *testing.T) {
	const hour = 3600 * base.Time(time.Second)
	for _, tc := range []struct {
		all, own time.Duration
		want     base.Time // of the tenant with a time of its own; 0: never
		beside   base.Time // of one without
	}{
		{0, 10 * time.Minute, base.Time(10 * time.Minute), 0},
		{20 * time.Minute, 10 * time.Minute, base.Time(10 * time.Minute), base.Time(20 * time.Minute)},
		{20 * time.Minute, -1, 0, base.Time(20 * time.Minute)},
		{20 * time.Minute, 0, base.Time(20 * time.Minute), base.Time(20 * time.Minute)},
		{0, 0, 0, 0},
	} {
		node := NewNode()
		node.Arenas.Bound(100, 0)
		c := New(Config{Node: node, Memory: residency.Config{Swap: true, Capacity: 100, SuspendAfter: tc.all}})
		c.Step(0, residency.SetTenantMemory{Tenant: "own", SuspendAfter: tc.own})
		for id, tenant := range map[base.ClientID]string{1: "own", 2: "beside"} {
			c.Step(0, Attach{Client: id, Tenant: tenant, CanMove: true})
			c.Step(0, residency.Reserve{Client: id, Total: 40})
			c.Step(0, residency.Moved{Client: id, Report: residency.Report{Away: 40}})
			c.Step(0, Request{Client: id})
			c.Step(0, residency.Moved{Client: id, Epoch: c.clients[id].grant.epoch, Report: residency.Report{Resident: 40}, Ready: true})
			c.Step(0, Release{Client: id, Epoch: c.clients[id].grant.epoch, Reason: Idle})
		}
		left := map[base.ClientID]base.Time{}
		for at, ok := c.Deadline(); ok && at < hour; at, ok = c.Deadline() {
			for _, a := range c.Step(at, Tick{}) {
				if s, ok := a.(residency.Suspended); ok && left[s.Client] == 0 {
					left[s.Client] = at
				}
			}
		}
		if left[1] != tc.want || left[2] != tc.beside {
			t.Errorf("%+v: the tenant left at %v, the one beside it at %v", tc, time.Duration(left[1]), time.Duration(left[2]))
		}
		c.Step(hour, residency.SetTenantMemory{Tenant: "own"})
		if c.SuspendsIdle() != (tc.all > 0) {
			t.Errorf("%+v: %t after the tenant's time was removed", tc, c.SuspendsIdle())
		}
	}
}
