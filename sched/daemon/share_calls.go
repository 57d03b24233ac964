// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

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
	uuid := ""
	gpus := d.Order
	if req.Gpu != "" {
		g := d.FindGPU(req.Gpu)
		if g == nil {
			return nil, node.NoSuchGPU(req.Gpu)
		}
		uuid, gpus = g.UUID, []*node.GPU{g}
	}
	resp := &api.SetShareResponse{}
	resp.Container, resp.Uid = d.TenantOf(account)
	old, known := d.tenants.Shares.Tenants[account]
	terms.Gang = tenants.GangIn(resp.Container.Namespace, terms.Gang)
	to := old.With(uuid, terms, fields)
	to.Has = resp.Container.Gpus // it was described, if there are any: see restoreShares
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

// residentFits says why a tenant's memory cannot be kept on a GPU.
func (d *Daemon) residentFits(g *node.GPU, account string, old, to tenants.TenantShares, who string) error {
	is := memory.KeepOf(to.On(g.UUID))
	if is == memory.KeepOf(old.On(g.UUID)) {
		return nil
	}
	if err := g.Core.KeepFits(account, is); err != nil {
		return notResident(g, who, err)
	}
	return nil
}
func notResident(g *node.GPU, who string, err error) error {
	return status.Errorf(codes.FailedPrecondition, "GPU %d: the memory of %s cannot be kept on it: %v", g.Index, who, err)
}
