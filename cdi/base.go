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
	for _, node := range d.DeviceNodes {
		b.Common.DeviceNodes = append(b.Common.DeviceNodes, &specs.DeviceNode{Path: node, Permissions: "rw"})
	}
	b.Common.Hooks = []*specs.Hook{linkerHook(hook, sonames)}
	for _, g := range gpus {
		var e specs.ContainerEdits
		for _, node := range g.DeviceNodes {
			e.DeviceNodes = append(e.DeviceNodes, &specs.DeviceNode{Path: node, Permissions: "rw"})
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

// NVIDIABase takes the edits from the host's own NVIDIA CDI spec. It reports
// false if the spec lacks any of the GPUs, because an outdated spec is worse
// than none. What version 0.5.0 can't express is left out, with a warning.
func NVIDIABase(source SpecSource, gpus []GPU) (b Base, warnings []string, ok bool) {
	var spec *cdi.Spec
	for _, g := range gpus {
		dev := source.GetDevice(nvidiaKind + "=" + g.UUID)
		if dev == nil {
			dev = source.GetDevice(fmt.Sprintf("%s=%d", nvidiaKind, g.Index))
		}
		if dev == nil {
			if spec != nil {
				warnings = append(warnings, fmt.Sprintf("%s lacks GPU %s: not using it (regenerate it with nvidia-ctk cdi generate)", spec.GetPath(), g.UUID))
			}
			return Base{}, warnings, false
		}
		if spec == nil {
			spec = dev.GetSpec()
		}
		if dev.GetSpec() != spec {
			warnings = append(warnings, fmt.Sprintf("NVIDIA's GPUs are spread over %s and %s: not using them", spec.GetPath(), dev.GetSpec().GetPath()))
			return Base{}, warnings, false
		}
		b.PerGPU = append(b.PerGPU, copyEdits(dev.ContainerEdits))
	}
	if spec == nil {
		return Base{}, nil, false
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
	return b, warnings, true
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
