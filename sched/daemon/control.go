// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/moves"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/settings"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// controlService answers the control socket. Each call runs in the loop, so
// it sees and changes everything at one instant.
type controlService struct{ d *Daemon }

// maxAnswer keeps an answer of the control socket under the 4 MiB of a ttrpc message, with what
// is around it.
const maxAnswer = 3 << 20

func (d *Daemon) newControlServer() (*ttrpc.Server, error) {
	server, err := ttrpc.NewServer()
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	api.RegisterControlService(server, controlService{d})
	return server, nil
}

func (s controlService) Status(ctx context.Context, req *api.StatusRequest) (resp *api.StatusResponse, err error) {
	if err := s.d.Ask(ctx, func() { resp = s.d.overview().status }); err != nil || proto.Size(resp) <= maxAnswer {
		return resp, err
	}
	whole, err := proto.Marshal(resp)
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write(whole); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return &api.StatusResponse{Packed: packed.Bytes()}, nil
}

// change has the loop run f, which changes what the status says.
func (d *Daemon) change(ctx context.Context, f func()) error {
	return d.Ask(ctx, func() {
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
	by := settings.Author{UID: callerOf(ctx), Unix: time.Now().Unix()}
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
		err = s.d.moves.Migrate(req, func(m *moves.Move) {
			ended <- answer{m.Response(s.d.moves), m.Failure(s.d.moves)}
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
	case <-s.d.Ended():
		return nil, loop.ErrEnding
	}
}

func (s controlService) Suspend(ctx context.Context, req *api.SuspendRequest) (*api.SuspendResponse, error) {
	return inLoop(ctx, s.d, s.d.away.Suspend, req)
}

func (s controlService) Resume(ctx context.Context, req *api.SuspendRequest) (*api.SuspendResponse, error) {
	return inLoop(ctx, s.d, s.d.away.Resume, req)
}

func (s controlService) SetShare(ctx context.Context, req *api.SetShareRequest) (*api.SetShareResponse, error) {
	return inLoop(ctx, s.d, s.d.setShare, req)
}

func (s controlService) DescribeContainer(ctx context.Context, req *api.DescribeContainerRequest) (*api.DescribeContainerResponse, error) {
	if err := checkDescription(req); err != nil {
		return nil, err
	}
	resp, err := s.describe(ctx, req)
	if refusedByHook(req, err) {
		why := "refused: " + status.Convert(err).Message()
		_ = s.d.change(context.WithoutCancel(ctx), func() { s.d.noteWarnings(req.Container, []string{why}) })
	}
	return resp, err
}

// refusedByHook says whether an engine was told by its OCI hook that the container may not start: an
// engine may keep the reason for itself, as crun does.
func refusedByHook(req *api.DescribeContainerRequest, err error) bool {
	asked := req.Container.Terms()
	asked.Migratable = asked.Migratable && !req.Choose
	refused := status.Code(err) == codes.Aborted || err != nil && asked != (api.Terms{})
	return refused && req.Pid != 0 && req.Container.Engine != node.RunEngine
}

func (s controlService) describe(ctx context.Context, req *api.DescribeContainerRequest) (resp *api.DescribeContainerResponse, err error) {
	var first *peer.Peer
	if req.Pid != 0 {
		if first, err = s.d.tenants.FirstProcess(req.Container, req.Pid); err != nil {
			return nil, err
		}
	}
	describe := func(req *api.DescribeContainerRequest) (*api.DescribeContainerResponse, error) {
		if err := ctx.Err(); err != nil { // nobody learns the answer
			return nil, err
		}
		return s.d.describe(req, first)
	}
	if resp, err = inLoop(ctx, s.d, describe, req); err != nil {
		if first != nil {
			first.Close()
		}
		return nil, err
	}
	if req.Container.Engine == node.RunEngine {
		err = s.joinOverlap(ctx, req.Container.Id)
	}
	return resp, err
}

// checkDescription says what cannot be the description of a container.
func checkDescription(req *api.DescribeContainerRequest) error {
	c := req.GetContainer()
	if c.GetId() == "" {
		return status.Error(codes.InvalidArgument, "describe a container: the id is empty")
	}
	for _, name := range slices.Concat([]string{c.Id, c.Name, c.Namespace, c.Pod, c.PodUid, c.Engine}, c.Gpus, c.Reach, req.Warnings) {
		if len(name) > maxName {
			return status.Errorf(codes.InvalidArgument, "describe container %.64s: a name has %d bytes, %d are possible", c.Id, len(name), maxName)
		}
	}
	if n := max(len(c.Gpus), len(c.Reach)); n > maxGPUs {
		return status.Errorf(codes.InvalidArgument, "describe container %s: %d GPUs, %d are possible", c.Id, n, maxGPUs)
	}
	if err := errors.Join(c.Terms().Validate(), c.Terms().Consistent()); err != nil {
		return status.Errorf(codes.InvalidArgument, "describe container %s: %v", c.Id, err)
	}
	if n := len(req.Warnings); n > maxWarnings {
		return status.Errorf(codes.InvalidArgument, "describe container %s: %d warnings, %d are possible", c.Id, n, maxWarnings)
	}
	if req.Pid != 0 && c.Engine == "" {
		return status.Errorf(codes.InvalidArgument, "describe container %s: who names the first process names the engine too", c.Id)
	}
	return nil
}

// describe takes in a description: of the plugin, or of an OCI hook, which names the first process.
// Without an error the daemon owns that Peer.
func (d *Daemon) describe(req *api.DescribeContainerRequest, first *peer.Peer) (resp *api.DescribeContainerResponse, err error) {
	c := proto.Clone(req.Container).(*api.Container)
	if d.Names[c.Id] == nil && len(d.Names) >= maxContainers {
		return nil, status.Errorf(codes.ResourceExhausted, "describe container %s: %d are described already; forget some", c.Id, len(d.Names))
	}
	if first == nil {
		refused := d.bound(c)
		resp = d.tenants.Describe(c, req.Keep)
		d.noteWarnings(c, req.Warnings)
		return resp, refused // the rest is in force
	}
	if c.Engine == node.RunEngine || c.GetShare().GetOverlap() == "" {
		c.Uid = first.UID
	} // else the process has not become the container's user yet
	if err := d.bound(c); err != nil { // the container is yet to start
		return nil, err
	}
	if req.Choose {
		d.moves.ChooseGPU(c)
	}
	if resp, err = d.tenants.DescribeFromHook(c, first); err == nil {
		d.noteWarnings(c, req.Warnings)
	}
	return resp, err
}

// bound leaves a container the terms that it may have, and says what was refused; nil: nothing.
func (d *Daemon) bound(c *api.Container) error {
	bounded, refused := d.own.Rules.Bound(c.Namespace, c.Terms())
	if why := d.cannotOverlap(c); why != nil {
		bounded.Overlap, refused = "", errors.Join(refused, why)
	}
	if refused == nil {
		return nil
	}
	c.SetTerms(bounded)
	return status.Errorf(codes.InvalidArgument, "%s: %v", tenants.Whose(c), refused)
}

func (s controlService) ForgetContainer(ctx context.Context, req *api.ForgetContainerRequest) (*api.ForgetContainerResponse, error) {
	return &api.ForgetContainerResponse{}, s.d.change(ctx, func() {
		s.d.tenants.Forget(req.GetId())
	})
}

func (s controlService) ReportPlugin(ctx context.Context, req *api.ReportPluginRequest) (*api.ReportPluginResponse, error) {
	if n := len(req.Problems); n > maxReported {
		return nil, status.Errorf(codes.InvalidArgument, "report of the plugin: %d problems, %d are possible", n, maxReported)
	}
	return &api.ReportPluginResponse{}, s.d.change(ctx, func() {
		s.d.plugin, s.d.pluginAt = req.Problems, loop.Now()
	})
}

// checkCheckpoint finds out once whether processes can leave with their contexts.
func (d *Daemon) checkCheckpoint(ctx context.Context) {
	if d.Opts.Checkpoint == nil || d.own.CheckpointCheck == nil || d.Opts.SwapMemory == 0 {
		return
	}
	d.Go(func() {
		if err := d.own.CheckpointCheck(ctx); err != nil && ctx.Err() == nil {
			d.Do(func() { d.checkpointErr = err })
		}
	})
}

// checkpointProblem is what the status says; "": none.
func (d *Daemon) checkpointProblem() string {
	switch {
	case d.Opts.SwapMemory == 0:
		return ""
	case d.Opts.Checkpoint == nil:
		return checkpoint.ErrNone.Error()
	case d.checkpointErr != nil:
		return d.checkpointErr.Error()
	}
	return ""
}

// setShare answers the control call.
func (d *Daemon) setShare(req *api.SetShareRequest) (*api.SetShareResponse, error) {
	account, err := d.tenants.FindTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	// The fields are checked one by one here, and with the terms in force beside
	// them for each GPU below.
	terms, fields := req.Terms()
	if err := terms.Validate(); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "set a share: %v", err)
	}
	if fields&api.FixedFields != 0 {
		return nil, status.Error(codes.InvalidArgument, "set a share: an overlap group, and whether it is migratable, is fixed when a container starts: say it in the annotation, or with nvsharectl run")
	}
	uuid, gpus, err := d.NamedGPUs(req.Gpu)
	if err != nil {
		return nil, err
	}
	resp := &api.SetShareResponse{}
	resp.Container, resp.Uid = d.TenantOf(account)
	old, known := d.tenants.Shares.Tenants[account]
	terms.Gang = tenants.GangIn(resp.Container.Namespace, terms.Gang)
	to := old.With(uuid, terms, fields)
	to.Has = resp.Container.Gpus // it was described, if there are any: see tenants.RestoreShares
	if !known && !to.IsZero() && len(d.tenants.Shares.Tenants) >= maxShares {
		return nil, status.Errorf(codes.ResourceExhausted, "set a share: %d tenants have one already; remove some", len(d.tenants.Shares.Tenants))
	}
	who := api.Tenant(resp.Container, resp.Uid)
	if uuid == "" { // of GPUs that are found later, and the only check before the first
		if err := d.tenants.Keepable("new GPUs", "", account, old, to, who); err != nil {
			return nil, err
		}
	}
	for _, g := range gpus {
		if err := d.tenants.Keepable(fmt.Sprintf("GPU %d", g.Index), g.UUID, account, old, to, who); err != nil {
			return nil, err
		}
		if err := d.residentFits(g, account, old, to, who); err != nil {
			return nil, err
		}
	}
	if err := d.tenants.ChangeShares(account, to, false); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	if uuid == "" {
		resp.Changes = append(resp.Changes, tenants.ShareChange(nil, account, old, to))
	}
	for _, g := range gpus {
		resp.Changes = append(resp.Changes, tenants.ShareChange(g, account, old, to))
	}
	return resp, nil
}

// residentFits says why a tenant's memory cannot be kept on a GPU.
func (d *Daemon) residentFits(g *node.GPU, account string, old, to tenants.TenantShares, who string) error {
	is := memory.KeepOf(to.On(g.UUID))
	if is == memory.KeepOf(old.On(g.UUID)) {
		return nil
	}
	if err := g.Core.KeepFits(account, is); err != nil {
		return status.Errorf(codes.FailedPrecondition, "GPU %d: the memory of %s cannot be kept on it: %v", g.Index, who, err)
	}
	return nil
}
