// SPDX-License-Identifier: Apache-2.0

package account

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Steps follow each other without a gap or an overlap, and each is at most an eighth of
// what it counts.
func TestSteps(t *testing.T) {
	for i := range fine*octaves - 1 {
		longest := bound(i)
		if step(longest) != i || step(longest+1) != i+1 {
			t.Errorf("step %d ends with %v, which is in step %d, and %v in step %d", i, longest, step(longest), longest+1, step(longest+1))
		}
		if shortest := bound(max(i-1, 0)); i > 0 && longest-shortest > max(longest/fine, time.Microsecond) {
			t.Errorf("step %d: from %v to %v", i, shortest, longest)
		}
	}
	if last := fine*octaves - 1; step(time.Hour) != last || bound(last) < 8*time.Minute || step(-1) != 0 {
		t.Errorf("an hour is in step %d of %d, which ends with %v", step(time.Hour), last, bound(last))
	}
}

// Percentiles are those of the sorted durations, and at most an eighth too long.
func TestPercentiles(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, most := range []time.Duration{20 * time.Microsecond, time.Millisecond, 10 * time.Second} {
		for _, n := range []int{1, 2, 99, 100, 10000} {
			var s Spread
			var all []time.Duration
			for range n {
				d := time.Duration(rng.Int64N(int64(most)))
				s.Add(d)
				all = append(all, d)
			}
			slices.Sort(all)
			for _, part := range []int{50, 99} {
				exact := all[(part*n+99)/100-1]
				if p := s.Percentile(part); p < exact || p > exact+exact/fine+time.Microsecond {
					t.Errorf("p%d of %d up to %v: %v, exact %v", part, n, most, p, exact)
				}
			}
		}
	}
	if s := (&Spread{}); s.Count() != 0 || s.Percentile(50) != 0 || s.Percentile(99) != 0 {
		t.Errorf("of none: %d, %v", s.Count(), s.Percentile(50))
	}
}
