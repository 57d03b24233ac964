// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"path"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// The two kinds of device: see the package comment.
const (
	Kind    = "nvshare.com/gpu"
	KindNRI = "nvshare.com/gpu-nri"
)

const (
	// SpecVersion is the version of all specs: what Debian 12's podman reads at most, and
	// what device names that begin with a digit need at least.
	SpecVersion = "0.5.0"

	// PreloadEnv makes the dynamic linker load the shim.
	PreloadEnv = "LD_PRELOAD"
	// RunDirEnv tells the shim where the sockets are.
	RunDirEnv = "NVSHARE_RUN_DIR"
	// ShimPath is the shim inside containers.
	ShimPath = ShimDir + "/" + ShimFile
	// ShimDir is where containers see Paths.ShimDir.
	ShimDir = "/usr/lib/nvshare"
	// ShimFile is the name of the shim in Paths.ShimDir.
	ShimFile = "libnvshare.so"
	// HookFile is the name of the OCI hook in its directory on the host.
	HookFile = "nvshare-cdi-hook"

	// ContainerRunDir is where containers see Paths.TenantDir.
	ContainerRunDir = "/var/run/nvshare"
	// ContainerMPSDir is where the containers of pods see the sockets of their overlap
	// group. It is on a container's own root file system, where a directory can be made.
	ContainerMPSDir = "/usr/lib/nvshare-mps"
)

// Where nvshare keeps things on a host by default.
const (
	DefaultLibDir  = "/var/lib/nvshare/lib" // of ShimLink; not in /run, which is often mounted noexec
	DefaultBinDir  = "/var/lib/nvshare/bin"
	LockFile       = "plugin.lock" // beside these two: the plugin that leads has it locked
	DefaultRunDir  = "/var/run/nvshare"
	DefaultSpecDir = "/var/run/cdi"
)

// Paths are absolute paths of nvshare's own files on the host.
type Paths struct {
	ShimDir string // holds ShimFile, and nothing that a container must not see
	Hook    string // nvshare-cdi-hook
	RunDir  string // the scheduler's
	// EmptyDir, if it is not "", is an empty directory beside ShimDir. Pods then see
	// ShimDir through an overlay of both: a file system of the container's own that has
	// no upper layer, so that a container with CAP_SYS_ADMIN cannot make it writable. A
	// bind mount it could remount, and then write the host's directory.
	EmptyDir string
}

// ShimLink is a symbolic link in the directory where the plugin keeps its shims. It
// leads to the directory of the present shim. A running container keeps the directory
// that the link led to when the container was created.
const ShimLink = "current"

// DefaultPaths are those that an installation uses.
var DefaultPaths = Paths{
	ShimDir: DefaultLibDir + "/" + ShimLink,
	Hook:    DefaultBinDir + "/" + HookFile,
	RunDir:  DefaultRunDir,
}

// TenantDir is the directory of the host that containers see as their run
// directory.
func (p Paths) TenantDir() string { return path.Join(p.RunDir, "tenant") }

// Build makes the spec of a kind: the devices <index>, <UUID> and all, and those
// of MIG devices, each with what base says and nvshare's own part. It shares no memory with base.
// It is an error to build one without GPUs, because an empty spec is invalid:
// remove the file instead.
func Build(kind string, gpus []GPU, base Base, p Paths) (*specs.Spec, error) {
	if len(gpus) == 0 {
		return nil, errors.New("no GPU to describe")
	}
	if len(base.PerGPU) != len(gpus) {
		panic(fmt.Sprintf("base made for %d GPUs, not %d", len(base.PerGPU), len(gpus)))
	}
	spec := &specs.Spec{Version: SpecVersion, Kind: kind, ContainerEdits: copyEdits(base.Common)}
	common := &spec.ContainerEdits
	shim := bind(p.ShimDir, ShimDir, readOnly)
	if kind == KindNRI && p.EmptyDir != "" {
		shim.Type = "overlay"
		shim.Options = []string{"ro", "nosuid", "nodev", "lowerdir=" + p.ShimDir + ":" + p.EmptyDir}
	}
	// The directories, not the files: a file is replaced when its owner
	// restarts, and a mount of it would keep showing the old one.
	common.Mounts = append(common.Mounts, shim,
		bind(p.TenantDir(), ContainerRunDir, append([]string{"noexec"}, readOnly...)))
	if kind == Kind {
		common.Hooks = append(common.Hooks, joinHook(p))
		// An image could send the shim to a directory without a scheduler, where
		// nobody arbitrates.
		common.Env = append(common.Env, PreloadEnv+"="+ShimPath, RunDirEnv+"="+ContainerRunDir)
		common.Hooks = append(common.Hooks, describeHook(p, gpus, base))
	}

	common.Hooks = preloadByHook(common.Hooks, p.Hook) // in pods the plugin merges LD_PRELOAD, too

	spec.Devices = devices(kind, gpus, base, p)
	if min, err := specs.MinimumRequiredVersion(spec); err != nil || min != SpecVersion {
		return nil, fmt.Errorf("the spec of %s needs CDI %s, not %s (%v)", kind, min, SpecVersion, err)
	}
	return spec, nil
}

