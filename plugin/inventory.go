// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
)

// Inventory is what this node can give to containers. It never changes. The zero
// value has no device.
type Inventory struct {
	spec    *specs.Spec // of cdi.KindNRI
	gpus    []cdi.GPU
	problem error // why it has no devices although there may be GPUs
}

// Unavailable returns an inventory without devices, for a node whose GPUs or
// driver could not be read. Containers that ask for GPUs are refused with the
// reason.
func Unavailable(why error) *Inventory { return &Inventory{problem: why} }

// NewInventory returns the inventory of a node with these GPUs. spec is the spec of
// cdi.KindNRI for gpus, nil without GPUs.
func NewInventory(spec *specs.Spec, gpus []cdi.GPU) *Inventory {
	return &Inventory{spec: spec, gpus: gpus}
}

// Devices returns the names of the devices that hold GPUs, without the kind.
func (inv *Inventory) Devices() []string {
	if inv.spec == nil {
		return nil
	}
	var names []string
	for _, d := range inv.spec.Devices {
		if d.Name != cdi.OverlapDevice {
			names = append(names, d.Name)
		}
	}
	return names
}

// givable returns the GPUs without those MIG devices that are not in the spec,
// because their device nodes are hidden from us.
func (inv *Inventory) givable() (gpus []cdi.GPU) {
	names := inv.Devices()
	for _, g := range inv.gpus {
		mig := len(g.Instances) > 0
		g.Instances = slices.DeleteFunc(slices.Clone(g.Instances), func(in cdi.Instance) bool { return !slices.Contains(names, in.Name(g)) })
		if !mig || len(g.Instances) > 0 {
			gpus = append(gpus, g)
		}
	}
	return gpus
}

// devicesOf returns the devices of GPUs: each GPU, or its MIG devices if it has any,
// because then it can be used through them only.
func devicesOf(gpus []cdi.GPU) (devices []placement.Device) {
	add := func(d placement.Device) {
		d.Index = len(devices)
		devices = append(devices, d)
	}
	for _, g := range gpus {
		for _, in := range g.Instances {
			name := in.Name(g)
			add(placement.Device{UUID: in.ID(g), GPU: g.UUID, Name: fmt.Sprintf("MIG device %s (%s)", name, cmp.Or(in.UUID, "of "+g.UUID)), Memory: in.MemoryBytes})
		}
		if len(g.Instances) == 0 {
			add(placement.Device{UUID: g.UUID, GPU: g.UUID, Name: fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID), Memory: g.MemoryBytes})
		}
	}
	return devices
}

// identify returns the UUIDs of the devices with these names, each once and in order.
// Unknown names are left out.
func (inv *Inventory) identify(names []string) []string {
	meant := map[string]bool{} // UUIDs, of GPUs too
	for _, g := range inv.gpus {
		for _, d := range names {
			if d == cdi.AllDevices || d == g.UUID || d == strconv.Itoa(g.Index) {
				meant[g.UUID] = true
			}
			for _, in := range g.Instances {
				if d == in.Name(g) || d == in.ID(g) {
					meant[in.ID(g)] = true
				}
			}
		}
	}
	var uuids []string
	for _, d := range devicesOf(inv.gpus) {
		if meant[d.UUID] || meant[d.GPU] {
			uuids = append(uuids, d.UUID)
		}
	}
	return uuids
}

// Problem returns why there are no devices although there may be GPUs; nil: none.
func (inv *Inventory) Problem() error { return inv.problem }

// GPUs returns the GPUs, also those that cannot be given.
func (inv *Inventory) GPUs() []cdi.GPU { return inv.gpus }

// Offers tells whether containers can be given the device with this name.
func (inv *Inventory) Offers(name string) bool { return slices.Contains(inv.Devices(), name) }

// Edits returns the edits of the device with this name, and those that are common to
// all devices. They share memory with the inventory.
func (inv *Inventory) Edits(name string) (device, common specs.ContainerEdits, err error) {
	if inv.spec == nil {
		return device, common, fmt.Errorf("no device %q: this node has no GPU", name)
	}
	for _, d := range inv.spec.Devices {
		if d.Name == name {
			return d.ContainerEdits, inv.spec.ContainerEdits, nil
		}
	}
	return device, common, fmt.Errorf("no device %q: this node has %s", name, qualified(inv.Devices()))
}
