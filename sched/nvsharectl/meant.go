// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

// tenantHelp is what a command's help says of the names of tenants.
const tenantHelp = `

A tenant is a container or a user. Its name is, and the first that fits is
meant: a container's name as the status shows it, its own name, or its pod's;
the number of a user, as 1000 or "user 1000"; or the beginning of a container's
id, also if that looks like a number that no user has.`

// meant is whom people mean by the name of a tenant: containers, or a user.
type meant struct {
	ids []string // of the containers
	uid *uint32  // nil: no user
}

func (m meant) has(c *api.Container, uid uint32) bool {
	if id := c.GetId(); id != "" {
		return slices.Contains(m.ids, id)
	}
	return m.uid != nil && *m.uid == uid
}

// tenants are those among which a name is looked up.
type tenants struct {
	containers map[string]*api.Container // by id
	users      map[uint32]bool           // with processes outside containers, or settings
}

func newTenants() *tenants {
	return &tenants{containers: map[string]*api.Container{}, users: map[uint32]bool{}}
}

// add adds a tenant. A container without names does not take those that it has.
func (all *tenants) add(c *api.Container, uid uint32) {
	id := c.GetId()
	switch {
	case c == nil:
	case id == "":
		all.users[uid] = true
	case all.containers[id] == nil || c.Name != "" || c.Pod != "":
		all.containers[id] = c
	}
}

// addStatus adds the tenants that the scheduler knows.
func (all *tenants) addStatus(r *api.StatusResponse) {
	for _, c := range r.GetContainers() {
		all.add(c, 0)
	}
	for _, s := range r.GetSettings() {
		all.add(s.Container, s.Uid)
	}
	for _, g := range r.GetGpus() {
		for _, c := range g.Clients {
			all.add(c.Container, c.Uid)
		}
		for _, u := range g.Tenants {
			all.add(u.Container, u.Uid)
		}
	}
}

// meant says whom a name means, by the rule of tenantHelp.
func (all *tenants) meant(name string) meant {
	ids, named := api.Meant(name, all.containers)
	uid, spelled, ok := userNumber(name)
	if ok && !named && (spelled || len(ids) == 0 || all.users[uid] || isUser(uid)) {
		return meant{uid: &uid}
	}
	return meant{ids: ids}
}

// userNumber reads the name of a user. spelled: as the status shows it, and not as a number that
// may be the beginning of a container's id.
func userNumber(name string) (uid uint32, spelled, ok bool) {
	number := strings.TrimPrefix(strings.TrimPrefix(name, "user "), "user/")
	n, err := strconv.ParseUint(number, 10, 32)
	return uint32(n), number != name, err == nil && strconv.FormatUint(n, 10) == number
}

// askMeant says whom a request is to name. The scheduler itself finds containers, by the same rule.
func askMeant(ctx context.Context, runDir, name string) (container string, uid *uint32, err error) {
	n, spelled, ok := userNumber(name)
	switch {
	case !ok:
		return name, nil, nil
	case spelled:
		return "", &n, nil
	}
	r, err := askAll(ctx, runDir)
	if err != nil {
		return "", nil, err
	}
	all := newTenants()
	all.addStatus(r)
	if m := all.meant(name); m.uid != nil {
		return "", m.uid, nil
	}
	return name, nil, nil
}
