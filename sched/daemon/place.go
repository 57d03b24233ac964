// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// chooseGPU has a new container that may begin on any GPU in its reach begin where there is
// what it asks for: on the GPU with the fewest tenants, and of these on that of which the
// least memory is reserved. The programs of the container learn it by placeOf.
func (d *Daemon) chooseGPU(c *api.Container) {
	if d.gpuOf(c.Id) != "" {
		return // it is started again, or told again
	}
	account := peer.ContainerAccount + c.Id
	asks := d.shares.Tenants[account]
	asks.Pod = podTerms(c)
	var best *gpu
	var tenants int
	for _, g := range d.order {
		if !slices.Contains(c.Reach, g.UUID) || g.drained || g.fault != "" ||
			d.promisable("", g.UUID, account, promisedBy(asks.on(g.UUID)), "") != nil {
			continue
		}
		if n := d.tenantsOn(g); best == nil || n < tenants || n == tenants && reservedOn(g) < reservedOn(best) {
			best, tenants = g, n
		}
	}
	if best != nil {
		c.Gpus = []string{best.UUID}
	}
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
	for account, clients := range d.byAccount {
		for cl := range clients {
			if cl.attached[g] != nil {
				on[account] = true
			}
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
