// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

// tenant is a container, or a user's processes outside containers, on one GPU.
type tenant struct {
	container *api.Container
	uid       uint32
	clients   []*api.Client
	use       *api.TenantUse
	memory    *api.MemoryAccount // zero: no limit, and nothing is reserved
}

func (t *tenant) is(c *api.Container, uid uint32) bool {
	id := t.container.GetId()
	return id == c.GetId() && (id != "" || t.uid == uid)
}

// key tells tenants of a GPU apart.
func (t *tenant) key() string {
	return cmp.Or(t.container.GetId(), "user "+strconv.FormatUint(uint64(t.uid), 10))
}

// tenantsOf groups the clients of a GPU by tenant, with those that hold or wait first.
func tenantsOf(g *api.GPU) []*tenant {
	var all []*tenant
	find := func(c *api.Container, uid uint32) *tenant {
		for _, t := range all {
			if t.is(c, uid) {
				return t
			}
		}
		t := &tenant{container: c, uid: uid, use: &api.TenantUse{}, memory: &api.MemoryAccount{}}
		all = append(all, t)
		return t
	}
	for _, c := range g.Clients {
		t := find(c.Container, c.Uid)
		t.clients = append(t.clients, c)
	}
	for _, u := range g.Tenants {
		find(u.Container, u.Uid).use = u
	}
	for _, m := range g.Memory {
		// A tenant with nothing but a limit is not shown.
		if i := slices.IndexFunc(all, func(t *tenant) bool { return t.is(m.Container, m.Uid) }); i >= 0 {
			all[i].memory = m
		}
	}
	slices.SortStableFunc(all, func(a, b *tenant) int {
		return cmp.Or(cmp.Compare(urgency(a), urgency(b)), cmp.Compare(a.name(), b.name()))
	})
	return all
}

// urgency is the place of a tenant's state in the list.
func urgency(t *tenant) int {
	c := t.foremost()
	if c == nil {
		return len(byUrgency)
	}
	return slices.Index(byUrgency, c.State)
}

var byUrgency = []api.ClientState{
	api.ClientState_CLIENT_STATE_FENCED,
	api.ClientState_CLIENT_STATE_LOST,
	api.ClientState_CLIENT_STATE_DRAINING,
	api.ClientState_CLIENT_STATE_HOLDING,
	api.ClientState_CLIENT_STATE_WAITING,
	api.ClientState_CLIENT_STATE_IDLE,
	api.ClientState_CLIENT_STATE_UNSPECIFIED,
}

// foremost returns the client whose state stands for the tenant's: the one that is
// longest in the most urgent state. Nil: the tenant has no client.
func (t *tenant) foremost() *api.Client {
	if len(t.clients) == 0 {
		return nil
	}
	return slices.MinFunc(t.clients, func(a, b *api.Client) int {
		return cmp.Or(cmp.Compare(slices.Index(byUrgency, a.State), slices.Index(byUrgency, b.State)), cmp.Compare(b.SinceNs, a.SinceNs))
	})
}

// state returns what the tenant does, since when, and the colour to show it in.
func (t *tenant) state() (state, since, colour string) {
	c := t.foremost()
	switch {
	case c == nil && t.use.Clients > 0: // a gang or an overlap group, whose members have lines of their own
		return "group", "-", ""
	case c == nil:
		return "gone", "-", ""
	}
	state, since, colour = doing(c), "-", stateColour[c.State]
	if c.SinceNs != 0 {
		since = short(c.SinceNs)
	}
	if c.State == api.ClientState_CLIENT_STATE_WAITING && t.use.ThrottledNs > 0 {
		state = "throttled"
	}
	return state, since, colour
}

// name names the tenant for people. Processes outside containers have the name of
// their user, and of the program if there is one process.
func (t *tenant) name() string {
	name := api.Tenant(t.container, t.uid)
	if t.container.GetId() == "" && len(t.clients) == 1 {
		name += " (" + t.clients[0].Command + ")"
	}
	return name
}

// share returns the terms in which the tenant differs from one without a share.
func (t *tenant) share() string {
	terms := api.TermsOf(t.use.GetShare(), 0)
	var parts []string
	for _, f := range api.Fields {
		if value := f.Format(terms); value != f.Format(api.Terms{}) {
			parts = append(parts, f.Short+value)
		}
	}
	return strings.Join(parts, ", ")
}

// got and waited are parts of the latest five seconds.
func (t *tenant) got() string    { return t.part(t.use.GotPermille) }
func (t *tenant) waited() string { return t.part(t.use.WaitedPermille) }

func (t *tenant) part(permille uint32) string {
	if t.use.Container == nil { // a member of a gang
		return "-"
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(permille)/10), ".0") + "%"
}

// debt returns the time that the tenant has to make up for.
func (t *tenant) debt() string {
	if t.use.DebtNs == 0 {
		return "-"
	}
	return short(t.use.DebtNs)
}

// waitMax is the longest wait since the scheduler knows the tenant.
func (t *tenant) waitMax() int64 {
	longest := t.use.WaitMaxNs
	for _, c := range t.clients {
		longest = max(longest, c.WaitMaxNs)
	}
	return longest
}

// longestWait is that of the latest minute.
func (t *tenant) longestWait() int64 { return t.use.WaitMaxLatelyNs }

// ofLimit returns how much memory the tenant has reserved, and its limit after a word.
func (t *tenant) ofLimit(of string) (text, colour string) {
	m := t.memory
	text = size(m.UsedBytes)
	if m.LimitBytes != 0 {
		text += of + size(m.LimitBytes)
		if m.UsedBytes > m.LimitBytes {
			colour = red
		}
	}
	return text, colour
}

// away returns how much of the tenant's memory is in host memory or was never used.
func (t *tenant) away() (bytes uint64) {
	for _, c := range t.clients {
		bytes += c.AwayBytes
	}
	return bytes
}

// resident returns how much of the tenant's memory is on the GPU.
func (t *tenant) resident(g *api.GPU) (bytes uint64) {
	if g.Swap == nil { // nothing leaves the GPU
		return t.memory.UsedBytes
	}
	for _, c := range t.clients {
		bytes += c.ResidentBytes
	}
	return bytes
}
