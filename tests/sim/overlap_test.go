// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
)

// TestOverlapGroupsPart holds an overlap group to its part of the GPU beside outsiders: the
// group is one tenant, however many members work at the same time.
func TestOverlapGroupsPart(t *testing.T) {
	member := func(name string, s sched.Share) backlogged {
		s.Overlap = "group"
		return backlogged{name: name, share: s}
	}
	for _, c := range []struct {
		members, outsiders []backlogged
		part               float64 // percent
	}{
		{[]backlogged{member("a", sched.Share{}), member("b", sched.Share{})}, []backlogged{{name: "x"}}, 50},
		{[]backlogged{member("a", sched.Share{}), member("b", sched.Share{}), member("c", sched.Share{}), member("d", sched.Share{})}, []backlogged{{name: "x"}}, 50},
		{[]backlogged{member("a", sched.Share{}), member("b", sched.Share{})}, []backlogged{{name: "x"}, {name: "y"}}, 100.0 / 3},
		{[]backlogged{member("a", sched.Share{Request: 30}), member("b", sched.Share{Request: 30})}, []backlogged{{name: "x", share: sched.Share{Request: 70}}}, 30},
		{[]backlogged{member("a", sched.Share{Weight: 300}), member("b", sched.Share{Weight: 300})}, []backlogged{{name: "x"}}, 75},
	} {
		for seed := uint64(1); seed <= 3; seed++ {
			held := spans(t, seed, sched.Config{Mode: sched.Exclusive, Quantum: 100 * time.Millisecond}, accuracyRun, append(c.members, c.outsiders...))
			group := held[:len(c.members)]
			for from := base.Time(accuracyFirst); from.Add(accuracyWindow) <= base.Time(accuracyRun); from = from.Add(accuracyWindow) {
				got := heldByAny(group, from, from.Add(accuracyWindow))
				if d := got - c.part; d < -3 || d > 3 {
					t.Errorf("seed %d at %v: %d members have %.1f %% beside %d others, want %.1f", seed, time.Duration(from), len(group), got, len(c.outsiders), c.part)
				}
			}
			if together := heldByAny(group[:1], 0, base.Time(accuracyRun)) + heldByAny(group[1:2], 0, base.Time(accuracyRun)); together < 1.8*heldByAny(group, 0, base.Time(accuracyRun)) {
				t.Errorf("seed %d: %s: members do not run at the same time: %.1f %% together", seed, fmt.Sprint(c.members[0].name), together)
			}
		}
	}
}

// heldByAny returns the percentage of a window in which one of the tenants, or several, held.
func heldByAny(tenants [][]span, from, to base.Time) float64 {
	const slot = time.Millisecond / 4
	n, held := 0, 0
	at := make([]int, len(tenants))
	for now := from; now < to; now = now.Add(slot) {
		n++
		for i, spans := range tenants {
			for at[i] < len(spans) && spans[at[i]].to <= now {
				at[i]++
			}
			if at[i] < len(spans) && spans[at[i]].from <= now {
				held++
				break
			}
		}
	}
	return 100 * float64(held) / float64(n)
}
