// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
)

// suspend answers the control call: on all GPUs that can do it, or with why none can.
func (d *Daemon) suspend(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	account, err := d.findTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	gpus := d.order
	if req.Gpu != "" {
		g := d.findGPU(req.Gpu)
		if g == nil {
			return nil, noSuchGPU(req.Gpu)
		}
		gpus = []*gpu{g}
	}
	resp := &api.SuspendResponse{}
	resp.Container, resp.Uid = d.tenantOf(account)
	who := api.Tenant(resp.Container, resp.Uid)
	var leaves []*gpu
	var none error
	d.observeHost()
	for _, g := range gpus {
		switch bytes, why := g.core.SuspendFits(account); {
		case errors.Is(why, sched.ErrNothingMoves):
			none = status.Errorf(codes.FailedPrecondition, "GPU %d: %s cannot be suspended: %v", g.Index, who, why)
		case why != nil:
			return nil, status.Errorf(codes.FailedPrecondition, "GPU %d: %s cannot be suspended: %v", g.Index, who, why)
		default:
			leaves = append(leaves, g)
			resp.Gpus = append(resp.Gpus, &api.Suspended{Uuid: g.UUID, Index: uint32(g.Index), Bytes: bytes})
		}
	}
	if len(gpus) == 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be suspended: the scheduler knows no GPU yet (see nvsharectl status)", who)
	}
	if len(leaves) == 0 {
		return nil, none
	}
	for _, g := range leaves {
		d.step(g, sched.Suspend{Tenant: account})
	}
	return resp, nil
}
