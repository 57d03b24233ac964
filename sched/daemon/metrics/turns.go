// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/api"
)

// turnBounds are the upper bounds of the histograms' buckets, each inclusive.
var turnBounds = [...]time.Duration{
	10 * time.Microsecond, 25 * time.Microsecond, 50 * time.Microsecond,
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second,
	10 * time.Second, 30 * time.Second, time.Minute, 5 * time.Minute,
}

// histogram counts durations. The scheduler's loop adds to it at each turn, so it
// is cheaper than one of the Prometheus library, and no other goroutine sees it.
type histogram struct {
	counts [len(turnBounds) + 1]uint64 // the last one: longer than all bounds
	sum    time.Duration
	exact  account.Spread // for the status, whose percentiles want smaller steps
}

func (h *histogram) add(d time.Duration) {
	i := 0
	for i < len(turnBounds) && d > turnBounds[i] {
		i++
	}
	h.counts[i]++
	h.sum += d
	h.exact.Add(d)
}

// cumulative returns what Prometheus wants: how many durations in all, and by
// bound (in seconds) how many up to it.
func (h *histogram) cumulative() (count uint64, buckets map[float64]uint64) {
	buckets = make(map[float64]uint64, len(turnBounds))
	for i, bound := range turnBounds {
		count += h.counts[i]
		buckets[bound.Seconds()] = count
	}
	return count + h.counts[len(turnBounds)], buckets
}

// Turns sums up the turns of one GPU since the scheduler's start.
type Turns struct {
	wait, hold, drain, handOver histogram

	revokes  [sched.Suspending + 2]uint64   // by sched.RevokeReason; the last: reasons we don't know
	releases [sched.EndPreempted + 2]uint64 // by sched.EndReason; the last: reasons we don't know
	late     uint64                         // grants that ended after their fence
	pauses   uint64
	latency  uint64    // grants beside others
	ended    time.Time // of the latest grant that has ended; zero after the next grant
}

// Granted counts a grant.
func (s *Turns) Granted(t time.Time, a *sched.Grant) {
	s.wait.add(a.Waited)
	if a.Latency || a.Beside {
		s.latency++
		return
	}
	// A hand-over only if it was waited for: otherwise the GPU was free.
	if gap := t.Sub(s.ended); !s.ended.IsZero() && gap <= a.Waited {
		s.handOver.add(gap)
	}
	s.ended = time.Time{}
}

// Revoked counts a grant that was asked back.
func (s *Turns) Revoked(why sched.RevokeReason) {
	s.revokes[min(int(why), len(s.revokes)-1)]++
}

// Released counts a grant that has ended.
func (s *Turns) Released(t time.Time, a *sched.Released) {
	s.releases[min(int(a.Reason), len(s.releases)-1)]++
	if a.Fenced { // others had the GPU meanwhile
		s.late++
		return
	}
	s.hold.add(a.Held)
	if a.Drained != 0 {
		s.drain.add(a.Drained)
	}
	s.ended = t
}

// Paused counts a gate that was shut for a latency tenant.
func (s *Turns) Paused() { s.pauses++ }

// Fill tells what turns took.
func (s *Turns) Fill(g *api.GPU) {
	g.Drains, g.HandOvers, g.Waits = Spread(&s.drain.exact), Spread(&s.handOver.exact), Spread(&s.wait.exact)
}

// Spread tells what was counted.
func Spread(s *account.Spread) *api.Spread {
	return &api.Spread{Count: s.Count(), P50Ns: int64(s.Percentile(50)), P99Ns: int64(s.Percentile(99))}
}
