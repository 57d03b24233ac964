// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// controlService answers the control socket. Each call runs in the loop, so
// it sees and changes everything at one instant.
type controlService struct {
	d      *Daemon
	pieces *pieces
}

func (d *Daemon) newControlServer() (*ttrpc.Server, error) {
	server, err := ttrpc.NewServer()
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	api.RegisterControlService(server, controlService{d, &pieces{}})
	return server, nil
}

func (s controlService) Status(ctx context.Context, req *api.StatusRequest) (resp *api.StatusResponse, err error) {
	if req.PiecesId != 0 {
		return &api.StatusResponse{Piece: s.pieces.at(req.PiecesId, req.Offset)}, nil
	}
	if err := s.d.ask(ctx, func() { resp = s.d.overview().status }); err != nil || proto.Size(resp) <= maxAnswer {
		return resp, err
	}
	whole, err := proto.Marshal(resp)
	if err != nil {
		return nil, err
	}
	return &api.StatusResponse{
		Version: resp.Version, Piece: s.pieces.keep(whole),
		Problems: []string{"the status is too large for this nvsharectl: use the one that came with the scheduler"},
	}, nil
}

// change has the loop run f, which changes what the status says.
func (d *Daemon) change(ctx context.Context, f func()) error {
	return d.ask(ctx, func() {
		f()
		d.latest = nil
	})
}

// inLoop has the loop answer a call that changes something.
func inLoop[Request, Response any](ctx context.Context, d *Daemon, answer func(Request) (Response, error), req Request) (resp Response, err error) {
	askErr := d.change(ctx, func() { resp, err = answer(req) })
	return resp, cmp.Or(askErr, err)
}

func (s controlService) Set(ctx context.Context, req *api.SetRequest) (*api.SetResponse, error) {
	by := author{UID: callerOf(ctx), Unix: time.Now().Unix()}
	return inLoop(ctx, s.d, func(req *api.SetRequest) (*api.SetResponse, error) { return s.d.set(req, by) }, req)
}

func (s controlService) Drain(ctx context.Context, req *api.DrainRequest) (*api.DrainResponse, error) {
	return inLoop(ctx, s.d, s.d.drain, req)
}

func (s controlService) Migrate(ctx context.Context, req *api.MigrateRequest) (*api.MigrateResponse, error) {
	type answer struct {
		resp *api.MigrateResponse
		err  error
	}
	ended := make(chan answer, 1)
	var err error
	if askErr := s.d.change(ctx, func() {
		err = s.d.migrate(req, func(m *migration) {
			ended <- answer{m.response(s.d), m.failure(s.d)}
			s.d.latest = nil
		})
	}); askErr != nil || err != nil {
		return nil, cmp.Or(askErr, err)
	}
	select {
	case a := <-ended:
		return a.resp, a.err
	case <-ctx.Done(): // the tenant goes on
		return nil, ctx.Err()
	case <-s.d.ended:
		return nil, errors.New("the scheduler is ending")
	}
}

func (s controlService) SetMemoryLimit(ctx context.Context, req *api.SetMemoryLimitRequest) (*api.SetMemoryLimitResponse, error) {
	return inLoop(ctx, s.d, s.d.setMemoryLimit, req)
}

func (s controlService) Suspend(ctx context.Context, req *api.SuspendRequest) (*api.SuspendResponse, error) {
	return inLoop(ctx, s.d, s.d.suspend, req)
}

func (s controlService) Resume(ctx context.Context, req *api.SuspendRequest) (*api.SuspendResponse, error) {
	return inLoop(ctx, s.d, s.d.resume, req)
}

func (s controlService) SetShare(ctx context.Context, req *api.SetShareRequest) (*api.SetShareResponse, error) {
	return inLoop(ctx, s.d, s.d.setShare, req)
}

