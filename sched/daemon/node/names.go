// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// RunEngine is the engine of programs that nvsharectl run describes.
const RunEngine = "nvsharectl run"

// TenantOf is what the API says for an account.
func (n *Node) TenantOf(account string) (c *api.Container, uid uint32) {
	if id, ok := strings.CutPrefix(account, peer.ContainerAccount); ok {
		if names := n.Names[id]; names != nil {
			return names, 0
		}
		return &api.Container{Id: id}, 0
	}
	number, _ := strconv.ParseUint(strings.TrimPrefix(account, peer.UserAccount), 10, 32)
	return &api.Container{}, uint32(number)
}

func (n *Node) NameOf(account string) string { return api.Tenant(n.TenantOf(account)) }

// ContainerOf is what the API says for a process's container.
func (n *Node) ContainerOf(p *peer.Peer) *api.Container {
	if names := n.Names[p.Container]; names != nil {
		return names
	}
	return &api.Container{Id: p.Container, PodUid: p.PodUID}
}

// DescribeSome names the first of many.
func DescribeSome(who []string) string {
	text := strings.Join(who[:min(len(who), MaxNamed)], ", ")
	if more := len(who) - MaxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
