// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/placement"
)

// What package placement is told of the node, and what it answers.

// chooseGPU has a new container that may begin on any GPU in its reach begin on the best of
// them. The programs of the container learn it by placeOf.
func (mv *moves) chooseGPU(c *api.Container) {
	if mv.gpuOf(c.Id) != "" {
		return // it is started again, or told again
	}
	account := peer.ContainerAccount + c.Id
	asks := mv.shares.Tenants[account]
	asks.Pod = podTerms(c)
	var places []placement.Place
	for _, g := range mv.order {
		p := mv.placementOn(g, account, asks)
		p.Tenants, p.Reserved = mv.tenantsOn(g), reservedOn(g)
		places = append(places, p)
	}
	if best := placement.Begin(placement.Tenant{Kind: placement.Container, Reach: c.Reach}, places); best != "" {
		c.Gpus = []string{best}
	}
}

// placed is a GPU as package placement has it.
func placed(g *gpu) placement.GPU {
	return placement.GPU{UUID: g.UUID, Index: g.Index, Model: g.Name, MemoryBytes: g.MemoryBytes, Drained: g.drained, Fault: g.fault}
}

func (mv *moves) placementNode() (n placement.Node) {
	if mv.opts.Checkpoint == nil {
		n.Unable = checkpoint.ErrNone
	}
	for _, g := range mv.order {
		n.GPUs = append(n.GPUs, placed(g))
	}
	return n
}

// placementTenant says which GPUs a tenant's processes can open.
func (mv *moves) placementTenant(account string) placement.Tenant {
	id, container := strings.CutPrefix(account, peer.ContainerAccount)
	if !container {
		return placement.Tenant{Kind: placement.User}
	}
	c := mv.names[id]
	t := placement.Tenant{Kind: placement.Container, Given: c.GetGpus(), Reach: c.GetReach()}
	if c.GetEngine() == runEngine {
		t.Kind = placement.Program
	}
	return t
}

// placementOn is a GPU as a tenant with these shares finds it, but for who and what is there.
func (mv *moves) placementOn(g *gpu, account string, asks tenantShares) placement.Place {
	return placement.Place{GPU: placed(g), Request: promisedBy(asks.on(g.UUID)), Promised: mv.promised(g.UUID, account).sum()}
}

func reservedOn(g *gpu) (bytes uint64) {
	_, all := g.core.Reservations()
	for _, s := range all {
		bytes += s.Total
	}
	return bytes
}

// tenantsOn counts the tenants that use a GPU, and the containers that will.
func (mv *moves) tenantsOn(g *gpu) int {
	on := map[string]bool{}
	for account := range mv.byAccount {
		if mv.onGPU(g, account) {
			on[account] = true
		}
	}
	for id, c := range mv.names {
		if slices.Contains(c.Gpus, g.UUID) {
			on[peer.ContainerAccount+id] = true
		}
	}
	return len(on)
}
