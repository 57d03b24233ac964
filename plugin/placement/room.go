// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"math"
	"slices"
)

// Move is one tenant's change of its device, after which a request can be met.
type Move struct {
	Tenant   Tenant
	From, To Device
	Chosen   []string // UUIDs of what Choose then gives for the request, in its order
}

// MakeRoom looks for one tenant that can move to another device, so that a request that
// Choose refuses can be met. The tenant fits on the other device with all that it was
// promised. Of several it takes the one with the least memory, because moving takes time
// by memory; a tenant without a memory limit may have any amount, and comes last. ok is
// false where no single move helps.
func MakeRoom(devices []Device, r Request) (best Move, ok bool) {
	for i, from := range devices {
		for _, t := range from.Tenants {
			if t.ID == "" {
				continue
			}
			without := from
			without.Tenants = slices.DeleteFunc(slices.Clone(from.Tenants), func(o Tenant) bool { return o.ID == t.ID })
			// Who moves makes room where it was, or is the neighbour that the request wants. All
			// else costs too much here: a runtime waits for the answer.
			if (r.Affinity == "" || t.Affinity != r.Affinity) && len(without.unable(r)) > 0 {
				continue
			}
			for j, to := range devices {
				if i == j || !slices.Contains(t.Reach, to.UUID) ||
					len(to.unable(Request{Core: t.Core, Memory: t.Memory, Labels: t.Labels})) > 0 {
					continue
				}
				m := Move{Tenant: t, From: from, To: to}
				if ok && m.order(best) >= 0 {
					continue
				}
				after := slices.Clone(devices)
				after[i] = without
				after[j].Tenants = append(slices.Clone(to.Tenants), t)
				if chosen, err := Choose(after, r); err == nil {
					m.Chosen = chosen
					best, ok = m, true
				}
			}
		}
	}
	return best, ok
}

// order compares two moves: the better one is less.
func (m Move) order(o Move) int {
	size := func(m Move) uint64 { return cmp.Or(m.Tenant.Memory, math.MaxUint64) }
	return cmp.Or(
		cmp.Compare(size(m), size(o)),
		cmp.Compare(m.Tenant.Core, o.Tenant.Core),
		cmp.Compare(m.To.coreLeft(), o.To.coreLeft()), // best fit
		cmp.Compare(m.To.memoryLeft(), o.To.memoryLeft()),
		inOrder(m.From, o.From), inOrder(m.To, o.To),
		cmp.Compare(m.Tenant.ID, o.Tenant.ID))
}
