// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

// askAll asks the control socket, which knows all tenants.
func askAll(ctx context.Context, runDir string) (r *api.StatusResponse, err error) {
	err = call(ctx, runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Status(ctx, &api.StatusRequest{})
		return err
	})
	return r, err
}

// askStatus is askAll. Users who may not use the control socket, and containers, which do
// not have it, get the answer of the status socket: their own tenant, and numbers.
func askStatus(ctx context.Context, runDir string) (*api.StatusResponse, error) {
	r, err := askAll(ctx, runDir)
	if !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, viewErr := api.AskView(ctx, runDir)
	if errors.Is(viewErr, fs.ErrNotExist) { // no scheduler, or an older one
		return nil, err
	}
	return r, viewErr
}

// viewOf says for whom an answer of the status socket is; "": it is of the control socket.
func viewOf(r *api.StatusResponse) string {
	v := r.View
	if v == nil {
		return ""
	}
	all := "root sees all (sudo nvsharectl)"
	if v.Container.GetId() != "" {
		all = "root of the host sees all"
	}
	text := "only " + api.Tenant(v.Container, v.Uid) + " is named here; " + all
	if v.Problems > 0 {
		text = numbered(int(v.Problems), "problem", "problems") + " that only root may read; " + text
	}
	return text
}

// othersOf says what the tenants of a GPU have that an answer does not name; "": the
// answer names all, or there are none.
func othersOf(g *api.GPU) string {
	o := g.Others
	if o == nil || o.Tenants+o.Clients == 0 && o.MemoryBytes == 0 {
		return ""
	}
	parts := []string{fmt.Sprintf("others: %s with %s, %d holding, %d waiting", numbered(int(o.Tenants), "tenant", "tenants"), numbered(int(o.Clients), "process", "processes"), o.Holding, o.Waiting),
		strings.TrimSuffix(fmt.Sprintf("%.1f", float64(o.GotPermille)/10), ".0") + "% of the time", size(o.MemoryBytes) + " reserved"}
	if o.CoreRequest > 0 {
		parts = append(parts, fmt.Sprintf("%d%% promised", o.CoreRequest))
	}
	return strings.Join(parts, ", ")
}
