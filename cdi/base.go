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
// differs between hosts. PerGPU runs along the list of GPUs it was made for, and
// has all MIG devices of a GPU; PerInstance along these, for each GPU.
type Base struct {
	Common      specs.ContainerEdits
	PerGPU      []specs.ContainerEdits
	PerInstance [][]specs.ContainerEdits
}

// instance returns the edits of MIG device j of GPU i, nil if it has none: its
// device nodes were not found.
func (b *Base) instance(i, j int) *specs.ContainerEdits {
	if i >= len(b.PerInstance) || j >= len(b.PerInstance[i]) || len(b.PerInstance[i][j].DeviceNodes) == 0 {
		return nil
	}
	return &b.PerInstance[i][j]
}

// nvidiaVoid tells NVIDIA's container runtime to add nothing of its own, where it is
// the default runtime: images ask for all GPUs by this variable. NVIDIA's specs set it
// too.
const nvidiaVoid = "NVIDIA_VISIBLE_DEVICES=void"

// readOnly are the options of nvshare's mounts: containers only read them.
var readOnly = []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}

func bind(host, container string, options []string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: slices.Clone(options)}
}

// hookEnv is the whole environment of each hook. Without one, runtimes give a hook the
// environment of the container's image, and variables like GODEBUG change what a Go
// program does.
var hookEnv = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}

// linkerHook returns the hook that makes the libraries known to the container's
// dynamic linker.
func linkerHook(binary string, libraries []string) *specs.Hook {
	args := []string{path.Base(binary), "update-ldcache"}
	for _, l := range libraries {
		args = append(args, "--lib", l)
	}
	timeout := 10 // seconds; the hook limits itself to half of it
	return &specs.Hook{HookName: cdi.CreateContainerHook, Path: binary, Args: args, Env: slices.Clone(hookEnv), Timeout: &timeout}
}

// preloadByHook has the hook put the shim into the container's /etc/ld.so.preload, with one start of
// the hook: a container's environment does not reach all its programs, as those of podman exec, su and sshd.
func preloadByHook(hooks []*specs.Hook, binary string) []*specs.Hook {
	for _, h := range hooks {
		if h.Path == binary && len(h.Args) > 1 && h.Args[1] == "update-ldcache" {
			h.Args = slices.Insert(h.Args, 2, "--preload", ShimPath)
			return hooks
		}
	}
	h := linkerHook(binary, nil)
	h.Args = append(h.Args, "--preload", ShimPath)
	return append(hooks, h)
}

// describeHook returns the hook that tells the scheduler of a container: its name, its
// annotations, and which GPUs it has. A GPU is known by its last device node, which for
// MIG devices no other has, or by a variable of the environment. A GPU in MIG mode
// has the nodes of all its MIG devices. So it is recognised by these only.
func describeHook(p Paths, gpus []GPU, base Base) *specs.Hook {
	args := []string{path.Base(p.Hook), "describe", "--run-dir", p.RunDir}
	add := func(uuid string, e *specs.ContainerEdits) {
		switch {
		case e == nil || uuid == "":
		case len(e.DeviceNodes) > 0:
			args = append(args, "--gpu", uuid+"="+e.DeviceNodes[len(e.DeviceNodes)-1].Path)
		case len(e.Env) > 0:
			args = append(args, "--gpu", uuid+"="+e.Env[len(e.Env)-1])
		}
	}
	for i, g := range gpus {
		whole := &base.PerGPU[i]
		for j, in := range g.Instances {
			if part := base.instance(i, j); part != nil {
				add(in.UUID, part)
				whole = nil
			}
		}
		add(g.UUID, whole)
	}
	timeout := 10 // seconds; the hook limits itself to half of it
	return &specs.Hook{HookName: cdi.CreateRuntimeHook, Path: p.Hook, Args: args, Env: slices.Clone(hookEnv), Timeout: &timeout}
}

// joinHook returns the hook that gives a container the directories of its overlap group,
// once the group runs.
func joinHook(p Paths) *specs.Hook {
	timeout := 30 // seconds; the hook limits itself to less
	return &specs.Hook{HookName: cdi.CreateContainerHook, Path: p.Hook, Args: []string{path.Base(p.Hook), "join", "--run-dir", p.RunDir},
		Env: slices.Clone(hookEnv), Timeout: &timeout}
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
	for _, s := range d.Sockets {
		b.Common.Mounts = append(b.Common.Mounts, bind(s, s[strings.LastIndex(s, "/run/"):], append([]string{"noexec"}, readOnly...)))
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
		var whole specs.ContainerEdits
		for _, p := range g.DeviceNodes {
			whole.DeviceNodes = append(whole.DeviceNodes, node(p))
		}
		var parts []specs.ContainerEdits
		for _, in := range g.Instances {
			var part specs.ContainerEdits
			for _, p := range in.DeviceNodes {
				if len(part.DeviceNodes) == 0 {
					part = copyEdits(specs.ContainerEdits{DeviceNodes: whole.DeviceNodes[:len(g.DeviceNodes)]})
				}
				part.DeviceNodes = append(part.DeviceNodes, node(p))
			}
			parts = append(parts, part)
		}
		for _, part := range parts {
			whole = merge(whole, part)
		}
		b.PerGPU = append(b.PerGPU, whole)
		b.PerInstance = append(b.PerInstance, parts)
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

// reduce removes from e what is newer than SpecVersion and names it.
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
