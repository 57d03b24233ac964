// SPDX-License-Identifier: Apache-2.0

package away

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/residency"
)

// Suspend answers the control call.
func (aw *Away) Suspend(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	fits := func(g *node.GPU, account string) (uint64, bool, error) {
		bytes, why := g.Core.SuspendFits(account)
		return bytes, aw.Opts.Checkpoint != nil, why
	}
	return aw.move(req, "suspended", fits, func(account string, gpus []*node.GPU) {
		for _, g := range gpus {
			aw.Step(g, sched.Suspend{Tenant: account})
		}
	})
}

// Resume answers the control call.
func (aw *Away) Resume(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	fits := func(g *node.GPU, account string) (uint64, bool, error) {
		bytes, why := g.Core.ResumeFits(account)
		away := len(aw.awayOf(account, g)) > 0
		if errors.Is(why, residency.ErrNothingAway) && away {
			why = nil
		}
		return bytes, away, why
	}
	return aw.move(req, "resumed", fits, func(account string, gpus []*node.GPU) {
		// Processes that have left with their context are restored first.
		waits := 1
		goOn := func() {
			if waits--; waits > 0 {
				return
			}
			for _, g := range gpus {
				aw.Step(g, sched.ResumeTenant{Tenant: account})
			}
		}
		for _, cl := range aw.awayOf(account, nil) {
			waits++
			aw.Wake(cl, goOn)
		}
		goOn()
	})
}

// move has a tenant's memory leave all GPUs that it can leave, or come back to them. If
// there is no such GPU, it returns why. fits says how many bytes move, and whether
// contexts do.
func (aw *Away) move(req *api.SuspendRequest, done string, fits func(g *node.GPU, account string) (bytes uint64, contexts bool, why error), order func(account string, gpus []*node.GPU)) (*api.SuspendResponse, error) {
	account, err := aw.FindTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	if to := aw.Leaving[account]; to != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be %s: it is on its way to GPU %d", aw.NameOf(account), done, to.Index)
	}
	gpus := aw.Order
	if req.Gpu != "" {
		g := aw.FindGPU(req.Gpu)
		if g == nil {
			return nil, node.NoSuchGPU(req.Gpu)
		}
		gpus = []*node.GPU{g}
	}
	resp := &api.SuspendResponse{}
	resp.Container, resp.Uid = aw.TenantOf(account)
	who := api.Tenant(resp.Container, resp.Uid)
	var able []*node.GPU
	var none error
	aw.ObserveHost()
	for _, g := range gpus {
		bytes, contexts, why := fits(g, account)
		if why == nil {
			able = append(able, g)
			resp.Gpus = append(resp.Gpus, &api.Suspended{Uuid: g.UUID, Index: uint32(g.Index), Bytes: bytes, Context: contexts})
			continue
		}
		err := status.Errorf(codes.FailedPrecondition, "GPU %d: %s cannot be %s: %v", g.Index, who, done, why)
		if !errors.Is(why, residency.ErrNothingMoves) && !errors.Is(why, residency.ErrNothingAway) {
			return nil, err
		}
		if none == nil || aw.OnGPU(g, account) { // of the others there is nothing to say
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
