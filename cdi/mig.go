// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Instance is a MIG device: a part of a GPU with memory and multiprocessors of
// its own, which CUDA shows as a GPU.
type Instance struct {
	Index       int    // position on its GPU, in NVML's order
	UUID        string // "MIG-…", "" where the lister cannot know it
	MemoryBytes uint64 // 0 where the lister cannot know it
	// GPUInstance and ComputeInstance are the driver's numbers.
	GPUInstance, ComputeInstance int
	// DeviceNodes are the capabilities that a process needs beside the nodes of
	// the GPU.
	DeviceNodes []string
}

// Name is the instance's device name beside its ID: that of NVIDIA's specs.
func (i Instance) Name(gpu GPU) string { return fmt.Sprintf("%d:%d", gpu.Index, i.Index) }

// ID is what the instance is known by as long as it is there, whatever becomes of the others on its
// GPU: its UUID or, where that is not known, the driver's numbers. Its Name goes on to another
// instance when one before it is taken down.
func (i Instance) ID(gpu GPU) string {
	return cmp.Or(i.UUID, i.Numbers(gpu))
}

// Numbers names the instance by the driver's numbers.
func (i Instance) Numbers(gpu GPU) string {
	return fmt.Sprintf("MIG-%s:%d:%d", gpu.UUID, i.GPUInstance, i.ComputeInstance)
}

const (
	procCapabilities = "/proc/driver/nvidia/capabilities"
	capsDir          = "/dev/nvidia-caps"
)

var capabilityMinor = regexp.MustCompile(`(?m)^DeviceFileMinor:\s*(\d+)\s*$`)

// capability returns the device node that stands for a capability, which is a
// directory below procCapabilities.
func (h host) capability(path ...string) (string, error) {
	file := h.at(filepath.Join(append(append([]string{procCapabilities}, path...), "access")...))
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	m := capabilityMinor.FindSubmatch(text)
	if m == nil {
		return "", fmt.Errorf("%s does not say DeviceFileMinor", file)
	}
	return capsDir + "/nvidia-cap" + string(m[1]), nil
}

// instanceNodes returns the capability nodes of an instance.
func (h host) instanceNodes(gpuMinor, gpuInstance, computeInstance int) ([]string, error) {
	gpu, gi, ci := fmt.Sprintf("gpu%d", gpuMinor), fmt.Sprintf("gi%d", gpuInstance), fmt.Sprintf("ci%d", computeInstance)
	whole, err := h.capability(gpu, "mig", gi)
	if err != nil {
		return nil, err
	}
	part, err := h.capability(gpu, "mig", gi, ci)
	if err != nil {
		return nil, err
	}
	return []string{whole, part}, nil
}

// instances lists the MIG devices of a GPU as the kernel module shows them:
// without UUIDs, ordered by the driver's numbers, as NVML does.
func (h host) instances(gpuMinor int) (all []Instance, err error) {
	top := filepath.Join(procCapabilities, fmt.Sprintf("gpu%d", gpuMinor), "mig")
	gis, err := h.numbered(top, "gi")
	if err != nil {
		return nil, err
	}
	for _, gi := range gis {
		cis, err := h.numbered(filepath.Join(top, fmt.Sprintf("gi%d", gi)), "ci")
		if err != nil {
			return nil, err
		}
		for _, ci := range cis {
			nodes, err := h.instanceNodes(gpuMinor, gi, ci)
			if errors.Is(err, fs.ErrNotExist) {
				continue // it was just taken down
			}
			if err != nil {
				return nil, err
			}
			all = append(all, Instance{Index: len(all), GPUInstance: gi, ComputeInstance: ci, DeviceNodes: nodes})
		}
	}
	return all, nil
}

// numbered returns N of the entries prefixN of a directory, ascending. A missing
// directory has none.
func (h host) numbered(dir, prefix string) (ns []int, err error) {
	entries, err := os.ReadDir(h.at(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), prefix)
		if n, err := strconv.Atoi(number); ok && err == nil && n >= 0 {
			ns = append(ns, n)
		}
	}
	slices.SortFunc(ns, cmp.Compare[int])
	return ns, nil
}
