// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sirupsen/logrus"
)

// ProcFS lists GPUs as the NVIDIA kernel module shows them in
// /proc/driver/nvidia/gpus. It needs neither NVML nor cgo, and does not know
// the size of GPU memory, nor the UUIDs of MIG devices.
type ProcFS struct {
	Root string             // as Options.HostRoot
	Log  logrus.FieldLogger // as Options.Log
}

var _ Lister = ProcFS{}

const procGPUs = "/proc/driver/nvidia/gpus"

// List returns the GPUs in PCI bus order, which is NVML's, or none if the
// kernel module is not loaded.
func (p ProcFS) List(context.Context) ([]GPU, error) {
	dir := host(p.Root).at(procGPUs)
	entries, err := os.ReadDir(dir) // sorted by name: the bus location
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list GPUs: %w", err)
	}
	var gpus []GPU
	var failed []error
	leaveOut := func(bus string, err error) {
		failed = append(failed, err)
		gpus = append(gpus, GPU{PCIBusID: bus}) // for the others' indexes
	}
	for _, e := range entries {
		file := filepath.Join(dir, e.Name(), "information")
		text, err := os.ReadFile(file)
		if err != nil {
			leaveOut(e.Name(), fmt.Errorf("read GPU %s: %w", e.Name(), err))
			continue
		}
		gpu, excluded, err := parseInformation(string(text))
		if excluded {
			continue // by the administrator: NVML does not count it either
		}
		if gpu.PCIBusID == "" {
			gpu.PCIBusID = e.Name()
		}
		if err != nil {
			leaveOut(gpu.PCIBusID, fmt.Errorf("%s: %w", file, err))
			continue
		}
		gpu.Model.DriverVersion = host(p.Root).moduleVersion()
		if gpu.Instances, err = host(p.Root).instances(gpu.Minor); err != nil {
			leaveOut(gpu.PCIBusID, fmt.Errorf("list the MIG devices of GPU %s: %w", gpu.UUID, err))
			continue
		}
		gpus = append(gpus, gpu)
	}
	slices.SortFunc(gpus, func(a, b GPU) int { return strings.Compare(a.PCIBusID, b.PCIBusID) })
	for i := range gpus {
		gpus[i].Index = i
	}
	return usable(slices.DeleteFunc(gpus, func(g GPU) bool { return g.UUID == "" }), failed, p.Log)
}

// parseInformation reads the "Key: value" lines that the kernel module prints
// for a GPU.
func parseInformation(text string) (gpu GPU, excluded bool, err error) {
	gpu.Minor = -1
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "Model":
			gpu.Name = value
		case "GPU UUID":
			gpu.UUID = value
		case "Bus Location":
			gpu.PCIBusID = strings.ToLower(value)
		case "GPU Excluded":
			excluded = strings.EqualFold(value, "yes")
		case "Device Minor":
			if gpu.Minor, err = strconv.Atoi(value); err != nil {
				return gpu, false, fmt.Errorf("device minor %q is no number", value)
			}
		}
	}
	if excluded {
		return gpu, true, nil
	}
	if gpu.Minor < 0 {
		return gpu, false, errors.New("no device minor")
	}
	// The module knows the UUID only after the first use of the GPU, and never if that fails.
	if !strings.HasPrefix(gpu.UUID, "GPU-") || strings.Contains(gpu.UUID, "?") {
		return gpu, false, fmt.Errorf("UUID %q is not known yet: run nvidia-smi once, or enable persistence mode; see dmesg if that does not help", gpu.UUID)
	}
	gpu.DeviceNodes = []string{fmt.Sprintf("/dev/nvidia%d", gpu.Minor)}
	return gpu, false, nil
}
