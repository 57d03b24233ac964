// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

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
