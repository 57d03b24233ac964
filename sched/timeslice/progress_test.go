// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// A process that has worked on something else before is measured by what it does now.
func TestAloneFollowsTheProgram(t *testing.T) {
	var p Progress
	const turn = 100 * time.Millisecond
	for range 40 {
		p.HadTurn(2000, turn) // a language model
	}
	p.HadTurn(60, turn) // a moment without launches
	for range 10 {
		p.HadTurn(2000, turn)
	}
	if rate, _, known := p.Alone(); !known || rate < 19000 {
		t.Fatalf("after a short phase of something else: %.0f calls/s, %t", rate, known)
	}
	for range 6 {
		p.HadTurn(60, turn) // matrix products
	}
	if rate, _, known := p.Alone(); !known || rate < 590 || rate > 610 {
		t.Errorf("after six turns of another program: %.0f calls/s, %t, want 600", rate, known)
	}
}

// A client that gets on slowly beside long slices of others has turns of its own once. If it does the
// same in them, it waits for those slices, and that is no reason for turns any more; if it does something
// else, or gets on far more slowly still, it is.
func TestWaitsForSlicesOfOthers(t *testing.T) {
	const turn = 100 * time.Millisecond
	at := base.Time(time.Hour)
	beside := func(p *Progress, calls int) bool {
		for range 10 {
			at = at.Add(250 * time.Millisecond)
			p.Report(at, Utilization{Samples: 50, Busy: 50, Calls: calls}, false, time.Duration(at))
		}
		_, other := p.Use(1)
		return other
	}
	for name, c := range map[string]struct {
		calls uint64 // of its own turns after the doubt
		other bool
	}{"the same": {1000, false}, "something else": {4000, true}} {
		var p Progress
		for range 10 {
			p.HadTurn(1000, turn)
		}
		if beside(&p, 1000) { // 4,000 of 10,000 calls a second
			t.Fatalf("%s: with four fifths of its even part it does something else", name)
		}
		if !beside(&p, 500) {
			t.Fatalf("%s: with two fifths of its even part there is no doubt", name)
		}
		p.Doubt(1)
		for range 4 {
			p.HadTurn(c.calls, turn)
		}
		if other := beside(&p, 500); other != c.other {
			t.Errorf("%s in its turns: something else is %t, want %t", name, other, c.other)
		}
		if !beside(&p, 20) {
			t.Errorf("%s: a fiftieth of its even part is no doubt", name)
		}
	}
}

// A client that started slowly is not charged for ever for that it is faster beside others: its turns show it anew.
func TestFasterThanItsStart(t *testing.T) {
	var p Progress
	const turn = 100 * time.Millisecond
	at := base.Time(time.Hour)
	beside := func() (part float64, other bool) {
		p.StartWindow()
		for range 8 {
			at = at.Add(250 * time.Millisecond)
			p.Report(at, Utilization{Samples: 50, Busy: 50, Calls: 500}, false, time.Duration(at))
		}
		if rate, active := p.Rate(2 * time.Second); active {
			p.Gets(rate)
		}
		return p.Use(1)
	}
	for range 10 {
		p.HadTurn(100, turn)
		p.HadPause(turn)
	}
	if part, other := beside(); part != 1 || !other {
		t.Errorf("it uses %.2f of the GPU, something else: %t, want all until that is known", part, other)
	}
	p.Doubt(1)
	for range 4 {
		p.HadTurn(300, turn)
		p.HadPause(turn / 10)
	}
	if part, other := beside(); part > 0.75 || other {
		t.Errorf("it uses %.2f of the GPU, something else: %t, want what its turns say", part, other)
	}
}
