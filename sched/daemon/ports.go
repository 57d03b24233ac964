// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/web"
)

// portPause is the time between two attempts to open a port that another process has.
const portPause = time.Second

// openPorts opens the ports of metrics and of the page, if they were configured. Whoever has
// one of them, perhaps to annoy, does not keep the scheduler from starting: that is a problem
// that status shows, until the port can be opened.
func (d *Daemon) openPorts() (err error) {
	if d.own.MetricsAddr != "" {
		if d.metrics, err = d.listenMetrics(); errors.Is(err, unix.EADDRINUSE) {
			d.metricsErr, err = err, nil
		}
	}
	if err == nil && d.own.WebAddr != "" {
		if d.page, err = d.listenPage(); errors.Is(err, unix.EADDRINUSE) {
			d.pageErr, err = err, nil
		}
	}
	for _, busy := range []error{d.metricsErr, d.pageErr} {
		if err == nil && busy != nil {
			d.Log.Errorf("%v; trying again until the port is free", busy)
		}
	}
	return err
}

// closePorts closes what is open and not served yet.
func (d *Daemon) closePorts() {
	if d.metrics != nil {
		d.metrics.Close()
	}
	if d.page != nil {
		d.page.Close()
	}
}

// servePorts serves what was configured, until ctx is done.
func (d *Daemon) servePorts(ctx context.Context) {
	if d.metrics != nil || d.metricsErr != nil {
		d.Go(func() {
			if x := awaitPort(ctx, d.metrics, d.listenMetrics); x != nil {
				d.Do(func() { d.metricsErr = nil })
				x.Serve(ctx)
			}
		})
	}
	if d.page != nil || d.pageErr != nil {
		d.Go(func() {
			if p := awaitPort(ctx, d.page, d.listenPage); p != nil {
				d.Do(func() { d.pageErr = nil })
				d.servePage(ctx, p)
			}
		})
	}
}

// awaitPort returns what is open, or opens it as soon as that is possible; nil: ctx is done.
func awaitPort[T any](ctx context.Context, open *T, listen func() (*T, error)) *T {
	for open == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(portPause):
			open, _ = listen()
		}
	}
	return open
}

func (d *Daemon) listenMetrics() (*metrics.Exporter, error) {
	return metrics.Listen(d.metricsOptions(), metricsSource{d})
}

func (d *Daemon) listenPage() (*web.Page, error) {
	return web.Listen(d.own.WebAddr, d.own.WebTokenFile, pageSource{d})
}

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

func (d *Daemon) metricsOptions() metrics.Options {
	return metrics.Options{Addr: d.own.MetricsAddr, Processes: d.own.MetricsProcesses, DCGM: d.own.MetricsDCGM, Sample: d.Opts.Sample, Log: d.Log}
}

// metricsSource answers the exporter from the loop.
type metricsSource struct{ d *Daemon }

func (s metricsSource) Snapshot(ctx context.Context) (found *metrics.Snapshot, err error) {
	err = s.d.Ask(ctx, func() { found = s.d.snapshot() })
	return found, err
}

func (s metricsSource) Problems(ctx context.Context) (own, tenants []string, err error) {
	err = s.d.Ask(ctx, func() {
		// All begin with the scheduler's own, of which a report of the plugin may have ended meanwhile.
		o := s.d.overview()
		own, tenants = o.own, o.status.Problems[len(o.own):]
	})
	return own, tenants, err
}

func (d *Daemon) snapshot() *metrics.Snapshot {
	o := d.overview()
	s := &metrics.Snapshot{Status: o.status, Own: o.own, Traffic: d.Traffic, Managed: d.managed()}
	s.Groups = d.overlapGroups()
	for _, g := range d.Order {
		s.Turns = append(s.Turns, g.Turns)
	}
	return s
}

// managed are the pids of those that are on GPUs by our doing: clients, and what runs for them.
func (d *Daemon) managed() map[uint32]bool {
	all := make(map[uint32]bool, len(d.Clients))
	for _, cl := range d.Clients {
		all[uint32(cl.PID)] = true
	}
	for pid := range d.moves.Copiers { // they have memory on two GPUs
		all[uint32(pid)] = true
	}
	if d.overlap != nil { // the driver counts what members do to their MPS server
		for _, group := range d.overlap.States() {
			all[uint32(group.Server)] = true
		}
	}
	return all
}
