// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/sirupsen/logrus"
)

// NVML lists GPUs through NVIDIA's management library.
type NVML struct {
	// Library is the path of libnvidia-ml.so.1; empty leaves the search to the
	// dynamic linker.
	Library string
	Log     logrus.FieldLogger // as Options.Log
}

var _ Lister = NVML{}

// inNVML holds a token while this process is in NVML. A call that hangs there keeps a
// thread, and repeated attempts must not collect such threads.
var inNVML = make(chan struct{}, 1)

// List returns the GPUs, ErrNoNVML if the library or the driver is not there,
// or what NVML reports. It returns when ctx ends even if NVML hangs, as it does
// on a GPU that fell off the bus.
func (n NVML) List(ctx context.Context) ([]GPU, error) {
	gpus, _, err := n.look(ctx)
	return gpus, err
}

// look is List; partial: some GPUs could not be opened.
func (n NVML) look(ctx context.Context) ([]GPU, bool, error) {
	var gpus []GPU
	var failed []error
	err := inside(ctx, func() (err error) {
		gpus, failed, err = n.list()
		return err
	})
	if err != nil {
		return nil, false, err
	}
	gpus, err = usable(gpus, failed, n.Log)
	return gpus, len(failed) > 0, err
}

// inside runs f, which is to use NVML, unless another one hangs there. It
// returns when ctx ends, even if f does not; then what f writes must not be
// read.
func inside(ctx context.Context, f func() error) error {
	select {
	case inNVML <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("wait for NVML, which does not return from an earlier call (a GPU hangs; see dmesg): %w", ctx.Err())
	}
	done := make(chan error, 1)
	go func() {
		defer func() { <-inNVML }()
		done <- f()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("wait for NVML: %w", ctx.Err())
	}
}

// start loads and starts NVML; the caller shuts it down.
func (n NVML) start() (nvml.Interface, error) {
	var opts []nvml.LibraryOption
	if n.Library != "" {
		opts = append(opts, nvml.WithLibraryPath(n.Library))
	}
	lib := nvml.New(opts...)
	switch ret := lib.Init(); ret {
	case nvml.SUCCESS:
		return lib, nil
	case nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED:
		return nil, fmt.Errorf("%w: %v", ErrNoNVML, ret)
	default:
		return nil, fmt.Errorf("start NVML: %v", ret)
	}
}

func (n NVML) list() (gpus []GPU, failed []error, err error) {
	lib, err := n.start()
	if err != nil {
		return nil, nil, err
	}
	defer lib.Shutdown()
	// A call to a function that the library lacks would end this program.
	return listNVML(lib, func(symbol string) bool { return lib.Extensions().LookupSymbol(symbol) == nil })
}

// listNVML asks a library that has been started; has tells which functions it
// has. failed is of the GPUs that cannot be opened.
func listNVML(lib nvml.Interface, has func(symbol string) bool) (gpus []GPU, failed []error, err error) {
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, nil, fmt.Errorf("count GPUs through NVML: %v", ret)
	}
	driver := versionsNVML(lib, has)
	for i := range count {
		dev, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			failed = append(failed, fmt.Errorf("open GPU %d through NVML: %v", i, ret))
			continue
		}
		gpu := GPU{Index: i}
		if gpu.UUID, ret = dev.GetUUID(); ret != nvml.SUCCESS {
			failed = append(failed, fmt.Errorf("read the UUID of GPU %d through NVML: %v", i, ret))
			continue
		}
		if has("nvmlDeviceGetName") {
			gpu.Name, _ = dev.GetName() // for display only
		}
		if has("nvmlDeviceGetMemoryInfo") {
			if mem, ret := dev.GetMemoryInfo(); ret == nvml.SUCCESS {
				gpu.MemoryBytes = mem.Total
			}
		}
		if has("nvmlDeviceGetPciInfo_v3") {
			if pci, ret := dev.GetPciInfo(); ret == nvml.SUCCESS {
				gpu.PCIBusID = fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device) // as the kernel has it
			}
		}
		gpu.Model = modelNVML(driver, dev, has)
		if has("nvmlDeviceGetMinorNumber") {
			if gpu.Minor, ret = dev.GetMinorNumber(); ret != nvml.SUCCESS {
				failed = append(failed, fmt.Errorf("read the device minor of GPU %s through NVML: %v", gpu.UUID, ret))
				continue
			}
		}
		gpu.DeviceNodes = []string{fmt.Sprintf("/dev/nvidia%d", gpu.Minor)}
		if has("nvmlDeviceGetMigDeviceHandleByIndex") && has("nvmlDeviceGetMaxMigDeviceCount") {
			if gpu.Instances, err = instancesNVML(gpu, dev); err != nil {
				return nil, nil, err // one is being made or taken down: who asks tries again
			}
		}
		gpus = append(gpus, gpu)
	}
	return gpus, failed, nil
}

// instancesNVML lists the MIG devices of a GPU; only NVML knows their UUIDs.
func instancesNVML(gpu GPU, dev nvml.Device) (all []Instance, err error) {
	count, ret := dev.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil, nil // this GPU has no MIG mode
	}
	for i := range count {
		mig, ret := dev.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // the numbers have gaps
		}
		in := Instance{Index: i}
		failed := func(what string, ret nvml.Return) ([]Instance, error) {
			return nil, fmt.Errorf("read %s of MIG device %s through NVML: %v", what, in.Name(gpu), ret)
		}
		if in.UUID, ret = mig.GetUUID(); ret != nvml.SUCCESS {
			return failed("the UUID", ret)
		}
		if in.GPUInstance, ret = mig.GetGpuInstanceId(); ret != nvml.SUCCESS {
			return failed("the GPU instance", ret)
		}
		if in.ComputeInstance, ret = mig.GetComputeInstanceId(); ret != nvml.SUCCESS {
			return failed("the compute instance", ret)
		}
		if mem, ret := mig.GetMemoryInfo(); ret == nvml.SUCCESS {
			in.MemoryBytes = mem.Total
		}
		// NVML is only asked about the host that this program runs on. A program
		// that only counts GPUs may be one that does not see these files.
		in.DeviceNodes, _ = host("").instanceNodes(gpu.Minor, in.GPUInstance, in.ComputeInstance)
		all = append(all, in)
	}
	return all, nil
}
