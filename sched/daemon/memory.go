// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// limits is what the page of a tenant's process says of the GPU; client 0: of one that
// uses none.
func (g *gpu) limits(account string, id sched.ClientID) wire.Limits {
	s := g.core.Standing(account, id)
	return wire.Limits{Memory: s.Limit, Used: s.Used}
}

// showLimits brings the pages of a tenant's processes into line with the
// ledger of a GPU that they use.
func (d *Daemon) showLimits(g *gpu, account string) {
	all := d.byAccount[account]
	d.extraWork += uint64(len(all)) / clientsPerWork
	for cl := range all {
		if att := cl.attached[g]; att != nil && cl.conn != nil && cl.conn.channels[att.channel] == att {
			cl.page.SetLimits(att.channel, g.limits(account, cl.id))
		}
	}
}

// reserve passes RESERVE on.
func (d *Daemon) reserve(att *attachment, f *wire.Frame) {
	r := f.Reserve
	att.reserves = true
	d.step(att.gpu, sched.Reserve{Client: att.client.id, Total: r.Total, Least: r.Least, Force: f.Code&wire.ReserveForce != 0, Serial: r.Serial})
}

// reserved answers RESERVE.
func (d *Daemon) reserved(g *gpu, a sched.Reserved) {
	att := d.attachmentOf(g, a.Client)
	if att == nil {
		return
	}
	cl := att.client
	answer := wire.Frame{Type: wire.TypeReserved, Channel: att.channel,
		Reserved: wire.Reserved{Total: a.Stands.Total, Used: a.Stands.Used, Limit: a.Stands.Limit, Serial: a.Serial}}
	switch a.Refused {
	case sched.NoPlace:
		answer.Code = wire.ErrArena
		if !cl.canMove {
			answer.Code = wire.ErrMemory // all that it knows
		}
		d.noteNoRoom(g, cl, a.Asked, a.Why.Error())
	case sched.OverCeiling:
		answer.Code = wire.ErrMemory
		d.noteNoRoom(g, cl, a.Asked, fmt.Sprintf("all of its container or user together may have %d MiB (--gpu-memory), and have %d", d.opts.GPUMemory>>20, a.Stands.Used>>20))
	case sched.OverLimit:
		answer.Code = wire.ErrMemory
		d.noteOutOfMemory(g, cl, a.Asked, a.Stands)
	}
	d.reach(beforeReserved)
	d.send(cl.conn, &answer, nil)
	d.reach(afterReserved)
}

// noteNoRoom notes and logs why a reservation was refused that its tenant's limit allows.
func (d *Daemon) noteNoRoom(g *gpu, cl *client, bytes uint64, why string) {
	g.noRoom = now()
	d.turn(time.Now(), g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_NO_ROOM, Bytes: bytes, Text: why})
	d.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: refuse %d MiB: %s", g.Index, bytes>>20, why))
}

// noteOutOfMemory counts a reservation that its tenant's limit refused. Programs try
// again and again, so the tenant causes an event in refusalPause only.
func (d *Daemon) noteOutOfMemory(g *gpu, cl *client, bytes uint64, stands sched.Standing) {
	all := d.outOfMemory[cl.Account]
	if all == nil {
		all = map[*gpu]uint64{}
		d.outOfMemory[cl.Account] = all
	}
	all[g]++
	t := time.Now()
	if !d.mayTell("memory of "+g.UUID+" "+cl.Account, t) {
		return
	}
	why := fmt.Sprintf("the limit of %d MiB: its process wanted %d MiB in all, and all of its processes have %d MiB", stands.Limit>>20, bytes>>20, stands.Used>>20)
	d.history.AddCaused(d.eventOf(t, g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_OUT_OF_MEMORY, Bytes: bytes, Text: why}))
	d.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: out of memory by %s", g.Index, why))
}

