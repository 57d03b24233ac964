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

	"github.com/nvshare/nvshare/sched"
)

// List holds the timers of one loop. The zero List is empty.
type List struct{ planned planned }

// Timer is one thing to do.
type Timer struct {
	list  *List
	do    func()
	at    sched.Time
	index int // in list.planned; -1: not planned
}

// New returns a Timer that is not planned yet.
func (l *List) New(do func()) *Timer { return &Timer{list: l, do: do, index: -1} }

// Set plans the Timer for a time, instead of the one it had.
func (t *Timer) Set(at sched.Time) {
	was := t.at
	t.at = at
	switch {
	case t.index < 0:
		heap.Push(&t.list.planned, t)
	case at != was:
		heap.Fix(&t.list.planned, t.index)
	}
}

// Stop has the Timer do nothing, until it is set again.
func (t *Timer) Stop() {
	if t.index >= 0 {
		heap.Remove(&t.list.planned, t.index)
	}
}

// Planned reports whether the Timer has a time.
func (t *Timer) Planned() bool { return t.index >= 0 }

// Next returns the earliest time of all.
func (l *List) Next() (at sched.Time, ok bool) {
	if len(l.planned) == 0 {
		return 0, false
	}
	return l.planned[0].at, true
}

// Run does what is due.
func (l *List) Run(now sched.Time) {
	var due []*Timer
	for _, t := range l.planned {
		if t.at <= now {
			due = append(due, t)
		}
	}
	slices.SortFunc(due, func(a, b *Timer) int { return cmp.Compare(a.at, b.at) })
	for _, t := range due {
		if t.index >= 0 && t.at <= now { // else another one has stopped it
			t.Stop()
			t.do()
		}
	}
}

// planned is a heap by time.
type planned []*Timer

func (p planned) Len() int           { return len(p) }
func (p planned) Less(i, j int) bool { return p[i].at < p[j].at }
func (p planned) Swap(i, j int) {
	p[i], p[j] = p[j], p[i]
	p[i].index, p[j].index = i, j
}

func (p *planned) Push(x any) {
	t := x.(*Timer)
	t.index = len(*p)
	*p = append(*p, t)
}

func (p *planned) Pop() any {
	last := len(*p) - 1
	t := (*p)[last]
	(*p)[last], *p = nil, (*p)[:last]
	t.index = -1
	return t
}
