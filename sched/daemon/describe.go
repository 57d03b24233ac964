// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// describe answers the control call. It keeps c, with the terms of the last
// description where keep says so: the daemon owns the latest good value.
func (b *tenants) describe(c *api.Container, keep *api.Keep) *api.DescribeContainerResponse {
	old := b.names[c.Id]
	b.staysWhereItIs(c)
	if old != nil {
		terms := c.Terms()
		terms.Copy(old.Terms(), keep.Fields()|api.FixedFields)
		c.SetTerms(terms)
	}
	b.names[c.Id] = c
	close(b.described)
	b.described = make(chan struct{})
	// The answer is encoded while the loop goes on.
	resp := &api.DescribeContainerResponse{New: proto.Clone(c).(*api.Container)}
	if old != nil {
		resp.Old = proto.Clone(old).(*api.Container)
	}
	account := peer.ContainerAccount + c.Id
	was := b.shares.Tenants[account]
	b.setPodTerms(c)
	is := b.shares.Tenants[account]
	for _, g := range b.order {
		if b.has(account, g.UUID) {
			resp.Changes = append(resp.Changes, shareChange(g, account, was, is))
		}
	}
	return resp
}

// staysWhereItIs corrects the description of a container that has moved: who describes it
// may know only on which GPU it began.
func (b *tenants) staysWhereItIs(c *api.Container) {
	if is := b.gpuOf(c.Id); is != "" && len(c.Gpus) == 1 && slices.Contains(c.Reach, is) {
		c.Gpus = []string{is}
	}
}

// hasMoved notes that a container's processes are on another GPU.
func (b *tenants) hasMoved(id string, from, to *gpu) {
	c := b.names[id]
	if len(c.GetReach()) == 0 || !slices.Equal(c.Gpus, []string{from.UUID}) {
		return
	}
	c = proto.Clone(c).(*api.Container) // others may read the old one
	c.Gpus = []string{to.UUID}
	b.names[id] = c
	b.setPodTerms(c)
}

// setPodTerms puts the terms of a described container in force.
func (b *tenants) setPodTerms(c *api.Container) {
	account := peer.ContainerAccount + c.Id
	old := b.shares.Tenants[account]
	to := old
	if c.Engine == "" {
		to.Engine = nil // the plugin describes the container now
	}
	if to.Pod, to.Has = podTerms(c), c.Gpus; to.isZero() {
		to.Has = nil // b.names has the GPUs as long as they matter
	}
	if to.Pod != old.Pod || !slices.Equal(to.Has, old.Has) {
		// In force also if the record fails: after a restart the plugin describes
		// the container again.
		_ = b.changeShares(account, to, true)
	}
}
