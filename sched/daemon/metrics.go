// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"

	"github.com/nvshare/nvshare/sched/daemon/metrics"
)

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
