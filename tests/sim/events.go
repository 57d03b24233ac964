// SPDX-License-Identifier: Apache-2.0

package sim

import "github.com/nvshare/nvshare/sched/base"

// event is something that will happen.
type event struct {
	at  base.Time
	seq uint64
	do  func()
}

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.seq < f.seq }

// events is a heap by time, then by order of arrival. Package heap would cost
// an allocation for each.
type events []event

func (h *events) push(e event) {
	s := append(*h, e)
	i := len(s) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !e.before(&s[parent]) {
			break
		}
		s[i] = s[parent]
		i = parent
	}
	s[i] = e
	*h = s
}

func (h *events) pop() event {
	s := *h
	first, last := s[0], s[len(s)-1]
	s[len(s)-1] = event{}
	s = s[:len(s)-1]
	for i := 0; len(s) > 0; {
		child := 2*i + 1
		if child+1 < len(s) && s[child+1].before(&s[child]) {
			child++
		}
		if child >= len(s) || !s[child].before(&last) {
			s[i] = last
			break
		}
		s[i] = s[child]
		i = child
	}
	*h = s
	return first
}
