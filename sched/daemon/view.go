// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// viewTimeout is how long who asks the status socket may take to read the answer.
const viewTimeout = 5 * time.Second

// admitViewer answers a connection to the status socket. Nothing is read from it, so
// nothing that a process sends can do harm. Connections, and what an answer costs, count
// against the account of the process like those of its programs.
func (d *Daemon) admitViewer(ctx context.Context, sock *net.UnixConn) {
	c := &node.Conn{Sock: sock}
	if d.letIn(c) != nil {
		sock.Close()
		return
	}
	c.Peer.Close() // who it is stays known
	p, account := c.Peer, c.Account
	d.Go(func() {
		defer account.Disconnect()
		defer sock.Close()
		var o *overview
		view := &api.View{}
		cost := 0
		made := make(chan struct{})
		d.inTurn(account, func() {
			o, cost = d.overview(), viewCost+len(d.Clients)+len(d.tenants.Shares.Tenants)
			view.Container, view.Uid = d.TenantOf(p.Account)
			close(made)
		})
		select {
		case <-made:
		case <-d.Ended():
			return
		}
		answer, err := proto.Marshal(o.view(p.Account, view))
		if err != nil {
			d.Log.WithError(err).Error("answer the status socket")
			return
		}
		sock.SetDeadline(time.Now().Add(viewTimeout))
		defer context.AfterFunc(ctx, func() { sock.Close() })()
		if _, err := sock.Write(answer); err != nil {
			return
		}
		sock.CloseWrite()
		// The connection stays open for as long as the account owes for the answer, so that
		// who asks too often has no connection left, and is refused.
		select {
		case <-time.After(account.Charge(cost, time.Now())):
		case <-d.Ended():
		}
	})
}

// view is the status as an account may see it: its own parts, and of all others numbers.
func (o *overview) view(account string, view *api.View) *api.StatusResponse {
	mine := func(c *api.Container, user uint32) bool {
		if id := c.GetId(); id != "" {
			return peer.ContainerAccount+id == account
		}
		return peer.AccountOfUser(user) == account
	}
	return narrow(o.status, view, mine, func(c *api.Client) bool { return o.accounts[c.Id] == account })
}

// narrow makes an answer that has of the tenant's own parts everything and of all others
// numbers. What it does not name here is left out, so a new field of the API is left out
// until somebody has judged it.
func narrow(all *api.StatusResponse, view *api.View, mine func(*api.Container, uint32) bool, myClient func(*api.Client) bool) *api.StatusResponse {
	r := &api.StatusResponse{Version: all.Version, UptimeNs: all.UptimeNs, Clients: all.Clients, View: view}
	for _, g := range all.Gpus {
		r.Gpus = append(r.Gpus, narrowGPU(g, mine, myClient))
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			reportClient(r, g.Index, c)
		}
	}
	view.Problems = uint32(max(len(all.Problems)-len(r.Problems), 0))
	if view.Container.GetId() != "" {
		r.Containers = []*api.Container{view.Container}
	}
	for _, s := range all.Settings {
		if mine(s.Container, s.Uid) {
			r.Settings = append(r.Settings, s)
		}
	}
	return r
}

func narrowGPU(g *api.GPU, mine func(*api.Container, uint32) bool, myClient func(*api.Client) bool) *api.GPU {
	others := &api.Others{}
	out := &api.GPU{
		Index: g.Index, Uuid: g.Uuid, Name: g.Name, MemoryBytes: g.MemoryBytes,
		Mode: g.Mode, QuantumNs: g.QuantumNs, GraceNs: g.GraceNs, Grants: g.Grants, Preemptions: g.Preemptions,
		EffectiveMode: g.EffectiveMode, Way: g.Way, WayCode: g.WayCode, WayReason: g.WayReason, Refused: g.Refused,
		Swap: g.Swap, Others: others,
	}
	for _, c := range g.Clients {
		switch {
		case myClient(c):
			out.Clients = append(out.Clients, c)
			continue
		case c.State == api.ClientState_CLIENT_STATE_WAITING:
			others.Waiting++
		case c.Epoch != 0:
			others.Holding++
		}
		others.Clients++
	}
	for _, u := range g.Tenants {
		if mine(u.Container, u.Uid) {
			out.Tenants = append(out.Tenants, u)
			continue
		}
		if u.Clients > 0 && !strings.HasPrefix(u.Container.GetId(), tenants.GangTenant) { // its tenants are counted
			others.Tenants++
		}
		others.GotPermille += u.GotPermille
	}
	for _, m := range g.Memory {
		if mine(m.Container, m.Uid) {
			out.Memory = append(out.Memory, m)
		} else {
			others.MemoryBytes += m.UsedBytes
		}
	}
	for _, p := range g.Promises {
		if mine(p.Container, p.Uid) {
			out.Promises = append(out.Promises, p)
		} else {
			others.CoreRequest += p.CoreRequest
		}
	}
	return out
}

// An overview is made in the loop, where it keeps grants waiting: 16 ms with 8 GPUs and 1,000
// processes. So it answers everybody for overviewPart times as long as it took, and for
// maxOverviewAge at most. On a small node that is not noticed.
const (
	overviewPart   = 20
	maxOverviewAge = 250 * time.Millisecond
)

// overview is the status at one instant. Nobody changes it, so goroutines may share it.
type overview struct {
	status   *api.StatusResponse
	own      []string          // problems that tenants cannot cause
	accounts map[uint64]string // of the clients in it, by id
	until    base.Time
}

// overview returns the latest one, or a new one where that is old or d.latest was dropped:
// something was changed by somebody who may ask next.
func (d *Daemon) overview() *overview {
	began := loop.Now()
	if d.latest != nil && began < d.latest.until {
		return d.latest
	}
	o := &overview{status: d.status(), own: d.problems(), accounts: make(map[uint64]string, len(d.Clients))}
	for id, cl := range d.Clients {
		o.accounts[uint64(id)] = cl.Account
	}
	made := loop.Now()
	o.until = made.Add(min(d.overviewPart*made.Sub(began), maxOverviewAge))
	d.latest = o
	return o
}
