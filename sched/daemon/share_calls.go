// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
)

// setShare answers the control call.
func (d *Daemon) setShare(req *api.SetShareRequest) (*api.SetShareResponse, error) {
	account, err := d.findTenant(req.Container, req.Uid)
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
	gpus := d.order
	if req.Gpu != "" {
		g := d.findGPU(req.Gpu)
		if g == nil {
			return nil, noSuchGPU(req.Gpu)
		}
		uuid, gpus = g.UUID, []*gpu{g}
	}
	resp := &api.SetShareResponse{}
	resp.Container, resp.Uid = d.tenantOf(account)
	old, known := d.shares.Tenants[account]
	terms.Gang = gangIn(resp.Container.Namespace, terms.Gang)
	to := old.with(uuid, terms, fields)
	to.Has = resp.Container.Gpus // it was described, if there are any: see restoreShares
	if !known && !to.isZero() && len(d.shares.Tenants) >= maxShares {
		return nil, status.Errorf(codes.ResourceExhausted, "set a share: %d tenants have one already; remove some", len(d.shares.Tenants))
	}
	who := api.Tenant(resp.Container, resp.Uid)
	if uuid == "" { // of GPUs that are found later, and the only check before the first
		if err := d.keepable("new GPUs", "", account, old, to, who); err != nil {
			return nil, err
		}
	}
	for _, g := range gpus {
		if err := d.keepable(fmt.Sprintf("GPU %d", g.Index), g.UUID, account, old, to, who); err != nil {
			return nil, err
		}
		if err := d.residentFits(g, account, old, to, who); err != nil {
			return nil, err
		}
	}
	if err := d.changeShares(account, to, false); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	if uuid == "" {
		resp.Changes = append(resp.Changes, shareChange(nil, account, old, to))
	}
	for _, g := range gpus {
		resp.Changes = append(resp.Changes, shareChange(g, account, old, to))
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
func (d *Daemon) residentFits(g *gpu, account string, old, to tenantShares, who string) error {
	is := keepOf(to.on(g.UUID))
	if is == keepOf(old.on(g.UUID)) {
		return nil
	}
	if err := g.core.KeepFits(account, is); err != nil {
		return notResident(g, who, err)
	}
	return nil
}
func notResident(g *gpu, who string, err error) error {
	return status.Errorf(codes.FailedPrecondition, "GPU %d: the memory of %s cannot be kept on it: %v", g.Index, who, err)
}
