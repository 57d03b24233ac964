// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
)

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
		if c.got.Count != c.count || c.got.P50Ns != int64(c.shortest) || p99 < c.upper || p99 > c.upper+c.upper/8 {
			t.Errorf("%s: %v", what, c.got)
		}
	}
}
