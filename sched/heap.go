// SPDX-License-Identifier: Apache-2.0

package sched

import "container/heap"

// tenantHeap orders the tenants of one place. A tenant is in one at most.
type tenantHeap struct {
	items []*tenant
	less  func(a, b *tenant) bool
}

func (h *tenantHeap) top() *tenant {
	if len(h.items) == 0 {
		return nil
	}
	return h.items[0]
}

func (h *tenantHeap) push(t *tenant)   { heap.Push((*byLess)(h), t) }
func (h *tenantHeap) remove(t *tenant) { heap.Remove((*byLess)(h), t.pos) }
func (h *tenantHeap) fix(t *tenant)    { heap.Fix((*byLess)(h), t.pos) }
func (h *tenantHeap) reorder()         { heap.Init((*byLess)(h)) }

// byLess is a tenantHeap for package heap alone.
type byLess tenantHeap

func (h *byLess) Len() int           { return len(h.items) }
func (h *byLess) Less(i, j int) bool { return h.less(h.items[i], h.items[j]) }
func (h *byLess) Swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	h.items[i].pos, h.items[j].pos = i, j
}
func (h *byLess) Push(x any) {
	t := x.(*tenant)
	t.pos = len(h.items)
	h.items = append(h.items, t)
}
func (h *byLess) Pop() any {
	last := len(h.items) - 1
	t := h.items[last]
	h.items[last] = nil
	h.items = h.items[:last]
	return t
}

// before says which of two waiting tenants asked first.
func before(a, b *tenant) bool { return a.first() < b.first() }

func (t *tenant) first() uint64 {
	if t.queue.head == nil {
		return 0 // it is about to leave its place, or is a gang whose clients wait on other GPUs
	}
	return t.queue.head.seq
}

func behind(a, b *tenant) bool { return a.VT() < b.VT() || a.VT() == b.VT() && before(a, b) }

func backFirst(a, b *tenant) bool {
	x, y := a.backAt(), b.backAt()
	return x < y || x == y && before(a, b)
}