func (s controlService) DescribeContainer(ctx context.Context, req *api.DescribeContainerRequest) (resp *api.DescribeContainerResponse, err error) {
	c := req.GetContainer()
	if c.GetId() == "" {
		return nil, status.Error(codes.InvalidArgument, "describe a container: the id is empty")
	}
	for _, name := range slices.Concat([]string{c.Id, c.Name, c.Namespace, c.Pod, c.PodUid, c.Engine}, c.Gpus, c.Reach, req.Warnings) {
		if len(name) > maxName {
			return nil, status.Errorf(codes.InvalidArgument, "describe container %.64s: a name has %d bytes, %d are possible", c.Id, len(name), maxName)
		}
	}
	if n := max(len(c.Gpus), len(c.Reach)); n > maxGPUs {
		return nil, status.Errorf(codes.InvalidArgument, "describe container %s: %d GPUs, %d are possible", c.Id, n, maxGPUs)
	}
	if err := errors.Join(c.Terms().Validate(), c.Terms().Consistent()); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "describe container %s: %v", c.Id, err)
	}
	if n := len(req.Warnings); n > maxWarnings {
		return nil, status.Errorf(codes.InvalidArgument, "describe container %s: %d warnings, %d are possible", c.Id, n, maxWarnings)
	}
	if (req.Pid == 0) != (c.Engine == "") {
		return nil, status.Errorf(codes.InvalidArgument, "describe container %s: an OCI hook names both its engine and the first process", c.Id)
	}
	var first *peer.Peer
	keep := false
	if req.Pid != 0 {
		if first, err = s.d.firstProcess(c, req.Pid); err != nil {
			return nil, err
		}
		defer func() {
			if !keep {
				first.Close()
			}
		}()
	}
	if askErr := s.d.change(ctx, func() {
		if err = ctx.Err(); err != nil { // nobody learns the answer
			return
		}
		if s.d.names[c.Id] == nil && len(s.d.names) >= maxContainers {
			err = status.Errorf(codes.ResourceExhausted, "describe container %s: %d are described already; forget some", c.Id, len(s.d.names))
			return
		}
		c := proto.Clone(c).(*api.Container)
		if first != nil {
			if c.Engine == runEngine || c.GetShare().GetOverlap() == "" {
				c.Uid = first.UID
			} // else the process has not become the container's user yet
		}
		bounded, refused := s.d.opts.Rules.bound(c.Namespace, c.Terms())
		if why := s.d.cannotOverlap(c); why != nil {
			bounded.Overlap, refused = "", errors.Join(refused, why)
		}
		if refused != nil {
			refused = status.Errorf(codes.InvalidArgument, "%s: %v", whose(c), refused)
		}
		if first != nil && refused != nil { // the container is yet to start
			err = refused
			return
		}
		if refused != nil {
			c.SetTerms(bounded)
		}
		defer func() { err = cmp.Or(err, refused) }() // the rest is in force
		if first != nil && req.Choose {
			s.d.chooseGPU(c)
		}
		if first == nil {
			resp = s.d.describe(c, req.Keep)
		} else if resp, err = s.d.describeFromHook(c, first); err != nil {
			return
		}
		keep = true
		s.d.noteWarnings(c, req.Warnings)
	}); askErr != nil {
		return nil, askErr
	}
	if err == nil && req.Container.Engine == runEngine {
		err = s.joinOverlap(ctx, req.Container.Id)
	}
	return resp, err
}

func (s controlService) ForgetContainer(ctx context.Context, req *api.ForgetContainerRequest) (*api.ForgetContainerResponse, error) {
	return &api.ForgetContainerResponse{}, s.d.change(ctx, func() {
		s.d.forget(req.GetId())
	})
}

func (s controlService) ReportPlugin(ctx context.Context, req *api.ReportPluginRequest) (*api.ReportPluginResponse, error) {
	if n := len(req.Problems); n > maxReported {
		return nil, status.Errorf(codes.InvalidArgument, "report of the plugin: %d problems, %d are possible", n, maxReported)
	}
	return &api.ReportPluginResponse{}, s.d.change(ctx, func() {
		s.d.plugin, s.d.pluginAt = req.Problems, now()
	})
}

func noSuchGPU(name string) error {
	return status.Errorf(codes.NotFound, "GPU %.64q: no such UUID or index (nvsharectl status lists them)", name)
}

