// SPDX-License-Identifier: Apache-2.0

package tenants

import (
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// Describe answers the control call. It keeps c, with the terms of the last
// description where keep says so: the daemon owns the latest good value.
func (b *Book) Describe(c *api.Container, keep *api.Keep) *api.DescribeContainerResponse {
	old := b.Names[c.Id]
	b.staysWhereItIs(c)
	if old != nil {
		terms := c.Terms()
		terms.Copy(old.Terms(), keep.Fields()|api.FixedFields)
		c.SetTerms(terms)
	}
	b.Names[c.Id] = c
	close(b.Described)
	b.Described = make(chan struct{})
	// The answer is encoded while the loop goes on.
	resp := &api.DescribeContainerResponse{New: proto.Clone(c).(*api.Container)}
	if old != nil {
		resp.Old = proto.Clone(old).(*api.Container)
	}
	account := peer.ContainerAccount + c.Id
	was := b.Shares.Tenants[account]
	b.SetPodTerms(c)
	is := b.Shares.Tenants[account]
	for _, g := range b.Order {
		if b.has(account, g.UUID) {
			resp.Changes = append(resp.Changes, ShareChange(g, account, was, is))
		}
	}
	return resp
}

// staysWhereItIs corrects the description of a container that has moved: who describes it
// may know only on which GPU it began.
func (b *Book) staysWhereItIs(c *api.Container) {
	if is := b.GpuOf(c.Id); is != "" && len(c.Gpus) == 1 && slices.Contains(c.Reach, is) {
		c.Gpus = []string{is}
	}
}

// HasMoved notes that a container's processes are on another GPU.
func (b *Book) HasMoved(id string, from, to *node.GPU) {
	c := b.Names[id]
	if len(c.GetReach()) == 0 || !slices.Equal(c.Gpus, []string{from.UUID}) {
		return
	}
	c = proto.Clone(c).(*api.Container) // others may read the old one
	c.Gpus = []string{to.UUID}
	b.Names[id] = c
	b.SetPodTerms(c)
}

// SetPodTerms puts the terms of a described container in force.
func (b *Book) SetPodTerms(c *api.Container) {
	account := peer.ContainerAccount + c.Id
	old := b.Shares.Tenants[account]
	to := old
	if c.Engine == "" {
		to.Engine = nil // the plugin describes the container now
	}
	if to.Pod, to.Has = PodTerms(c), c.Gpus; to.IsZero() {
		to.Has = nil // b.names has the GPUs as long as they matter
	}
	if to.Pod != old.Pod || !slices.Equal(to.Has, old.Has) {
		// In force also if the record fails: after a restart the plugin describes
		// the container again.
		_ = b.ChangeShares(account, to, true)
	}
}
