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
func (aw *away) suspend(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	fits := func(g *gpu, account string) (uint64, bool, error) {
		bytes, why := g.core.SuspendFits(account)
		return bytes, aw.opts.Checkpoint != nil, why
	}
	return aw.move(req, "suspended", fits, func(account string, gpus []*gpu) {
		for _, g := range gpus {
			aw.step(g, sched.Suspend{Tenant: account})
		}
	})
}

// resume answers the control call.
func (aw *away) resume(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	fits := func(g *gpu, account string) (uint64, bool, error) {
		bytes, why := g.core.ResumeFits(account)
		away := len(aw.awayOf(account, g)) > 0
		if errors.Is(why, sched.ErrNothingAway) && away {
			why = nil
		}
		return bytes, away, why
	}
	return aw.move(req, "resumed", fits, func(account string, gpus []*gpu) {
		// Processes that have left with their context are restored first.
		waits := 1
		goOn := func() {
			if waits--; waits > 0 {
				return
			}
			for _, g := range gpus {
				aw.step(g, sched.ResumeTenant{Tenant: account})
			}
		}
		for _, cl := range aw.awayOf(account, nil) {
			waits++
			aw.wake(cl, goOn)
		}
		goOn()
	})
}

// move has a tenant's memory leave all GPUs that it can leave, or come back to them. If
// there is no such GPU, it returns why. fits says how many bytes move, and whether
// contexts do.
func (aw *away) move(req *api.SuspendRequest, done string, fits func(g *gpu, account string) (bytes uint64, contexts bool, why error), order func(account string, gpus []*gpu)) (*api.SuspendResponse, error) {
	account, err := aw.findTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	if to := aw.leaving[account]; to != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be %s: it is on its way to GPU %d", aw.nameOf(account), done, to.Index)
	}
	gpus := aw.order
	if req.Gpu != "" {
		g := aw.findGPU(req.Gpu)
		if g == nil {
			return nil, noSuchGPU(req.Gpu)
		}
		gpus = []*gpu{g}
	}
	resp := &api.SuspendResponse{}
	resp.Container, resp.Uid = aw.tenantOf(account)
	who := api.Tenant(resp.Container, resp.Uid)
	var able []*gpu
	var none error
	aw.observeHost()
	for _, g := range gpus {
		bytes, contexts, why := fits(g, account)
		if why == nil {
			able = append(able, g)
			resp.Gpus = append(resp.Gpus, &api.Suspended{Uuid: g.UUID, Index: uint32(g.Index), Bytes: bytes, Context: contexts})
			continue
		}
		err := status.Errorf(codes.FailedPrecondition, "GPU %d: %s cannot be %s: %v", g.Index, who, done, why)
		if !errors.Is(why, sched.ErrNothingMoves) && !errors.Is(why, sched.ErrNothingAway) {
			return nil, err
		}
		if none == nil || aw.onGPU(g, account) { // of the others there is nothing to say
			none = err
		}
	}
	if len(gpus) == 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be %s: the scheduler knows no GPU yet (see nvsharectl status)", who, done)
	}
	if len(able) == 0 {
		return nil, none
	}
	order(account, able)
	return resp, nil
}