// devices returns the devices of a kind.
func devices(kind string, gpus []GPU, base Base, p Paths) (list []specs.Device) {
	add := func(name string, edits specs.ContainerEdits) {
		list = append(list, specs.Device{Name: name, ContainerEdits: copyEdits(edits)})
	}
	var all specs.ContainerEdits
	for i, g := range gpus {
		add(fmt.Sprint(g.Index), base.PerGPU[i])
		all = merge(all, base.PerGPU[i])
	}
	for i, g := range gpus {
		add(g.UUID, base.PerGPU[i])
	}
	for i, g := range gpus {
		for j, in := range g.Instances {
			if edits := base.instance(i, j); edits != nil {
				add(in.Name(g), *edits)
				add(in.ID(g), *edits)
			}
		}
	}
	add(AllDevices, all)
	if edits := anyOf(gpus, base); kind == Kind && edits != nil { // for pods the plugin chooses
		add(AnyDevice, *edits)
	}
	if kind == KindNRI { // the plugin knows who needs the hook; to start a hook takes 2 ms
		add(OverlapDevice, specs.ContainerEdits{Hooks: []*specs.Hook{joinHook(p)}})
	}
	return list
}

const (
	// VisibleDevicesEnv tells CUDA which GPUs a program sees.
	VisibleDevicesEnv = "CUDA_VISIBLE_DEVICES"
	// AnyMark is what containers that may move have in their environment. The shim in their
	// programs then asks the scheduler on which GPU they are.
	AnyMark = "NVSHARE_GPU=" + AnyDevice
)

// anyOf returns the edits of AnyDevice; nil: there is no GPU that can be moved from.
func anyOf(gpus []GPU, base Base) *specs.ContainerEdits {
	var first *GPU
	var edits specs.ContainerEdits
	for i := range gpus {
		g := &gpus[i]
		if len(g.Instances) > 0 || first != nil && (g.Name != first.Name || g.MemoryBytes != first.MemoryBytes) {
			continue
		}
		if first == nil {
			first = g
		}
		edits = merge(edits, base.PerGPU[i])
	}
	if first == nil {
		return nil
	}
	edits.Env = append(edits.Env, VisibleDevicesEnv+"="+first.UUID, AnyMark)
	return &edits
}

// merge appends b to a; device nodes and mounts that a already has are not
// repeated.
func merge(a, b specs.ContainerEdits) specs.ContainerEdits {
	a.Env = append(a.Env, b.Env...)
	a.Hooks = append(a.Hooks, b.Hooks...)
	for _, n := range b.DeviceNodes {
		if !containsNode(a.DeviceNodes, n.Path) {
			a.DeviceNodes = append(a.DeviceNodes, n)
		}
	}
	for _, m := range b.Mounts {
		if !containsMount(a.Mounts, m.ContainerPath) {
			a.Mounts = append(a.Mounts, m)
		}
	}
	return a
}

func containsNode(nodes []*specs.DeviceNode, path string) bool {
	return slices.ContainsFunc(nodes, func(n *specs.DeviceNode) bool { return n.Path == path })
}

func containsMount(mounts []*specs.Mount, path string) bool {
	return slices.ContainsFunc(mounts, func(m *specs.Mount) bool { return m.ContainerPath == path })
}
