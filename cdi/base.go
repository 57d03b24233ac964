// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Base is what a container needs to use GPUs without nvshare: the part that
// differs between hosts. PerGPU runs along the list of GPUs it was made for.
type Base struct {
	Common specs.ContainerEdits
	PerGPU []specs.ContainerEdits
}

// nvidiaVoid tells NVIDIA's container runtime, where it is the default, to add
// nothing of its own: images ask for all GPUs by this variable. NVIDIA's specs
// set it too.
const nvidiaVoid = "NVIDIA_VISIBLE_DEVICES=void"

// readOnly are the options of our mounts: containers only look at what we give
// them.
var readOnly = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}

func bind(host, container string, options []string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: slices.Clone(options)}
}

// linkerHook returns the hook that makes the libraries known to the container's
// dynamic linker.
func linkerHook(binary string, libraries []string) *specs.Hook {
	args := []string{path.Base(binary), "update-ldcache"}
	for _, l := range libraries {
		args = append(args, "--lib", l)
	}
	timeout := 10 // seconds; the hook limits itself to half of it
	return &specs.Hook{HookName: cdi.CreateContainerHook, Path: binary, Args: args, Timeout: &timeout}
}

// DriverBase describes the driver that FindDriver found; hook is the path of
// nvshare-cdi-hook on the host.
func DriverBase(d *Driver, gpus []GPU, hook string) Base {
	b := Base{Common: specs.ContainerEdits{Env: []string{nvidiaVoid}}}
	var sonames []string
	for _, lib := range d.Libraries {
		for _, p := range lib.Paths {
			b.Common.Mounts = append(b.Common.Mounts, bind(lib.File, p, readOnly))
		}
		sonames = append(sonames, lib.Soname)
	}
	if d.NvidiaSMI != "" {
		b.Common.Mounts = append(b.Common.Mounts, bind(d.NvidiaSMI, "/usr/bin/nvidia-smi", readOnly))
	}
	node := func(path string) *specs.DeviceNode {
		n := &specs.DeviceNode{Path: path, Permissions: "rw"}
		if d.DevRoot != "" {
			n.HostPath = d.DevRoot + path
		}
		return n
	}
	for _, p := range d.DeviceNodes {
		b.Common.DeviceNodes = append(b.Common.DeviceNodes, node(p))
	}
	b.Common.Hooks = []*specs.Hook{linkerHook(hook, sonames)}
	for _, g := range gpus {
		var e specs.ContainerEdits
		for _, p := range g.DeviceNodes {
			e.DeviceNodes = append(e.DeviceNodes, node(p))
		}
		b.PerGPU = append(b.PerGPU, e)
	}
	return b
}

// SimulatedBase describes the simulated GPU in dir, an absolute path on the host.
func SimulatedBase(dir string, gpus []GPU, hook string) Base {
	var libraries []string
	for _, name := range simLibraries {
		libraries = append(libraries, path.Join(simLibDir, name))
	}
	b := Base{Common: specs.ContainerEdits{
		Mounts: []*specs.Mount{
			bind(path.Join(dir, "lib"), simLibDir, readOnly),
			bind(path.Join(dir, "run"), simRunDir, []string{"rw", "nosuid", "nodev", "rbind", "rprivate"}),
		},
		Hooks: []*specs.Hook{linkerHook(hook, libraries)},
	}}
	for _, g := range gpus {
		b.PerGPU = append(b.PerGPU, specs.ContainerEdits{Env: []string{fmt.Sprintf("%s%d=%s", simGPUEnv, g.Index, g.UUID)}})
	}
	return b
}

const nvidiaKind = "nvidia.com/gpu"

// SpecSource finds a device by its qualified name, nil if there is none.
// *cdi.Cache is one.
type SpecSource interface {
	GetDevice(name string) *cdi.Device
}

// NVIDIABase takes the edits from the host's own NVIDIA CDI spec, whose file it
// names. It reports no file if the spec lacks any of the GPUs, or has another
// one's device nodes for it, because an outdated spec is worse than none. What
// version 0.5.0 can't express is left out, with a warning.
func NVIDIABase(source SpecSource, gpus []GPU) (b Base, file string, warnings []string) {
	var spec *cdi.Spec
	for _, g := range gpus {
		dev := source.GetDevice(nvidiaKind + "=" + g.UUID)
		if dev == nil {
			dev = source.GetDevice(fmt.Sprintf("%s=%d", nvidiaKind, g.Index))
		}
		if dev == nil {
			if spec != nil {
				warnings = append(warnings, outdated(spec.GetPath(), "lacks GPU "+g.UUID))
			}
			return Base{}, "", warnings
		}
		if spec == nil {
			spec = dev.GetSpec()
		}
		if dev.GetSpec() != spec {
			warnings = append(warnings, fmt.Sprintf("NVIDIA's GPUs are spread over %s and %s: not using them", spec.GetPath(), dev.GetSpec().GetPath()))
			return Base{}, "", warnings
		}
		for _, node := range g.DeviceNodes {
			if !containsNode(dev.ContainerEdits.DeviceNodes, node) && !containsNode(spec.ContainerEdits.DeviceNodes, node) {
				warnings = append(warnings, outdated(spec.GetPath(), fmt.Sprintf("does not give GPU %s its device node %s", g.UUID, node)))
				return Base{}, "", warnings
			}
		}
		b.PerGPU = append(b.PerGPU, copyEdits(dev.ContainerEdits))
	}
	if spec == nil {
		return Base{}, "", nil
	}
	b.Common = copyEdits(spec.ContainerEdits)

	dropped := reduce(&b.Common)
	for i := range b.PerGPU {
		dropped = append(dropped, reduce(&b.PerGPU[i])...)
	}
	slices.Sort(dropped)
	if dropped = slices.Compact(dropped); len(dropped) > 0 {
		warnings = append(warnings, fmt.Sprintf("%s: left out %s, which CDI %s does not have", spec.GetPath(), strings.Join(dropped, ", "), specVersion))
	}
	return b, spec.GetPath(), warnings
}

// outdated words a warning about NVIDIA's spec.
func outdated(file, why string) string {
	return fmt.Sprintf("%s %s: not using it (regenerate it with nvidia-ctk cdi generate)", file, why)
}

// hostFiles returns the files of the host that a container with these edits
// cannot start without, but for device nodes.
func (b *Base) hostFiles() (files []string) {
	for _, e := range append([]specs.ContainerEdits{b.Common}, b.PerGPU...) {
		for _, m := range e.Mounts {
			if m.Type == "" || m.Type == "bind" {
				files = append(files, m.HostPath)
			}
		}
		for _, h := range e.Hooks {
			files = append(files, h.Path)
		}
	}
	return files
}

// reduce removes from e what is newer than specVersion and names it.
func reduce(e *specs.ContainerEdits) (dropped []string) {
	if len(e.AdditionalGIDs) > 0 {
		e.AdditionalGIDs = nil
		dropped = append(dropped, "additionalGids")
	}
	if e.IntelRdt != nil {
		e.IntelRdt = nil
		dropped = append(dropped, "intelRdt")
	}
	if len(e.NetDevices) > 0 {
		e.NetDevices = nil
		dropped = append(dropped, "netDevices")
	}
	return dropped
}

// copyEdits returns edits that share no memory with e.
func copyEdits(e specs.ContainerEdits) specs.ContainerEdits {
	data, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain data always encodes
	}
	var c specs.ContainerEdits
	if err := json.Unmarshal(data, &c); err != nil {
		panic(err)
	}
	return c
}
