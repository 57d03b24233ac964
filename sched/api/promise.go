// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"slices"
)

// Part is what one tenant was promised of a GPU.
type Part struct {
	Container   *Container // id empty: a user's processes outside containers
	Uid         uint32     // of that user
	CoreRequest uint32     // percent of the time; 0: none
	MemoryBytes uint64     // its memory limit; 0: none
}

// Promised returns what was promised of a GPU, also to tenants that do not use
// it now: the greatest part of the time first, then of the memory.
func Promised(g *GPU) (parts []Part) {
	of := func(c *Container, uid uint32) *Part {
		id := c.GetId()
		i := slices.IndexFunc(parts, func(p Part) bool { return p.Container.GetId() == id && (id != "" || p.Uid == uid) })
		if i < 0 {
			i = len(parts)
			parts = append(parts, Part{Container: c, Uid: uid})
		}
		return &parts[i]
	}
	for _, p := range g.GetPromises() {
		of(p.Container, p.Uid).CoreRequest = p.CoreRequest
	}
	for _, m := range g.GetMemory() {
		// A limit holds on each GPU, and is promised of those that a container has.
		has := m.Container.GetGpus()
		if m.LimitBytes != 0 && (len(has) == 0 || slices.Contains(has, g.Uuid)) {
			of(m.Container, m.Uid).MemoryBytes = m.LimitBytes
		}
	}
	slices.SortStableFunc(parts, func(a, b Part) int {
		return cmp.Or(cmp.Compare(b.CoreRequest, a.CoreRequest), cmp.Compare(b.MemoryBytes, a.MemoryBytes),
			cmp.Compare(Tenant(a.Container, a.Uid), Tenant(b.Container, b.Uid)))
	})
	return parts
}
