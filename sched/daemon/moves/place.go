// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/placement"
)

// What package placement is told of the node, and what it answers.

// ChooseGPU has a new container that may begin on any GPU in its reach begin on the best of
// them. The programs of the container learn it by PlaceOf.
func (mv *Moves) ChooseGPU(c *api.Container) {
	if mv.GpuOf(c.Id) != "" {
		return // it is started again, or told again
	}
	account := peer.ContainerAccount + c.Id
	asks := mv.Shares.Tenants[account]
	asks.Pod = tenants.PodTerms(c)
	var places []placement.Place
	for _, g := range mv.Order {
		p := mv.placementOn(g, account, asks)
		p.Tenants, p.Reserved = mv.tenantsOn(g), reservedOn(g)
		places = append(places, p)
	}
	if best := placement.Begin(placement.Tenant{Kind: placement.Container, Reach: c.Reach}, places); best != "" {
		c.Gpus = []string{best}
	}
}

// placed is a GPU as package placement has it.
func placed(g *node.GPU) placement.GPU {
	return placement.GPU{UUID: g.UUID, Index: g.Index, Model: g.Name, MemoryBytes: g.MemoryBytes, Drained: g.Drained, Fault: g.Fault}
}

func (mv *Moves) placementNode() (n placement.Node) {
	if mv.Opts.Checkpoint == nil {
		n.Unable = checkpoint.ErrNone
	}
	for _, g := range mv.Order {
		n.GPUs = append(n.GPUs, placed(g))
	}
	return n
}

// PlacementTenant says which GPUs a tenant's processes can open.
func (mv *Moves) PlacementTenant(account string) placement.Tenant {
	id, container := strings.CutPrefix(account, peer.ContainerAccount)
	if !container {
		return placement.Tenant{Kind: placement.User}
	}
	c := mv.Names[id]
	t := placement.Tenant{Kind: placement.Container, Given: c.GetGpus(), Reach: c.GetReach()}
	if c.GetEngine() == node.RunEngine {
		t.Kind = placement.Program
	}
	return t
}

// placementOn is a GPU as a tenant with these shares finds it, but for who and what is there.
func (mv *Moves) placementOn(g *node.GPU, account string, asks tenants.TenantShares) placement.Place {
	return placement.Place{GPU: placed(g), Request: tenants.PromisedBy(asks.On(g.UUID)), Promised: mv.Promised(g.UUID, account).Sum()}
}

func reservedOn(g *node.GPU) (bytes uint64) {
	_, all := g.Core.Reservations()
	for _, s := range all {
		bytes += s.Total
	}
	return bytes
}

// tenantsOn counts the tenants that use a GPU, and the containers that will.
func (mv *Moves) tenantsOn(g *node.GPU) int {
	on := map[string]bool{}
	for account := range mv.ByAccount {
		if mv.OnGPU(g, account) {
			on[account] = true
		}
	}
	for id, c := range mv.Names {
		if slices.Contains(c.Gpus, g.UUID) {
			on[peer.ContainerAccount+id] = true
		}
	}
	return len(on)
}