// setMemoryLimit answers the control call, which is SetShare for memory alone.
func (d *Daemon) setMemoryLimit(req *api.SetMemoryLimitRequest) (*api.SetMemoryLimitResponse, error) {
	r, err := d.setShare(&api.SetShareRequest{Container: req.Container, Uid: req.Uid, Gpu: req.Gpu, MemoryBytes: &req.Bytes})
	if err != nil {
		return nil, err
	}
	resp := &api.SetMemoryLimitResponse{Container: r.Container, Uid: r.Uid}
	for _, c := range r.Changes {
		resp.Changes = append(resp.Changes, &api.MemoryLimitChange{
			Uuid: c.Uuid, Index: c.Index, OldBytes: c.OldMemoryBytes, NewBytes: c.NewMemoryBytes, UsedBytes: c.UsedMemoryBytes,
		})
	}
	return resp, nil
}

var wholeID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// findTenant returns the account that a request names.
func (d *Daemon) findTenant(want string, uid *uint32) (account string, err error) {
	switch {
	case (want == "") == (uid == nil):
		return "", status.Error(codes.InvalidArgument, "set a share: name either a container or a user")
	case uid != nil:
		return peer.AccountOfUser(*uid), nil
	}
	all := d.containers()
	found, _ := api.Meant(want, all)
	switch {
	case len(found) == 1:
		return peer.ContainerAccount + found[0], nil
	case len(found) == 0 && wholeID.MatchString(want):
		return peer.ContainerAccount + want, nil // one that is yet to use a GPU
	case len(found) == 0:
		return "", status.Errorf(codes.NotFound, "container %.128q: none that uses a GPU has this id or name (nvsharectl status lists them)", want)
	}
	return "", status.Errorf(codes.InvalidArgument, "container %.128q: that may be %.12s (%s), %.12s (%s) or another of %d; give more of the name or of the id",
		want, found[0], api.Tenant(all[found[0]], 0), found[1], api.Tenant(all[found[1]], 0), len(found))
}

// containers returns all containers that we know of, by id.
func (d *Daemon) containers() map[string]*api.Container {
	all := maps.Clone(d.names)
	add := func(id string) {
		if id != "" && all[id] == nil {
			all[id] = &api.Container{Id: id}
		}
	}
	for _, cl := range d.clients {
		add(cl.Container)
	}
	for account := range d.shares.Tenants {
		id, _ := strings.CutPrefix(account, peer.ContainerAccount)
		if id != account {
			add(id)
		}
	}
	return all
}

// tenantOf is what the API says for an account.
func (d *Daemon) tenantOf(account string) (c *api.Container, uid uint32) {
	if id, ok := strings.CutPrefix(account, peer.ContainerAccount); ok {
		if names := d.names[id]; names != nil {
			return names, 0
		}
		return &api.Container{Id: id}, 0
	}
	n, _ := strconv.ParseUint(strings.TrimPrefix(account, peer.UserAccount), 10, 32)
	return &api.Container{}, uint32(n)
}

// unlimited names the processes of a tenant with a memory limit whose shims have memory
// that they did not reserve: they are older than limits.
func (d *Daemon) unlimited(g *gpu, account string) (problems []string) {
	for cl := range d.byAccount[account] {
		if att := cl.attached[g]; att != nil && !att.reserves && att.stats.MemBytes > 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: %s (pid %d) has %d MiB in spite of its limit: its shim %s is too old to hold a memory limit",
				g.Index, api.Tenant(d.containerOf(cl.Peer), cl.UID), cl.PID, att.stats.MemBytes>>20, shimVersion(cl.reg.ShimVersion)))
		}
	}
	slices.Sort(problems)
	return problems
}

// memoryStatus describes a GPU's ledger, and what is wrong in it.
func (d *Daemon) memoryStatus(g *gpu) (accounts []*api.MemoryAccount, problems []string) {
	tenants, stand := g.core.Reservations()
	for i, account := range tenants {
		r := stand[i]
		a := &api.MemoryAccount{LimitBytes: r.Limit, UsedBytes: r.Used}
		a.Container, a.Uid = d.tenantOf(account)
		accounts = append(accounts, a)
		if r.Limit != 0 && r.Used > r.Limit {
			problems = append(problems, fmt.Sprintf("GPU %d: %s uses %d MiB of memory, over its limit of %d MiB; it gets no more until it has freed enough",
				g.Index, api.Tenant(a.Container, a.Uid), r.Used>>20, r.Limit>>20))
		}
		if r.Limit != 0 {
			problems = append(problems, d.unlimited(g, account)...)
		}
	}
	return accounts, problems
}
