// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// What is said of a process that takes turns does not depend on when in a turn somebody looks.
func TestPartOfTurns(t *testing.T) {
	const on, off = 37500 * time.Microsecond, 87500 * time.Microsecond
	r := rand.New(rand.NewPCG(1, 1))
	for range 100 {
		now := base.Time(r.Int64N(int64(time.Hour)))
		s := span{since: now, part: -1}
		look := func(d time.Duration, on bool) {
			for until := now.Add(d); now < until; {
				step := min(until.Sub(now), time.Duration(1+r.Int64N(int64(100*time.Millisecond))))
				now = now.Add(step)
				s.add(now, step, on)
			}
		}
		look(time.Duration(r.Int64N(int64(time.Second))), true)
		for range 200 {
			look(off, false)
			s.turn(now)
			look(on, true)
		}
		if s.part < 0.2999 || s.part > 0.3001 {
			t.Fatalf("on for %.4f of the time", s.part)
		}
		look(2*recent, true)
		look(2*recent, true)
		if s.part != 1 {
			t.Fatalf("without turns: on for %.4f of the time", s.part)
		}
	}
}
