// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// runEngine is the engine of programs that nvsharectl run describes.
const runEngine = "nvsharectl run"

// tenantOf is what the API says for an account.
func (n *node) tenantOf(account string) (c *api.Container, uid uint32) {
	if id, ok := strings.CutPrefix(account, peer.ContainerAccount); ok {
		if names := n.names[id]; names != nil {
			return names, 0
		}
		return &api.Container{Id: id}, 0
	}
	number, _ := strconv.ParseUint(strings.TrimPrefix(account, peer.UserAccount), 10, 32)
	return &api.Container{}, uint32(number)
}

func (n *node) nameOf(account string) string { return api.Tenant(n.tenantOf(account)) }

// containerOf is what the API says for a process's container.
func (n *node) containerOf(p *peer.Peer) *api.Container {
	if names := n.names[p.Container]; names != nil {
		return names
	}
	return &api.Container{Id: p.Container, PodUid: p.PodUID}
}

// describeSome names the first of many.
func describeSome(who []string) string {
	text := strings.Join(who[:min(len(who), maxNamed)], ", ")
	if more := len(who) - maxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
