// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
)

// Inventory is what this node can give to containers. It never changes. The zero
// value has no device.
type Inventory struct {
	spec  *specs.Spec                 // of cdi.KindNRI
	nodes map[string]*api.LinuxDevice // by path in the container
	gpus  []cdi.GPU

	problem error // why it has no devices although there may be GPUs
}

// Unavailable returns an inventory without devices, for a node whose GPUs or
// driver could not be read. Containers that ask for GPUs are refused with the
// reason.
func Unavailable(why error) *Inventory { return &Inventory{problem: why} }

// NewInventory returns the inventory of a node with these GPUs. It looks up the
// numbers of the spec's device nodes, which explicit edits need. spec is the spec of
// cdi.KindNRI for gpus, nil without GPUs; hostRoot is as cdi.Options.HostRoot. A
// missing device node is an error when a container asks for it.
func NewInventory(spec *specs.Spec, gpus []cdi.GPU, hostRoot string) *Inventory {
	inv := &Inventory{spec: spec, nodes: map[string]*api.LinuxDevice{}, gpus: gpus}
	if spec == nil {
		return inv
	}
	add := func(e specs.ContainerEdits) {
		for _, n := range e.DeviceNodes {
			if d, err := linuxDevice(n, hostRoot); err == nil {
				inv.nodes[n.Path] = d
			}
		}
	}
	add(spec.ContainerEdits)
	for _, d := range spec.Devices {
		add(d.ContainerEdits)
	}
	return inv
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

// linuxDevice returns a device node in NRI's form. It reads from the host what the
// spec leaves open, as runtimes do that resolve CDI devices.
func linuxDevice(n *specs.DeviceNode, hostRoot string) (*api.LinuxDevice, error) {
	d := &api.LinuxDevice{Path: n.Path, Type: n.Type, Major: n.Major, Minor: n.Minor, FileMode: api.FileMode(n.FileMode), Uid: api.UInt32(n.UID), Gid: api.UInt32(n.GID)}
	if d.Type != "" && d.Major != 0 {
		return d, nil
	}
	hostPath := n.HostPath
	if hostPath == "" {
		hostPath = n.Path
	}
	seen := cdi.OnHost(hostRoot, hostPath)
	var st unix.Stat_t
	if err := unix.Stat(seen, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: seen, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		d.Type = "c"
	case unix.S_IFBLK:
		d.Type = "b"
	default:
		return nil, fmt.Errorf("%s is not a device node", seen)
	}
	d.Major, d.Minor = int64(unix.Major(uint64(st.Rdev))), int64(unix.Minor(uint64(st.Rdev)))
	if n.FileMode == nil {
		mode := os.FileMode(st.Mode &^ unix.S_IFMT)
		d.FileMode = api.FileMode(&mode)
	}
	return d, nil
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
