// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"maps"
	"slices"
	"sync"
)

// Health collects what keeps the plugin from giving GPUs, by part of the plugin. The
// zero value is that of a plugin where nothing does.
type Health struct {
	mu      sync.Mutex
	parts   map[string]condition
	noGPUs  bool
	changed []func()
}

// condition is why a part does not do its work.
type condition struct {
	why     string
	problem bool // somebody has to do something
}

// OnChange has f called after each change. f must not block. OnChange must be called before
// other goroutines use h.
func (h *Health) OnChange(f func()) { h.changed = append(h.changed, f) }

// Problem says that a part does not do its work, and why; nil: it does.
func (h *Health) Problem(part string, why error) {
	if why == nil {
		h.set(part, condition{})
		return
	}
	h.set(part, condition{why.Error(), true})
}

// Waits says that a part does not do its work yet, and for what it waits.
func (h *Health) Waits(part, why string) { h.set(part, condition{why: why}) }

func (h *Health) set(part string, c condition) {
	h.mu.Lock()
	before := h.parts[part]
	switch {
	case c == before:
	case c == condition{}:
		delete(h.parts, part)
	default:
		if h.parts == nil {
			h.parts = map[string]condition{}
		}
		h.parts[part] = c
	}
	h.mu.Unlock()
	if c != before {
		for _, f := range h.changed {
			f()
		}
	}
}

// Problems returns what somebody has to do something about, for people.
func (h *Health) Problems() []string { return h.list(func(c condition) bool { return c.problem }) }

// NotReady returns why the plugin does not give GPUs; none: it does, or has none to give.
func (h *Health) NotReady() []string {
	return h.list(func(c condition) bool { return c.problem || !h.noGPUs })
}

// setGPUs says whether the node has GPUs. One that has none needs no runtime that asks the plugin.
func (h *Health) setGPUs(some bool) {
	h.mu.Lock()
	h.noGPUs = !some
	h.mu.Unlock()
}

func (h *Health) list(with func(condition) bool) (all []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, part := range slices.Sorted(maps.Keys(h.parts)) {
		if c := h.parts[part]; with(c) {
			all = append(all, c.why)
		}
	}
	return all
}
