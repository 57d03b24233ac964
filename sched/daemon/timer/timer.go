// SPDX-License-Identifier: Apache-2.0

// Package timer is the list of what a loop does at a time. It reads no clock and
// starts nothing: the loop asks Next when to wake up, and calls Run then.
//
// What it guarantees:
//
//   - A Timer has at most one time. Run calls it once, not before that time, and
//     in the order of the times.
//   - What Run calls may set any Timer, itself too. A time that is over already
//     is for the next Run, so that Run ends.
package timer

import (
	"cmp"
	"slices"

	"github.com/nvshare/nvshare/sched"
)

// List holds the timers of one loop that have a time. There are few of them, so
// they are searched from end to end. The zero List is empty.
type List struct{ planned []*Timer }

// Timer is one thing to do. A nil Timer is never planned.
type Timer struct {
	list *List
	do   func()
	at   sched.Time
}

// New returns a Timer that is not planned yet.
func (l *List) New(do func()) *Timer { return &Timer{list: l, do: do} }

// Set plans the Timer for a time, instead of the one it had.
func (t *Timer) Set(at sched.Time) {
	t.at = at
	if !t.Planned() {
		t.list.planned = append(t.list.planned, t)
	}
}

// Stop has the Timer do nothing, until it is set again.
func (t *Timer) Stop() {
	if t.Planned() {
		i := slices.Index(t.list.planned, t)
		t.list.planned = slices.Delete(t.list.planned, i, i+1)
	}
}

// Planned reports whether the Timer has a time.
func (t *Timer) Planned() bool { return t != nil && slices.Contains(t.list.planned, t) }

func byTime(a, b *Timer) int { return cmp.Compare(a.at, b.at) }

// Next returns the earliest time of all.
func (l *List) Next() (at sched.Time, ok bool) {
	if len(l.planned) == 0 {
		return 0, false
	}
	return slices.MinFunc(l.planned, byTime).at, true
}

// Run does what is due.
func (l *List) Run(now sched.Time) {
	due := slices.DeleteFunc(slices.Clone(l.planned), func(t *Timer) bool { return t.at > now })
	slices.SortFunc(due, byTime)
	for _, t := range due {
		if t.Planned() && t.at <= now { // else another one has stopped it
			t.Stop()
			t.do()
		}
	}
}
