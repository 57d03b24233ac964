// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/settings"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// status describes everything. So many of its problems, the first, are the scheduler's own. It is O(clients).
func (d *Daemon) status() (r *api.StatusResponse, own int) {
	r = &api.StatusResponse{
		Version:  d.own.Version,
		UptimeNs: int64(time.Since(d.started)),

		CheckpointProblem: d.checkpointProblem(),
		Warden:            d.watch.WardenProblem() == "",
		WardenProblem:     d.watch.WardenProblem(),
		Clients:           uint32(len(d.Clients)),
		Connections:       uint32(len(d.conns)),
		ProtocolErrors:    d.Malformed,
	}
	for _, p := range d.ownProblems() {
		report(r, p.code, p.text)
	}
	own = len(r.Problems)
	for _, p := range d.fullProblems() {
		report(r, p.code, p.text)
	}
	report(r, api.ProblemCode_PROBLEM_CODE_OVERLAP, d.overlapProblems()...)
	var crowded string
	if r.Refused, crowded = d.Desk.Refused(time.Now()); crowded != "" {
		report(r, api.ProblemCode_PROBLEM_CODE_CONNECTIONS, crowded)
	}
	r.Refused += d.refused
	for _, g := range d.Order {
		r.Gpus = append(r.Gpus, d.gpuStatus(r, g))
	}
	report(r, api.ProblemCode_PROBLEM_CODE_UNKNOWN_GPU, d.unknownProblems()...)
	r.Containers = slices.SortedFunc(maps.Values(d.Names), func(a, b *api.Container) int { return cmp.Compare(a.Id, b.Id) })
	r.Settings = d.tenants.AllSettings()
	r.Config = d.config()
	return r, own
}

// loadLife is how long what the driver said of a GPU is shown.
const loadLife = 20 * time.Second

// gpuStatus describes a GPU, and adds what is wrong with it to r.
func (d *Daemon) gpuStatus(r *api.StatusResponse, g *node.GPU) *api.GPU {
	t := loop.Now()
	s := g.Core.Snapshot(t)
	out := &api.GPU{
		Index: uint32(g.Index), Uuid: g.UUID, Name: strings.ToValidUTF8(g.Name, "?"), Mig: g.MIG, MemoryBytes: g.MemoryBytes, Model: g.Model,
		Mode: settings.APIMode(g.Mode), QuantumNs: int64(s.Quantum), GraceNs: int64(s.Grace),
		Epoch:  uint64(s.Epoch),
		Grants: s.Counters.Grants, Revokes: s.Counters.Revokes, Fences: s.Counters.Fences, Preemptions: s.Counters.Preemptions,
		Reclaims: s.Counters.Reclaims, StaleReleases: s.Counters.StaleReleases,
		EffectiveMode: settings.APIMode(s.Effective), Way: s.Way, WayCode: s.Cause.Code(), WayReason: s.Cause.String(), Refused: refusals(s.Refused),
		Drained: g.Drained, Fault: g.Fault, Held: d.held(g), Migrations: g.Arrived, OomKills: g.OOMKills,
	}
	if t.Sub(g.LoadAt) < loadLife {
		out.Load = g.Load
	}
	g.Turns.Fill(out)
	d.reportDrain(r, g)
	for i := range s.Tenants {
		use := d.tenantUse(g, &s.Tenants[i])
		out.Tenants = append(out.Tenants, use)
		if had := &s.Tenants[i]; had.Slow >= slowDrain && t.Sub(had.SlowAt) < d.slowLately {
			report(r, api.ProblemCode_PROBLEM_CODE_SLOW_RELEASE, fmt.Sprintf("GPU %d: %s took %v too long to release the GPU the last time it was asked to; it has %v the next time",
				g.Index, api.Tenant(use.Container, use.Uid), had.Slow.Round(10*time.Millisecond), had.Grace.Round(10*time.Millisecond)))
		}
	}
	for _, cs := range s.Clients {
		c := d.clientStatus(g, cs, t)
		out.Clients = append(out.Clients, c)
		reportClient(r, out.Index, c)
	}
	d.addMemory(r, g, out)
	return out
}

// addMemory describes what is promised of a GPU, and its memory.
func (d *Daemon) addMemory(r *api.StatusResponse, g *node.GPU, out *api.GPU) {
	var over, promised, stuck []string
	out.Memory, over = d.memory.MemoryStatus(g)
	out.Promises, promised = d.tenants.PromiseStatus(g)
	report(r, api.ProblemCode_PROBLEM_CODE_OVERPROMISED, promised...)
	report(r, api.ProblemCode_PROBLEM_CODE_MEMORY_LIMIT, over...)
	strangers, seen := d.watch.StrangersStatus(g)
	r.Unmanaged = append(r.Unmanaged, strangers...)
	report(r, api.ProblemCode_PROBLEM_CODE_UNMANAGED, seen...)
	report(r, api.ProblemCode_PROBLEM_CODE_OUTSIDE, d.watch.OutsideProblems(g)...)
	out.Swap, stuck = d.memory.SwapStatus(g, d.settings.SwapShare(g.UUID))
	out.NotSwapped = d.memory.NotSwapped(g)
	report(r, api.ProblemCode_PROBLEM_CODE_SWAP, stuck...)
	report(r, api.ProblemCode_PROBLEM_CODE_HOST_MEMORY, d.memory.ShortOfHost(g)...)
}

