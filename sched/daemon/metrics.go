// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"

	"github.com/nvshare/nvshare/sched/daemon/metrics"
)

func (d *Daemon) metricsOptions() metrics.Options {
	return metrics.Options{Addr: d.opts.MetricsAddr, Processes: d.opts.MetricsProcesses, DCGM: d.opts.MetricsDCGM, Sample: d.opts.Sample, Log: d.log}
}

// metricsSource answers the exporter from the loop.
type metricsSource struct{ d *Daemon }

func (s metricsSource) Snapshot(ctx context.Context) (found *metrics.Snapshot, err error) {
	err = s.d.ask(ctx, func() { found = s.d.snapshot() })
	return found, err
}

func (s metricsSource) Problems(ctx context.Context) (own, tenants []string, err error) {
	err = s.d.ask(ctx, func() {
		// All begin with the scheduler's own, of which a report of the plugin may have ended meanwhile.
		o := s.d.overview()
		own, tenants = o.own, o.status.Problems[len(o.own):]
	})
	return own, tenants, err
}

func (d *Daemon) snapshot() *metrics.Snapshot {
	o := d.overview()
	s := &metrics.Snapshot{Status: o.status, Own: o.own, Traffic: d.traffic, Managed: d.managed()}
	s.Groups = d.overlapGroups()
	for _, g := range d.order {
		s.Turns = append(s.Turns, g.turns)
	}
	return s
}
