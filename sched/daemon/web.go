// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/web"
)

// servePage answers until ctx is done.
func (d *Daemon) servePage(ctx context.Context, page *web.Page) {
	d.Log.Infof("page: http://%s/", page.Addr())
	if err := page.Serve(ctx); err != nil && ctx.Err() == nil {
		d.Log.WithError(err).Error("page: no longer served")
	}
}

// pageSource answers the page from the loop.
type pageSource struct{ d *Daemon }

func (s pageSource) Status(ctx context.Context) (r *api.StatusResponse, err error) {
	err = s.d.Ask(ctx, func() { r = s.d.overview().status })
	return r, err
}

func (s pageSource) Events(ctx context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	return controlService{d: s.d}.Events(ctx, req)
}