func (d *Daemon) tenantUse(g *node.GPU, t *sched.TenantSnapshot) *api.TenantUse {
	u := &api.TenantUse{
		Share:   d.tenants.Shares.Tenants[t.Tenant].On(g.UUID).Share(),
		Clients: uint32(t.Clients), PromisedPermille: uint32(t.Promised), GotPermille: uint32(t.Got),
		MovedNs: int64(t.Moved),
		UsedNs:  int64(t.Used), DebtNs: int64(t.Debt), ThrottledNs: int64(t.Throttled),
		Grants: t.Grants, WaitMaxNs: int64(t.LongestWait),
		WaitedPermille: uint32(t.Waited), WaitMaxLatelyNs: int64(t.RecentWait), OutOfMemory: d.memory.OutOfMemory[t.Tenant][g],
		Waits: metrics.Spread(&t.Waits),
	}
	if group, ok := strings.CutPrefix(t.Tenant, tenants.OverlapTenant); ok {
		u.Container = &api.Container{Id: t.Tenant, Name: t.Tenant}
		u.Share = &api.Share{CoreRequest: uint32(t.Share.Request), Weight: uint32(t.Share.Weight), Overlap: group}
		return u
	}
	if strings.HasPrefix(t.Tenant, tenants.GangTenant) {
		u.Container = &api.Container{Id: t.Tenant, Name: t.Tenant}
		u.Share = &api.Share{CoreLimit: uint32(t.Share.Limit), CoreRequest: uint32(t.Share.Request), Weight: uint32(t.Share.Weight), Gang: strings.TrimPrefix(t.Tenant, tenants.GangTenant)}
		return u
	}
	u.Container, u.Uid = d.TenantOf(t.Tenant)
	return u
}

func who(c *api.Client) string { return fmt.Sprintf("%s (pid %d)", api.Who(c), c.Pid) }

var apiStates = map[sched.State]api.ClientState{
	sched.StateIdle:     api.ClientState_CLIENT_STATE_IDLE,
	sched.StateWaiting:  api.ClientState_CLIENT_STATE_WAITING,
	sched.StateHolding:  api.ClientState_CLIENT_STATE_HOLDING,
	sched.StateDraining: api.ClientState_CLIENT_STATE_DRAINING,
	sched.StateLost:     api.ClientState_CLIENT_STATE_LOST,
	sched.StateFenced:   api.ClientState_CLIENT_STATE_FENCED,
}

func (d *Daemon) clientStatus(g *node.GPU, cs sched.ClientSnapshot, t base.Time) *api.Client {
	c := &api.Client{
		Id:          uint64(cs.ID),
		State:       apiStates[cs.State],
		Epoch:       uint64(cs.Epoch),
		Connected:   cs.Connected,
		Grants:      cs.Grants,
		Preemptions: cs.Preemptions,
		HeldNs:      int64(cs.Held),
		WaitMaxNs:   int64(cs.LongestWait),
		Container:   &api.Container{},
		SliceNs:     int64(cs.Slice),
	}
	if p := &cs.Controls; p.Client != 0 {
		c.Controls = &api.Controls{
			Slices: p.Slices.String(), Channels: p.Channels.String(), Groups: uint32(p.Groups), Bare: uint32(p.Bare),
			Driver: p.Driver, Listed: p.Listed(),
		}
	}
	switch {
	case cs.Epoch != 0:
		c.SinceNs = int64(t.Sub(cs.Since))
	case cs.State == sched.StateWaiting:
		c.SinceNs = int64(t.Sub(cs.WaitingSince))
	}
	c.Held = d.watch.HowHeld(g, cs.ID)
	cl := d.Clients[cs.ID]
	if p := d.Held[cs.ID]; p != nil {
		c.Pid, c.Uid, c.Command, c.Container = uint32(p.PID), p.UID, strings.ToValidUTF8(p.Command, "?"), d.ContainerOf(p)
		c.ReservedBytes = g.Core.ReservedBy(p.Account, cs.ID).Total
	}
	if cl == nil {
		return c
	}
	c.Pid, c.Uid = uint32(cl.PID), cl.UID
	c.Command = strings.ToValidUTF8(cl.Command, "?")
	c.Container = d.ContainerOf(cl.Peer)
	c.ReservedBytes = g.Core.ReservedBy(cl.Account, cs.ID).Total
	c.Interposed, c.Bypassed = cl.Reg.Interposed, cl.Reg.Bypassed
	if cl.Page != nil {
		c.ShimVersion = node.ShimVersion(cl.Reg.ShimVersion)
	}
	if att := cl.Attached[g]; att != nil {
		c.Device = att.Ordinal
		c.Calls, c.Waits, c.WaitNs = att.Stats.Calls, att.Stats.Waits, int64(att.Stats.WaitNs)
		c.MemoryBytes, c.MemoryPeakBytes = att.Stats.MemBytes, att.Stats.MemPeak
	}
	if d.memory.MemoryOfClient(g, cl, c) {
		d.away.Describe(cl, c)
	}
	c.Moving = cs.Moving
	return c
}

func refusals(of []sched.WayRefusal) (all []*api.WayRefusal) {
	for _, r := range of {
		all = append(all, &api.WayRefusal{Way: r.Way, Code: r.Code(), Reason: r.Cause.String()})
	}
	return all
}

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
		Swap: g.Swap, NotSwapped: g.NotSwapped, Others: others,
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
	own      int               // so many of its problems, the first, tenants cannot cause
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
	o := &overview{accounts: make(map[uint64]string, len(d.Clients))}
	o.status, o.own = d.status()
	for id, cl := range d.Clients {
		o.accounts[uint64(id)] = cl.Account
	}
	made := loop.Now()
	o.until = made.Add(min(d.overviewPart*made.Sub(began), maxOverviewAge))
	d.latest = o
	return o
}
