// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const (
	// healthInterval is the time between reports of health to the kubelet.
	healthInterval = 10 * time.Second
	// healthHolds is how long the kubelet believes a report.
	healthHolds = 3 * healthInterval
)

// WatchHealthStatus tells the kubelet, which writes it into the status of pods, whether
// the node still has the devices of prepared claims.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	tick := time.Tick(healthInterval)
	for {
		if report, known := d.health(time.Now()); known {
			select {
			case <-ctx.Done():
				return nil
			case reports <- report:
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
		case <-d.changed:
		}
	}
}

// health returns the health of the devices that the node has, and of those that claims
// have and the node does not. It is not known before the first look at the GPUs, and before
// the scheduler has said which of them do work.
func (d *Driver) health(now time.Time) (r kubeletplugin.DeviceHealthReport, known bool) {
	devices, err := d.devices()
	if err != nil {
		return r, false
	}
	d.mu.Lock()
	known = d.stateKnown()
	d.mu.Unlock()
	if !known {
		return r, false
	}
	said := map[string]bool{}
	say := func(name string, health kubeletplugin.HealthStatus, why string) {
		if !said[name] {
			said[name] = true
			r.Devices = append(r.Devices, kubeletplugin.DeviceHealth{
				PoolName: d.NodeName, DeviceName: name, Health: health, LastUpdated: now, HealthCheckTimeout: healthHolds, Message: why,
			})
		}
	}
	for _, dev := range devices {
		if fault := dev.state.Fault; fault != "" {
			say(dev.name, kubeletplugin.HealthStatusUnhealthy, fault)
			continue
		}
		say(dev.name, kubeletplugin.HealthStatusHealthy, "")
	}
	for _, r := range d.store.Records() {
		for _, s := range r.Shares {
			say(s.Device, kubeletplugin.HealthStatusUnhealthy, "the node does not have this GPU any more: delete the pod, so that it gets another one")
		}
	}
	return r, true
}
