// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

const nvidiaKind = "nvidia.com/gpu"

// nvidiaSpecs returns the specs of nvidiaKind in dirs, the ones to prefer first:
// those of later directories, which win for engines too, and of two in one
// directory the one written last. Engines drop a device that two files of one
// directory declare (CDI, "pkg/cdi: device conflicts"), which Validate says; a host where
// that has happened still has GPUs, so here one of them is chosen.
func nvidiaSpecs(dirs []string) (all []*cdi.Spec, warnings []string) {
	written := func(file string) (at time.Time) {
		if info, err := os.Stat(file); err == nil {
			at = info.ModTime()
		}
		return at
	}
	for i, dir := range slices.Backward(dirs) {
		files := specFiles(dir)
		slices.SortStableFunc(files, func(a, b string) int { return written(b).Compare(written(a)) })
		for _, file := range files {
			if kind, err := kindOf(file); err != nil || kind != nvidiaKind {
				continue
			}
			spec, err := cdi.ReadSpec(file, i)
			if err != nil {
				warnings = append(warnings, fmt.Sprintf("%s cannot be used: %v", file, err))
				continue
			}
			all = append(all, spec)
		}
	}
	return all, warnings
}

// specFiles lists what engines would read in a CDI directory, in order.
func specFiles(dir string) (files []string) {
	entries, _ := os.ReadDir(dir) // what can't be read has none for engines either
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext == ".yaml" || ext == ".json" {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	return files
}

// NVIDIABase takes the edits from one of the host's own NVIDIA CDI specs. It
// refuses a spec that lacks any of the GPUs or MIG devices, or has another one's
// device nodes for it, because an outdated spec is worse than none. What version
// 0.5.0 can't express is left out, and named.
func NVIDIABase(spec *cdi.Spec, gpus []GPU) (b Base, dropped []string, err error) {
	find := func(names ...string) *specs.ContainerEdits {
		for _, name := range names {
			if d := spec.GetDevice(name); name != "" && d != nil {
				e := copyEdits(d.ContainerEdits)
				dropped = append(dropped, reduce(&e)...)
				return &e
			}
		}
		return nil
	}
	b.Common = copyEdits(spec.ContainerEdits)
	dropped = reduce(&b.Common)
	check := func(who string, nodes []string, e *specs.ContainerEdits) error {
		for _, node := range nodes {
			if !containsNode(e.DeviceNodes, node) && !containsNode(b.Common.DeviceNodes, node) {
				return fmt.Errorf("does not give %s its device node %s", who, node)
			}
		}
		return nil
	}
	for _, g := range gpus {
		var parts []specs.ContainerEdits
		var whole specs.ContainerEdits
		for _, in := range g.Instances {
			part := find(in.UUID, in.Name(g))
			if part == nil {
				return Base{}, nil, fmt.Errorf("lacks MIG device %s", in.Name(g))
			}
			if err := check("MIG device "+in.Name(g), slices.Concat(g.DeviceNodes, in.DeviceNodes), part); err != nil {
				return Base{}, nil, err
			}
			parts = append(parts, *part)
			whole = merge(whole, *part)
		}
		// NVIDIA's tools give a GPU in MIG mode no device of its own.
		if e := find(g.UUID, fmt.Sprint(g.Index)); e != nil {
			whole = merge(*e, whole)
		} else if len(g.Instances) == 0 {
			return Base{}, nil, errors.New("lacks GPU " + g.UUID)
		}
		if err := check("GPU "+g.UUID, g.DeviceNodes, &whole); err != nil {
			return Base{}, nil, err
		}
		b.PerGPU = append(b.PerGPU, whole)
		b.PerInstance = append(b.PerInstance, parts)
	}
	slices.Sort(dropped)
	return b, slices.Compact(dropped), nil
}

// nvidiaBase returns the edits of the first of the host's NVIDIA specs that fits
// the GPUs, and its file, which is empty if none does. needed are the host's files of the
// ones before it that need what the host does not have.
func nvidiaBase(h host, dirs []string, gpus []GPU) (base Base, file string, needed, warnings []string) {
	candidates, warnings := nvidiaSpecs(dirs)
	for _, spec := range candidates {
		base, dropped, err := NVIDIABase(spec, gpus)
		if err == nil {
			if err = h.hasAll(base.hostFiles()); err != nil {
				needed = append(needed, base.hostFiles()...)
			}
		}
		if err != nil {
			warnings = append(warnings, fmt.Sprintf("%s %v: not using it (regenerate it with nvidia-ctk cdi generate)", spec.GetPath(), err))
			continue
		}
		if len(dropped) > 0 {
			warnings = append(warnings, fmt.Sprintf("%s: left out %s, which CDI %s does not have", spec.GetPath(), strings.Join(dropped, ", "), SpecVersion))
		}
		return base, spec.GetPath(), needed, warnings
	}
	return Base{}, "", needed, warnings
}

// hasAll makes sure that the host has the files. A driver upgrade leaves the old
// version's names in NVIDIA's spec.
func (h host) hasAll(files []string) error {
	for _, f := range files {
		if _, err := h.real(f); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("needs %s, which is not there", f)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// hostFiles returns the files of the host that a container with these edits
// cannot start without, except device nodes.
func (b *Base) hostFiles() (files []string) {
	all := append([]specs.ContainerEdits{b.Common}, b.PerGPU...)
	for _, parts := range b.PerInstance {
		all = append(all, parts...)
	}
	for _, e := range all {
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