func (d *Daemon) findGPU(name string) *gpu {
	for _, g := range d.order {
		if strings.EqualFold(g.UUID, name) || strconv.Itoa(g.Index) == name {
			return g
		}
	}
	return nil
}

var schedModes = map[api.Mode]sched.Mode{
	api.Mode_MODE_EXCLUSIVE:  sched.Exclusive,
	api.Mode_MODE_CONCURRENT: sched.Concurrent,
	api.Mode_MODE_AUTO:       sched.Auto,
}

func apiMode(m sched.Mode) api.Mode {
	for a, s := range schedModes {
		if s == m {
			return a
		}
	}
	return api.Mode_MODE_UNSPECIFIED
}

// status describes everything. It is O(clients).
func (d *Daemon) status() *api.StatusResponse {
	r := &api.StatusResponse{
		Version:  d.opts.Version,
		UptimeNs: int64(time.Since(d.started)),

		CheckpointProblem: d.checkpointProblem(),
		Warden:            d.wardenProblem() == "",
		WardenProblem:     d.wardenProblem(),
		Clients:           uint32(len(d.clients)),
		Connections:       uint32(len(d.conns)),
		ProtocolErrors:    d.malformed,
	}
	for _, p := range d.ownProblems() {
		report(r, p.code, p.text)
	}
	report(r, api.ProblemCode_PROBLEM_CODE_OVERLAP, d.overlapProblems()...)
	var crowded string
	if r.Refused, crowded = d.desk.Refused(time.Now()); crowded != "" {
		report(r, api.ProblemCode_PROBLEM_CODE_CONNECTIONS, crowded)
	}
	r.Refused += d.refused
	t := now()
	for _, g := range d.order {
		s := g.core.Snapshot(t)
		out := &api.GPU{
			Index: uint32(g.Index), Uuid: g.UUID, Name: strings.ToValidUTF8(g.Name, "?"), Mig: g.MIG, MemoryBytes: g.MemoryBytes, Model: g.Model,
			Mode: apiMode(g.mode), QuantumNs: int64(s.Quantum), GraceNs: int64(s.Grace),
			Epoch:  uint64(s.Epoch),
			Grants: s.Counters.Grants, Revokes: s.Counters.Revokes, Fences: s.Counters.Fences, Preemptions: s.Counters.Preemptions,
			Reclaims: s.Counters.Reclaims, StaleReleases: s.Counters.StaleReleases,
			EffectiveMode: apiMode(s.Effective), Way: s.Way, WayCode: s.Cause.Code(), WayReason: s.Cause.String(), Refused: refusals(s.Refused),
			Drained: g.drained, Fault: g.fault, Held: d.held(g), Migrations: g.arrived, Hint: d.overlapHint(s.Space),
		}
		g.turns.Fill(out)
		d.reportDrain(r, g)
		for i := range s.Tenants {
			use := d.tenantUse(g, &s.Tenants[i])
			out.Tenants = append(out.Tenants, use)
			if had := &s.Tenants[i]; had.Slow >= slowDrain && t.Sub(had.SlowAt) < d.slowLately {
				report(r, api.ProblemCode_PROBLEM_CODE_SLOW_RELEASE, fmt.Sprintf("GPU %d: %s took %v too long to release the GPU the last time it was asked to; it has %v the next time",
					g.Index, api.Tenant(use.Container, use.Uid), had.Slow.Round(10*time.Millisecond), had.Grace.Round(10*time.Millisecond)))
			}
		}
		if g.demoted {
			out.WayCode, out.WayReason, out.Refused = "fenced", "a fenced client still uses the GPU (--fence-action demote)", nil
		}
		for _, cs := range s.Clients {
			c := d.clientStatus(g, cs, t)
			out.Clients = append(out.Clients, c)
			reportClient(r, out.Index, c)
		}
		var over []string
		out.Memory, over = d.memoryStatus(g)
		var promised []string
		out.Promises, promised = d.promiseStatus(g)
		report(r, api.ProblemCode_PROBLEM_CODE_OVERPROMISED, promised...)
		report(r, api.ProblemCode_PROBLEM_CODE_MEMORY_LIMIT, over...)
		strangers, seen := d.strangersStatus(g)
		r.Unmanaged = append(r.Unmanaged, strangers...)
		report(r, api.ProblemCode_PROBLEM_CODE_UNMANAGED, seen...)
		report(r, api.ProblemCode_PROBLEM_CODE_OUTSIDE, d.outsideProblems(g)...)
		var stuck []string
		out.Swap, stuck = d.swapStatus(g)
		report(r, api.ProblemCode_PROBLEM_CODE_SWAP, stuck...)
		r.Gpus = append(r.Gpus, out)
	}
	report(r, api.ProblemCode_PROBLEM_CODE_UNKNOWN_GPU, d.unknownProblems()...)
	for _, c := range d.names {
		r.Containers = append(r.Containers, c)
	}
	slices.SortFunc(r.Containers, func(a, b *api.Container) int { return cmp.Compare(a.Id, b.Id) })
	r.Settings = d.allSettings()
	r.Config = d.config()
	return r
}

