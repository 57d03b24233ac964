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
	"container/heap"
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// List holds the timers of one loop that have a time. The zero List is empty.
type List struct{ planned byTime }

// Timer is one thing to do. A nil Timer is never planned.
type Timer struct {
	list *List
	do   func()
	at   base.Time
	pos  int // in list.planned, from 1 on; 0: in none
}

// New returns a Timer that is not planned yet.
func (l *List) New(do func()) *Timer { return &Timer{list: l, do: do} }

// Set plans the Timer for a time, instead of the one it had.
func (t *Timer) Set(at base.Time) {
	t.Stop()
	t.at = at
	heap.Push(&t.list.planned, t)
}

// Stop has the Timer do nothing, until it is set again.
func (t *Timer) Stop() {
	if t.Planned() {
		heap.Remove(&t.list.planned, t.pos-1)
	}
}

// Planned reports whether the Timer has a time.
func (t *Timer) Planned() bool { return t != nil && t.pos > 0 }

// byTime is a heap of timers, the earliest first.
type byTime []*Timer

func (h byTime) Len() int           { return len(h) }
func (h byTime) Less(i, j int) bool { return h[i].at < h[j].at }
func (h byTime) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i+1, j+1
}

func (h *byTime) Push(x any) {
	*h = append(*h, x.(*Timer))
	x.(*Timer).pos = len(*h)
}

func (h *byTime) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	t.pos = 0
	(*h)[last] = nil
	*h = (*h)[:last]
	return t
}

// Next returns the earliest time of all.
func (l *List) Next() (at base.Time, ok bool) {
	if len(l.planned) == 0 {
		return 0, false
	}
	return l.planned[0].at, true
}

// Run does what is due.
func (l *List) Run(now base.Time) {
	due := slices.DeleteFunc(slices.Clone(l.planned), func(t *Timer) bool { return t.at > now })
	slices.SortFunc(due, func(a, b *Timer) int { return cmp.Compare(a.at, b.at) })
	for _, t := range due {
		if t.Planned() && t.at <= now { // else another one has stopped it
			t.Stop()
			t.do()
		}
	}
}
