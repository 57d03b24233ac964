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

// applyLimit brings a GPU's ledger and the tenant's pages into line with the
// limits.
func (d *Daemon) applyLimit(g *gpu, account string) {
	limit := d.shares.Tenants[account].on(g.UUID).MemoryLimit
	if g.ledger.SetLimit(account, limit) != limit {
		d.showLimits(g, account)
	}
}

// limits is what the page of a tenant's process says of the GPU; client 0: of one that
// uses none.
func (g *gpu) limits(account string, id sched.ClientID) wire.Limits {
	r := g.told(g.ledger.Reserved(account, id), id)
	return wire.Limits{Memory: r.Limit, Used: r.Used}
}

// told is how a process hears where it stands. Where memory is swapped a GPU that is to
// look small bounds each process, not all of a tenant together: as a small one would.
func (g *gpu) told(r sched.Reserved, id sched.ClientID) sched.Reserved {
	byCeiling := g.ceiling != 0 && (r.Limit == 0 || r.Limit >= g.ceiling)
	r.Limit = g.limitOf(r.Limit)
	switch {
	case !byCeiling || g.swap == nil:
	case id == 0:
		r.Used = min(r.Used, r.Limit)
	default:
		r.Used = r.Total
	}
	return r
}

// limitOf is the lower one of a tenant's limit and what the GPU is to look like.
func (g *gpu) limitOf(limit uint64) uint64 {
	if g.ceiling != 0 && (limit == 0 || limit > g.ceiling) {
		return g.ceiling
	}
	return limit
}

// showLimits brings the pages of a tenant's processes into line with the
// ledger of a GPU that they use.
func (d *Daemon) showLimits(g *gpu, account string) {
	a := d.counts[account]
	if a == nil {
		return
	}
	for cl := range a.clients {
		if att := cl.attached[g]; att != nil && cl.conn != nil && cl.conn.channels[att.channel] == att {
			cl.page.SetLimits(att.channel, g.limits(account, cl.id))
		}
	}
}

// reserve answers RESERVE.
func (d *Daemon) reserve(c *conn, att *attachment, f *wire.Frame) {
	g, cl := att.gpu, att.client
	before := g.ledger.Reserved(cl.Account, 0).Used
	force := f.Code&wire.ReserveForce != 0
	total, refused := d.placeable(g, cl, f.Reserve, force)
	r, ok := g.ledger.Reserved(cl.Account, cl.id), false
	if refused == wire.OK {
		refused = wire.ErrMemory
		r, ok = g.ledger.Reserve(cl.Account, cl.id, total, min(f.Reserve.Least, total), force)
		d.promiseMemory(g, cl, !force)
	}
	if r.Used != before {
		d.showLimits(g, cl.Account)
	}
	d.tellReserved(g)
	d.checkLedger(g)
	if !ok && refused == wire.ErrMemory && g.ceiling != 0 && (r.Limit == 0 || r.Limit > g.ceiling) && g.swap == nil {
		d.tellCeiling(g, cl, f.Reserve.Least, r.Used)
	}
	r = g.told(r, cl.id)
	answer := wire.Frame{Type: wire.TypeReserved, Channel: att.channel,
		Reserved: wire.Reserved{Total: r.Total, Used: r.Used, Limit: r.Limit, Serial: f.Reserve.Serial}}
	if !ok {
		answer.Code = refused
	}
	if d.awaitRoom(g, cl, &answer, force) {
		return
	}
	d.reach(beforeReserved)
	d.send(c, &answer, nil)
	d.reach(afterReserved)
}

// tellCeiling says that a reservation was refused because the GPU is to look small.
func (d *Daemon) tellCeiling(g *gpu, cl *client, least, used uint64) {
	text := fmt.Sprintf("all of its container or user together may have %d MiB (--gpu-memory), and have %d", g.ceiling>>20, used>>20)
	d.turn(time.Now(), g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_NO_ROOM, Bytes: least, Text: text})
	d.tell(cl.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: refuse %d MiB: %s", g.Index, least>>20, text))
}

// tellReserved tells the core how much of the GPU's memory is reserved, when
// that has changed by a hundredth of it or to nothing: the mode may depend on it.
func (d *Daemon) tellReserved(g *gpu) {
	if g.swap != nil {
		d.tellPromised(g)
		return
	}
	n := g.ledger.Total()
	change := max(n, g.reserved) - min(n, g.reserved)
	if change == 0 || n != 0 && change < g.MemoryBytes/100 {
		return
	}
	g.reserved = n
	d.step(g, sched.SetMemory{Reserved: n, Total: g.MemoryBytes})
}

// dropReservations gives back what a client has: it is dead, or another
// program now.
func (d *Daemon) dropReservations(cl *client) {
	for _, g := range d.order {
		if g.ledger.Drop(cl.Account, cl.id) {
			d.showLimits(g, cl.Account)
			d.tellReserved(g)
			d.checkLedger(g)
		}
	}
}

func (d *Daemon) checkLedger(g *gpu) {
	if t := now(); t >= d.nextLedgerCheck || d.checkAlways {
		d.nextLedgerCheck = t.Add(checkPause)
		if err := g.ledger.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
			d.log.WithError(err).Errorf("bug in nvshare-scheduler: ledger of GPU %d", g.Index)
		}
	}
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
	var found []string
	for id, c := range d.containers() {
		switch {
		case id == want:
			return peer.ContainerAccount + id, nil
		case strings.HasPrefix(id, want), c.Pod != "" && api.Who(&api.Client{Container: c}) == want:
			found = append(found, id)
		}
	}
	switch {
	case len(found) == 1:
		return peer.ContainerAccount + found[0], nil
	case len(found) == 0 && wholeID.MatchString(want):
		return peer.ContainerAccount + want, nil // one that is yet to use a GPU
	case len(found) == 0:
		return "", status.Errorf(codes.NotFound, "container %.128q: none that uses a GPU has this id or name (nvsharectl status lists them)", want)
	}
	slices.Sort(found)
	return "", status.Errorf(codes.InvalidArgument, "container %.128q: that may be %.12s, %.12s or another of %d; give more of the id", want, found[0], found[1], len(found))
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

// memoryStatus describes a GPU's ledger, and what is wrong in it.
func (d *Daemon) memoryStatus(g *gpu) (accounts []*api.MemoryAccount, problems []string) {
	for _, account := range g.ledger.Accounts() {
		r := g.ledger.Reserved(account, 0)
		a := &api.MemoryAccount{LimitBytes: r.Limit, UsedBytes: r.Used}
		a.Container, a.Uid = d.tenantOf(account)
		accounts = append(accounts, a)
		if r.Limit != 0 && r.Used > r.Limit {
			problems = append(problems, fmt.Sprintf("GPU %d: %s uses %d MiB of memory, over its limit of %d MiB; it gets no more until it has freed enough",
				g.Index, api.Tenant(a.Container, a.Uid), r.Used>>20, r.Limit>>20))
		}
	}
	return accounts, problems
}
