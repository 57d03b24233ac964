// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// describe answers the control call. c is ours to keep.
func (d *Daemon) describe(c *api.Container, keep *api.Keep) *api.DescribeContainerResponse {
	old := d.names[c.Id]
	if old != nil {
		keepShare(c, old, keep)
	}
	d.names[c.Id] = c
	// The answer is encoded while the loop goes on.
	resp := &api.DescribeContainerResponse{New: proto.Clone(c).(*api.Container)}
	if old != nil {
		resp.Old = proto.Clone(old).(*api.Container)
	}
	account := peer.ContainerAccount + c.Id
	was := d.shares.Tenants[account]
	d.setPodShare(c)
	is := d.shares.Tenants[account]
	for _, g := range d.order {
		if !d.has(account, g.UUID) {
			continue
		}
		o, n := was.on(g.UUID), is.on(g.UUID)
		resp.Changes = append(resp.Changes, &api.ShareChange{
			Uuid: g.UUID, Index: uint32(g.Index), Old: o.api(), New: n.api(),
			OldMemoryBytes: o.Memory, NewMemoryBytes: n.Memory, UsedMemoryBytes: g.ledger.Reserved(account, 0).Used,
		})
	}
	return resp
}

// keepShare has c ask for what it asked for before, where that is to stay.
func keepShare(c, old *api.Container, keep *api.Keep) {
	if keep.GetMemoryLimit() {
		c.MemoryLimitBytes = old.MemoryLimitBytes
	}
	if c.Share == nil {
		c.Share = &api.Share{}
	}
	s := old.GetShare()
	if keep.GetCoreLimit() {
		c.Share.CoreLimit = s.GetCoreLimit()
	}
	if keep.GetCoreRequest() {
		c.Share.CoreRequest = s.GetCoreRequest()
	}
	if keep.GetWeight() {
		c.Share.Weight = s.GetWeight()
	}
	if keep.GetPriority() {
		c.Share.Priority = s.GetPriority()
	}
	if keep.GetGang() {
		c.Share.Gang = s.GetGang()
	}
	if keep.GetMemoryMode() {
		c.Share.MemoryMode = s.GetMemoryMode()
	}
}

// setPodShare is what the plugin's description of a container changes.
func (d *Daemon) setPodShare(c *api.Container) {
	account := peer.ContainerAccount + c.Id
	old := d.shares.Tenants[account]
	to := old
	if to.Pod, to.Has = podShare(c), c.Gpus; to.Pod == (share{}) {
		to.Has = nil // names[…] has it as long as it matters
	}
	if to.Pod != old.Pod || !slices.Equal(to.Has, old.Has) {
		// In force also if a restart would not know of it: the plugin would
		// say it again.
		_ = d.changeShares(account, to, true)
	}
}
