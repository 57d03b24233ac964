// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// GPUTenant is a container, or a user's processes outside containers, on one GPU.
type GPUTenant struct {
	Container *Container
	Uid       uint32
	Clients   []*Client
	Use       *TenantUse     // zero: it is a member of a gang or an overlap group, which has a line of its own
	Memory    *MemoryAccount // zero: no limit, and nothing is reserved
}

// TenantsOf groups the clients of a GPU by tenant. A tenant with nothing but a limit is none of it.
func TenantsOf(g *GPU) (all []*GPUTenant) {
	find := func(c *Container, uid uint32) *GPUTenant {
		if i := slices.IndexFunc(all, func(t *GPUTenant) bool { return t.Is(c, uid) }); i >= 0 {
			return all[i]
		}
		all = append(all, &GPUTenant{Container: c, Uid: uid, Use: &TenantUse{}, Memory: &MemoryAccount{}})
		return all[len(all)-1]
	}
	for _, c := range g.Clients {
		t := find(c.Container, c.Uid)
		t.Clients = append(t.Clients, c)
	}
	for _, u := range g.Tenants {
		find(u.Container, u.Uid).Use = u
	}
	for _, m := range g.Memory {
		if i := slices.IndexFunc(all, func(t *GPUTenant) bool { return t.Is(m.Container, m.Uid) }); i >= 0 {
			all[i].Memory = m
		}
	}
	return all
}

// Is tells whether a tenant is this container, or this user outside containers.
func (t *GPUTenant) Is(c *Container, uid uint32) bool {
	return t.Key() == TenantKey(c, uid)
}

// Key tells tenants apart.
func (t *GPUTenant) Key() string { return TenantKey(t.Container, t.Uid) }

// TenantKey tells tenants apart. Two containers outside Kubernetes may have one name.
func TenantKey(c *Container, uid uint32) string {
	return cmp.Or(c.GetId(), fmt.Sprintf("user %d", uid))
}

var byUrgency = []ClientState{
	ClientState_CLIENT_STATE_FENCED,
	ClientState_CLIENT_STATE_LOST,
	ClientState_CLIENT_STATE_DRAINING,
	ClientState_CLIENT_STATE_HOLDING,
	ClientState_CLIENT_STATE_WAITING,
	ClientState_CLIENT_STATE_IDLE,
	ClientState_CLIENT_STATE_UNSPECIFIED,
}

// Foremost returns the client whose state stands for the tenant's: the one that is longest in the
// most urgent state; nil: the tenant has no client. urgency is the place of that state.
func (t *GPUTenant) Foremost() (c *Client, urgency int) {
	if len(t.Clients) == 0 {
		return nil, len(byUrgency)
	}
	c = slices.MinFunc(t.Clients, func(a, b *Client) int {
		return cmp.Or(cmp.Compare(slices.Index(byUrgency, a.State), slices.Index(byUrgency, b.State)), cmp.Compare(b.SinceNs, a.SinceNs))
	})
	return c, slices.Index(byUrgency, c.State)
}

// State returns what the tenant does, in one word.
func (t *GPUTenant) State() string {
	c, _ := t.Foremost()
	switch {
	case c == nil && t.Use.Clients > 0: // a gang or an overlap group, whose members have lines of their own
		return "group"
	case c == nil:
		return "gone"
	case c.State == ClientState_CLIENT_STATE_WAITING && t.Use.ThrottledNs > 0:
		return "throttled"
	}
	return Doing(c)
}

// Doing returns what a client does, in one word.
func Doing(c *Client) string {
	switch {
	case c.Moving && c.State == ClientState_CLIENT_STATE_HOLDING:
		return "moving"
	case c.Suspended && c.State == ClientState_CLIENT_STATE_IDLE:
		return "suspended"
	}
	return StateName(c)
}

// StateName is the state of a client as programs have it.
func StateName(c *Client) string {
	return strings.ToLower(strings.TrimPrefix(c.State.String(), "CLIENT_STATE_"))
}
