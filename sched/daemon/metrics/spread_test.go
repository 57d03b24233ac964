// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
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
			var s spread
			var all []time.Duration
			for range n {
				d := time.Duration(rng.Int64N(int64(most)))
				s.add(d)
				all = append(all, d)
			}
			slices.Sort(all)
			for _, part := range []int{50, 99} {
				exact := all[(part*n+99)/100-1]
				if p := s.percentile(part); p < exact || p > exact+exact/fine+time.Microsecond {
					t.Errorf("p%d of %d up to %v: %v, exact %v", part, n, most, p, exact)
				}
			}
		}
	}
	if s := (&spread{}).status(); s.Count != 0 || s.P50Ns != 0 || s.P99Ns != 0 {
		t.Errorf("of none: %v", s)
	}
}

// The status of a GPU says how often its turns were waited for, drained and handed over,
// and how long that took.
func TestTurnsInTheStatus(t *testing.T) {
	var turns Turns
	now := time.Unix(1, 0)
	turns.Granted(now, &sched.Grant{Waited: 2 * time.Microsecond})
	turns.Released(now, &sched.Released{Held: time.Second, Drained: 3 * time.Microsecond})
	turns.Granted(now.Add(5*time.Microsecond), &sched.Grant{Waited: time.Second})
	turns.Released(now, &sched.Released{Held: time.Second}) // was not asked back
	turns.Granted(now, &sched.Grant{Waited: 7 * time.Microsecond, Latency: true})
	var g api.GPU
	turns.Fill(&g)
	for what, c := range map[string]struct {
		got             *api.Spread
		count           uint64
		shortest, upper time.Duration
	}{
		"drains":     {g.Drains, 1, 3 * time.Microsecond, 3 * time.Microsecond},
		"hand-overs": {g.HandOvers, 1, 5 * time.Microsecond, 5 * time.Microsecond},
		"waits":      {g.Waits, 3, 7 * time.Microsecond, time.Second},
	} {
		p99 := time.Duration(c.got.P99Ns)
		if c.got.Count != c.count || c.got.P50Ns != int64(c.shortest) || p99 < c.upper || p99 > c.upper+c.upper/fine {
			t.Errorf("%s: %v", what, c.got)
		}
	}
}
