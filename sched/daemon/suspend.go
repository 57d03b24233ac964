// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
)

// suspend answers the control call.
func (d *Daemon) suspend(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	return d.move(req, "suspended", (*sched.GPU).SuspendFits, func(account string) sched.Event { return sched.Suspend{Tenant: account} })
}

// resume answers the control call.
func (d *Daemon) resume(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	return d.move(req, "resumed", (*sched.GPU).ResumeFits, func(account string) sched.Event { return sched.ResumeTenant{Tenant: account} })
}

// move has a tenant's memory leave all GPUs that it can leave, or come back to them. If
// there is no such GPU, it returns why.
func (d *Daemon) move(req *api.SuspendRequest, done string, fits func(*sched.GPU, string) (uint64, error), order func(account string) sched.Event) (*api.SuspendResponse, error) {
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
	var able []*gpu
	var none error
	d.observeHost()
	for _, g := range gpus {
		bytes, why := fits(g.core, account)
		if why == nil {
			able = append(able, g)
			resp.Gpus = append(resp.Gpus, &api.Suspended{Uuid: g.UUID, Index: uint32(g.Index), Bytes: bytes})
			continue
		}
		none = status.Errorf(codes.FailedPrecondition, "GPU %d: %s cannot be %s: %v", g.Index, who, done, why)
		if !errors.Is(why, sched.ErrNothingMoves) && !errors.Is(why, sched.ErrNothingAway) {
			return nil, none
		}
	}
	if len(gpus) == 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be %s: the scheduler knows no GPU yet (see nvsharectl status)", who, done)
	}
	if len(able) == 0 {
		return nil, none
	}
	for _, g := range able {
		d.step(g, order(account))
	}
	return resp, nil
}
