// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/placement"
	"github.com/nvshare/nvshare/sched/wire"
)

// What package placement is told of the node, and what it answers.

// chooseGPU has a new container that may begin on any GPU in its reach begin on the best of
// them. The programs of the container learn it by placeOf.
func (d *Daemon) chooseGPU(c *api.Container) {
	if d.gpuOf(c.Id) != "" {
		return // it is started again, or told again
	}
	account := peer.ContainerAccount + c.Id
	asks := d.shares.Tenants[account]
	asks.Pod = podTerms(c)
	var places []placement.Place
	for _, g := range d.order {
		p := d.placementOn(g, account, asks)
		p.Tenants, p.Reserved = d.tenantsOn(g), reservedOn(g)
		places = append(places, p)
	}
	if best := placement.Begin(placement.Tenant{Kind: placement.Container, Reach: c.Reach}, places); best != "" {
		c.Gpus = []string{best}
	}
}

func (g *gpu) placement() placement.GPU {
	return placement.GPU{UUID: g.UUID, Index: g.Index, Model: g.Name, MemoryBytes: g.MemoryBytes, Drained: g.drained, Fault: g.fault}
}

func (d *Daemon) placementNode() (n placement.Node) {
	if d.opts.Checkpoint == nil {
		n.Unable = checkpoint.ErrNone
	}
	for _, g := range d.order {
		n.GPUs = append(n.GPUs, g.placement())
	}
	return n
}

// placementTenant says which GPUs a tenant's processes can open.
func (d *Daemon) placementTenant(account string) placement.Tenant {
	id, container := strings.CutPrefix(account, peer.ContainerAccount)
	if !container {
		return placement.Tenant{Kind: placement.User}
	}
	c := d.names[id]
	t := placement.Tenant{Kind: placement.Container, Given: c.GetGpus(), Reach: c.GetReach()}
	if c.GetEngine() == runEngine {
		t.Kind = placement.Program
	}
	return t
}

// placementOn is a GPU as a tenant with these shares finds it, but for who and what is there.
func (d *Daemon) placementOn(g *gpu, account string, asks tenantShares) placement.Place {
	return placement.Place{GPU: g.placement(), Request: promisedBy(asks.on(g.UUID)), Promised: d.promised(g.UUID, account).sum()}
}

func reservedOn(g *gpu) (bytes uint64) {
	_, all := g.core.Reservations()
	for _, s := range all {
		bytes += s.Total
	}
	return bytes
}

// tenantsOn counts the tenants that use a GPU, and the containers that will.
func (d *Daemon) tenantsOn(g *gpu) int {
	on := map[string]bool{}
	for account := range d.byAccount {
		if d.onGPU(g, account) {
			on[account] = true
		}
	}
	for id, c := range d.names {
		if slices.Contains(c.Gpus, g.UUID) {
			on[peer.ContainerAccount+id] = true
		}
	}
	return len(on)
}

// gpuOf returns the one GPU of a container, by its UUID; "": it has none, or several.
func (d *Daemon) gpuOf(id string) string {
	has := d.names[id].GetGpus()
	if has == nil {
		has = d.shares.Tenants[peer.ContainerAccount+id].Has // told to an earlier scheduler
	}
	if len(has) != 1 {
		return ""
	}
	return has[0]
}

// placeOf returns the GPU on which a container is; the zero UUID: that is not known, or it is
// not one. A container that may move has the one in its environment on which it began.
func (d *Daemon) placeOf(account string) wire.UUID {
	id, container := strings.CutPrefix(account, peer.ContainerAccount)
	if !container {
		return wire.UUID{}
	}
	uuid, err := parseUUID(d.gpuOf(id))
	if err != nil || d.gpus[uuid] == nil {
		return wire.UUID{}
	}
	return uuid
}
