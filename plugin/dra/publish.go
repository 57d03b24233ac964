// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/nvshare/nvshare/plugin"
)

// What the driver tells Kubernetes of the node's GPUs.

const (
	// repairDelay is the time from a change of the node's slices by somebody else to the
	// driver's repair. A kubelet that starts removes all slices, and until the repair no pod
	// gets a GPU of this node. The library's default is 30 s.
	repairDelay = time.Second
	// ownWritesLimit bounds how long the API server may take to show the driver its own
	// writes. So long, the driver does not see that somebody else removed a slice. The
	// library's default is a minute.
	ownWritesLimit = 5 * time.Second
	// stateLimit bounds how long the first slices wait for the scheduler's state of the GPUs. It
	// starts with the driver, and takes seconds with NVML.
	stateLimit = 20 * time.Second
	// maxDevices is how many devices fit into one slice.
	maxDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
)

// SetInventory says what the node has from now on. An inventory that is not available
// changes nothing: claims stay, and what was published.
func (d *Driver) SetInventory(inv *plugin.Inventory) {
	if inv.Problem() != nil {
		return
	}
	d.mu.Lock()
	if d.inventory == nil {
		close(d.known)
	}
	d.inventory = inv
	d.mu.Unlock()
	if d.leading() {
		d.store.refresh(d.edits)
	}
	d.Refresh()
}

// Refresh says that the scheduler knows something else of the GPUs, which the driver tells
// Kubernetes in its own time. Slices are written only if they change.
func (d *Driver) Refresh() {
	plugin.Signal(d.stale)
	plugin.Signal(d.changed)
}

// startWriter starts the part that keeps the node's slices as they are to be. It reports
// failures to HandleError. The helper could start it, but with the defaults only.
func (d *Driver) startWriter(ctx context.Context, r *resourceslice.DriverResources) (*resourceslice.Controller, error) {
	return resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: DriverName, KubeClient: d.Client, Resources: r, ErrorHandler: d.HandleError,
		Owner:     &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: d.NodeName},
		SyncDelay: ptr.To(repairDelay), MutationCacheTTL: ptr.To(ownWritesLimit),
	})
}

// unpublished returns what is to be published now; false: nothing, or it is.
func (d *Driver) unpublished() (devices []resourceapi.Device, due bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inventory == nil || !d.looked {
		return nil, false
	}
	if d.owner && d.unusable == nil {
		if d.published == nil && !d.stateKnown() {
			return nil, false
		}
		devices = Devices(d.inventory.GPUs(), d.inventory.Offers, d.Options)
	}
	return devices, d.published == nil || !slices.EqualFunc(devices, d.published, equal)
}

// publish has the slices written, if they change. Only Run calls it. The lock is not held while it writes:
// the first time, that waits for the API server.
func (d *Driver) publish() error {
	devices, due := d.unpublished()
	if !due || d.write == nil {
		return nil
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{}}} // an empty pool shows that the driver runs
	for i, chunk := range slices.Collect(slices.Chunk(devices, maxDevices)) {
		if i > 0 {
			pool.Slices = append(pool.Slices, resourceslice.Slice{})
		}
		pool.Slices[i].Devices = chunk
	}
	if err := d.write(&resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.NodeName: pool}}); err != nil {
		return fmt.Errorf("publish the GPUs to Kubernetes: %w", err)
	}
	d.mu.Lock()
	d.published = append([]resourceapi.Device{}, devices...)
	d.mu.Unlock()
	d.Log.Infof("publishing %d devices in pool %s of driver %s", len(devices), d.NodeName, DriverName)
	return nil
}

// stateKnown tells whether the scheduler has said what it knows of the GPUs, or is not waited for
// any more. Slices without its state lack taints, and the memory that it alone knows: a pod
// that is allocated meanwhile gets a GPU that does no work, or has no memory limit as long as
// it runs. What an earlier driver has published stays. The lock is held.
func (d *Driver) stateKnown() bool {
	if d.Options.Scheduler == nil || d.waited {
		return true
	}
	devices := devicesOf(d.inventory.GPUs(), d.inventory.Offers, d.Options)
	return len(devices) == 0 || slices.ContainsFunc(devices, func(dev device) bool { return dev.state.Sharing != "" })
}

// stopWaiting has slices published without the scheduler.
func (d *Driver) stopWaiting() {
	d.mu.Lock()
	d.waited = true
	d.mu.Unlock()
	d.Refresh()
}

// HandleError says what failed in the background, and is tried again. Where the API
// server does not know that a device may have several claims, nothing is published any more:
// whole GPUs would be given away as shares.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	if dropped := (*resourceslice.DroppedFieldsError)(nil); errors.As(err, &dropped) {
		err = fmt.Errorf("this cluster lacks %v, so GPUs are not published: it needs Kubernetes 1.36, or these feature gates; then restart nvshare's pods", dropped.DisabledFeatures())
		d.mu.Lock()
		d.unusable = err
		d.mu.Unlock()
		d.Problem(err)
	} else {
		d.mu.Lock()
		d.failed = err
		d.mu.Unlock()
	}
	d.Refresh() // a look soon sees whether it was written since
	if ctx.Err() == nil {
		d.Log.Errorf("Kubernetes API: %s: %v", msg, err)
	}
}

// lacking returns why the cluster cannot use what is published, or does not have it; nil: it can.
func (d *Driver) lacking() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.unusable, d.failed)
}

// unwritten returns why the API server does not have what is published; nil: no write has failed, or
// it has that now.
func (d *Driver) unwritten(ctx context.Context) error {
	d.mu.Lock()
	failed, want := d.failed, d.published
	d.mu.Unlock()
	if failed == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	if got, err := d.devicesBy(ctx, DriverName); err != nil || !shows(got, want) {
		return fmt.Errorf("the GPUs of this node, or changes of them, cannot be published: %w", failed)
	}
	d.mu.Lock()
	d.failed = nil
	d.mu.Unlock()
	return nil
}

// shows tells whether these are the devices, where got is as the API server has it.
func shows(got, want []resourceapi.Device) bool {
	for i := range got {
		for k := range got[i].Taints {
			got[i].Taints[k].TimeAdded = nil // which the API server says
		}
	}
	byName := func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) }
	return slices.EqualFunc(slices.SortedFunc(slices.Values(got), byName), slices.SortedFunc(slices.Values(want), byName), equal)
}
