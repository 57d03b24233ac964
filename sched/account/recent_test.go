// SPDX-License-Identifier: Apache-2.0

package account

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// A wait is forgotten after a minute.
func TestPeak(t *testing.T) {
	var p Peak
	at := func(d time.Duration) base.Time { return base.Time(d) }
	p.Note(at(5*time.Second), 3*time.Second)
	p.Note(at(15*time.Second), time.Second)
	for _, tc := range []struct{ now, want time.Duration }{
		{16 * time.Second, 3 * time.Second}, {64 * time.Second, 3 * time.Second}, {71 * time.Second, time.Second}, {85 * time.Second, 0}, {time.Hour, 0},
	} {
		if got := p.Most(at(tc.now)); got != tc.want {
			t.Errorf("after %v: %v, want %v", tc.now, got, tc.want)
		}
	}
}

// Waits of the latest minute count, and no older ones.
func TestLately(t *testing.T) {
	if sum := (*Lately)(nil).Sum(1); sum.Count() != 0 {
		t.Errorf("of none: %d", sum.Count())
	}
	var l Lately
	at := func(d time.Duration) base.Time { return base.Time(d) }
	l.Note(at(5*time.Second), 3*time.Second)
	for range 3 {
		l.Note(at(15*time.Second), time.Second)
	}
	l.Note(at(62*time.Second), time.Millisecond)
	for _, tc := range []struct {
		now      time.Duration
		count    uint64
		p50, p99 time.Duration
	}{
		{62 * time.Second, 5, time.Second, 3 * time.Second},
		{64 * time.Second, 5, time.Second, 3 * time.Second},
		{71 * time.Second, 4, time.Second, time.Second},
		{85 * time.Second, 1, time.Millisecond, time.Millisecond},
		{time.Hour, 0, 0, 0},
	} {
		sum := l.Sum(at(tc.now))
		for part, want := range map[int]time.Duration{50: tc.p50, 99: tc.p99} {
			if got := sum.Percentile(part); sum.Count() != tc.count || got < want || got > want+want/8 {
				t.Errorf("after %v: %d waits, p%d %v, want %d and %v", tc.now, sum.Count(), part, got, tc.count, want)
			}
		}
	}
	// An hour without a wait leaves nothing of what was before.
	l.Note(at(time.Hour), time.Second)
	if sum := l.Sum(at(time.Hour)); sum.Count() != 1 {
		t.Errorf("%d waits, want 1", sum.Count())
	}
}