func (d *Daemon) tenantUse(g *gpu, t *sched.TenantSnapshot) *api.TenantUse {
	u := &api.TenantUse{
		Share:   d.shares.Tenants[t.Tenant].on(g.UUID).Share(),
		Clients: uint32(t.Clients), PromisedPermille: uint32(t.Promised), GotPermille: uint32(t.Got),
		MovedNs: int64(t.Moved),
		UsedNs:  int64(t.Used), DebtNs: int64(t.Debt), ThrottledNs: int64(t.Throttled),
		Grants: t.Grants, WaitMaxNs: int64(t.LongestWait),
		WaitedPermille: uint32(t.Waited), WaitMaxLatelyNs: int64(t.RecentWait), OutOfMemory: d.outOfMemory[t.Tenant][g],
		Waits: metrics.Spread(&t.Waits),
	}
	if group, ok := strings.CutPrefix(t.Tenant, overlapTenant); ok {
		u.Container = &api.Container{Id: t.Tenant, Name: t.Tenant}
		u.Share = &api.Share{CoreRequest: uint32(t.Share.Request), Weight: uint32(t.Share.Weight), Overlap: group}
		return u
	}
	if strings.HasPrefix(t.Tenant, gangTenant) {
		u.Container = &api.Container{Id: t.Tenant, Name: t.Tenant}
		u.Share = &api.Share{CoreLimit: uint32(t.Share.Limit), CoreRequest: uint32(t.Share.Request), Weight: uint32(t.Share.Weight), Gang: strings.TrimPrefix(t.Tenant, gangTenant)}
		return u
	}
	u.Container, u.Uid = d.tenantOf(t.Tenant)
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

func (d *Daemon) clientStatus(g *gpu, cs sched.ClientSnapshot, t sched.Time) *api.Client {
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
	cl := d.clients[cs.ID]
	if cl == nil {
		return c
	}
	c.Pid, c.Uid = uint32(cl.PID), cl.UID
	c.Command = strings.ToValidUTF8(cl.Command, "?")
	c.Container = d.containerOf(cl.Peer)
	c.ReservedBytes = g.core.ReservedBy(cl.Account, cs.ID).Total
	c.Interposed, c.Bypassed = cl.reg.Interposed, cl.reg.Bypassed
	if cl.page != nil {
		c.ShimVersion = shimVersion(cl.reg.ShimVersion)
	}
	if att := cl.attached[g]; att != nil {
		c.Device = att.ordinal
		c.Calls, c.Waits, c.WaitNs = att.stats.Calls, att.stats.Waits, int64(att.stats.WaitNs)
		c.MemoryBytes, c.MemoryPeakBytes = att.stats.MemBytes, att.stats.MemPeak
	}
	d.memoryOfClient(g, cl, c)
	c.Moving = cs.Moving
	return c
}

func refusals(of []sched.WayRefusal) (all []*api.WayRefusal) {
	for _, r := range of {
		all = append(all, &api.WayRefusal{Way: r.Way, Code: r.Code(), Reason: r.Cause.String()})
	}
	return all
}
