// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import (
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
)

// NVML numbers MIG devices with gaps, knows their UUIDs, and says of a GPU
// without MIG mode that it is not supported.
func TestMIGDevicesThroughNVML(t *testing.T) {
	part := func(uuid string, gi int) *mock.Device {
		return &mock.Device{
			GetUUIDFunc:              func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
			GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return gi, nvml.SUCCESS },
			GetComputeInstanceIdFunc: func() (int, nvml.Return) { return 0, nvml.SUCCESS },
			GetMemoryInfoFunc:        func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 20 << 30}, nvml.SUCCESS },
		}
	}
	whole := func(uuid string, minor int, parts map[int]*mock.Device) *mock.Device {
		return &mock.Device{
			GetUUIDFunc:                  func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
			GetNameFunc:                  func() (string, nvml.Return) { return "NVIDIA H200", nvml.SUCCESS },
			GetMemoryInfoFunc:            func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 141 << 30}, nvml.SUCCESS },
			GetPciInfoFunc:               func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{}, nvml.ERROR_UNKNOWN },
			GetBrandFunc:                 func() (nvml.BrandType, nvml.Return) { return nvml.BRAND_NVIDIA, nvml.SUCCESS },
			GetArchitectureFunc:          func() (nvml.DeviceArchitecture, nvml.Return) { return nvml.DEVICE_ARCH_HOPPER, nvml.SUCCESS },
			GetCudaComputeCapabilityFunc: func() (int, int, nvml.Return) { return 9, 0, nvml.SUCCESS },
			GetMinorNumberFunc:           func() (int, nvml.Return) { return minor, nvml.SUCCESS },
			GetMaxMigDeviceCountFunc: func() (int, nvml.Return) {
				if parts == nil {
					return 0, nvml.ERROR_NOT_SUPPORTED
				}
				return 7, nvml.SUCCESS
			},
			GetMigDeviceHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
				if p, ok := parts[i]; ok {
					return p, nvml.SUCCESS
				}
				return nil, nvml.ERROR_NOT_FOUND
			},
		}
	}
	devices := []*mock.Device{whole(uuidA, 1, map[int]*mock.Device{0: part("MIG-a", 9), 3: part("MIG-b", 13)}), whole(uuidB, 0, nil)}
	lib := &mock.Interface{
		DeviceGetCountFunc:             func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		SystemGetDriverVersionFunc:     func() (string, nvml.Return) { return "580.95.05", nvml.SUCCESS },
		SystemGetCudaDriverVersionFunc: func() (int, nvml.Return) { return 13010, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc:     func(i int) (nvml.Device, nvml.Return) { return devices[i], nvml.SUCCESS },
	}
	gpus, _, err := listNVML(lib, func(string) bool { return true })
	if err != nil || len(gpus) != 2 || len(gpus[0].Instances) != 2 || len(gpus[1].Instances) != 0 {
		t.Fatalf("got %+v, %v", gpus, err)
	}
	if in := gpus[0].Instances[1]; in.UUID != "MIG-b" || in.Name(gpus[0]) != "0:3" || in.GPUInstance != 13 || in.MemoryBytes != 20<<30 {
		t.Errorf("the second MIG device is %+v", in)
	}
	if want := (Model{"Nvidia", "Hopper", "9.0", "580.95.05", "13.1"}); gpus[0].Model != want {
		t.Errorf("the GPU is a %+v, want %+v", gpus[0].Model, want)
	}
	// Drivers from before MIG lack the functions, and calling one would end the program.
	gpus, _, err = listNVML(lib, func(symbol string) bool { return symbol != "nvmlDeviceGetMigDeviceHandleByIndex" })
	if err != nil || len(gpus[0].Instances) != 0 {
		t.Errorf("an old library: %+v, %v", gpus, err)
	}
	// MIG devices that tell nothing, as while they are taken down: who asks tries again.
	parts := devices[0]
	devices[0] = whole(uuidA, 1, map[int]*mock.Device{0: {GetUUIDFunc: func() (string, nvml.Return) { return "", nvml.ERROR_UNKNOWN }}})
	if gpus, _, err := listNVML(lib, func(string) bool { return true }); err == nil {
		t.Errorf("odd MIG devices: %+v", gpus)
	}
	devices[0] = parts
	// A GPU that has fallen off the bus takes no others with it.
	lib.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if i == 0 {
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return devices[i], nvml.SUCCESS
	}
	gpus, failed, err := listNVML(lib, func(string) bool { return true })
	if err != nil || len(gpus) != 1 || gpus[0].UUID != uuidB || gpus[0].Index != 1 || len(failed) != 1 {
		t.Errorf("beside a lost one: %+v, %v, %v", gpus, failed, err)
	}
	if gpus, err := usable(nil, failed, nil); len(gpus) != 0 || err == nil {
		t.Errorf("a lost one alone: %v, %v", gpus, err)
	}
}

// What cannot be opened has no sample, and the others do.
func TestSamplesBesideALostGPU(t *testing.T) {
	lost := 0
	s := Sampler{lib: &mock.Interface{
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return errors.New("an old library") }}
		},
		DeviceGetCountFunc: func() (int, nvml.Return) { return 2, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			if i <= lost {
				return nil, nvml.ERROR_UNKNOWN
			}
			return &mock.Device{GetUUIDFunc: func() (string, nvml.Return) { return uuidB, nvml.SUCCESS }}, nvml.SUCCESS
		},
	}}
	s.faults.listen(s.lib)
	if samples, err := s.ask(); err != nil || len(samples) != 1 || samples[0].UUID != uuidB {
		t.Errorf("got %v, %v", samples, err)
	}
	lost = 1
	if samples, err := s.ask(); err == nil {
		t.Errorf("of no GPU: %v", samples)
	}
}

// Some drivers name one process for each period, with all that the GPU had to do in it, others all processes: what they had
// together is never more than all of the time.
func TestBusyIsAMean(t *testing.T) {
	u := func(at uint64, pid, percent uint32) nvml.ProcessUtilizationSample {
		return nvml.ProcessUtilizationSample{Pid: pid, TimeStamp: at, SmUtil: percent}
	}
	var s Sampler
	for _, c := range []struct {
		what string
		says []nvml.ProcessUtilizationSample
		want map[uint32]float64 // nil: nothing is said
	}{
		{"what was before the first look", []nvml.ProcessUtilizationSample{u(3, 1, 100), u(5, 3, 20)}, nil},
		{"one for each period", []nvml.ProcessUtilizationSample{u(10, 1, 100), u(20, 2, 100), u(30, 1, 100), u(40, 1, 60)}, map[uint32]float64{1: 0.65, 2: 0.25}},
		{"one is new", []nvml.ProcessUtilizationSample{u(30, 1, 100), u(50, 2, 80)}, map[uint32]float64{2: 0.8}},
		{"two for a period", []nvml.ProcessUtilizationSample{u(60, 1, 75), u(60, 2, 25)}, map[uint32]float64{1: 0.75, 2: 0.25}},
		{"another look was just there", []nvml.ProcessUtilizationSample{u(60, 1, 75)}, nil},
	} {
		dev := &mock.Device{GetProcessUtilizationFunc: func(uint64) ([]nvml.ProcessUtilizationSample, nvml.Return) { return c.says, nvml.SUCCESS }}
		if got := s.busy(dev, uuidB); !maps.Equal(got, c.want) || (got == nil) != (c.want == nil) {
			t.Errorf("%s: got %v, want %v", c.what, got, c.want)
		}
	}
	idle := &mock.Device{GetProcessUtilizationFunc: func(uint64) ([]nvml.ProcessUtilizationSample, nvml.Return) { return nil, nvml.ERROR_NOT_FOUND }}
	if got := s.busy(idle, uuidB); got != nil {
		t.Errorf("nothing is new since just now: got %v", got)
	}
	was := s.uses[uuidB]
	ahead := uint64(time.Now().Add(time.Hour).UnixMicro())
	s.uses[uuidB] = use{latest: ahead, at: was.at}
	if got := s.busy(idle, uuidB); got != nil || s.uses[uuidB].latest == ahead {
		t.Errorf("the clock was set back: got %v, %+v", got, s.uses[uuidB])
	}
	s.uses[uuidB] = use{latest: was.latest, at: was.at.Add(-longestPeriod)}
	if got := s.busy(idle, uuidB); got == nil || len(got) > 0 {
		t.Errorf("nobody uses the GPU: got %v", got)
	}
}

// The errors of a GPU come too if it could not be opened at first, and when it is back.
func TestErrorsOfALateGPU(t *testing.T) {
	lost, asked := true, 0
	s := Sampler{lib: &mock.Interface{
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(symbol string) error {
				switch symbol {
				case "nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2":
					return nil
				}
				return errors.New("not needed here")
			}}
		},
		EventSetCreateFunc: func() (nvml.EventSet, nvml.Return) {
			return &mock.EventSet{WaitFunc: func(uint32) (nvml.EventData, nvml.Return) {
				return nvml.EventData{}, nvml.ERROR_TIMEOUT
			}}, nvml.SUCCESS
		},
		DeviceGetCountFunc: func() (int, nvml.Return) { return 2, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			uuid := uuidA
			switch {
			case i == 1:
				uuid = uuidB
			case lost:
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			return &mock.Device{
				GetUUIDFunc: func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
				RegisterEventsFunc: func(uint64, nvml.EventSet) nvml.Return {
					asked++
					return nvml.SUCCESS
				},
			}, nvml.SUCCESS
		},
	}}
	s.faults.listen(s.lib)
	for i, c := range []struct {
		lost bool
		want int
	}{{true, 1}, {false, 2}, {false, 2}, {true, 2}, {false, 3}} {
		lost = c.lost
		if _, err := s.ask(); err != nil || asked != c.want {
			t.Errorf("sample %d: asked for errors %d times, want %d; %v", i, asked, c.want, err)
		}
	}
}

// Programs that draw (OpenGL, Vulkan) are in a list of their own.
func TestProcessesThatDraw(t *testing.T) {
	computing := nvml.SUCCESS
	s := Sampler{lib: &mock.Interface{
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(symbol string) error {
				switch symbol {
				case "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses":
					return nil
				}
				return errors.New("not needed here")
			}}
		},
		DeviceGetCountFunc: func() (int, nvml.Return) { return 1, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(int) (nvml.Device, nvml.Return) {
			return &mock.Device{
				GetUUIDFunc: func() (string, nvml.Return) { return uuidA, nvml.SUCCESS },
				GetComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) {
					return []nvml.ProcessInfo{{Pid: 1, UsedGpuMemory: 10}, {Pid: 2, UsedGpuMemory: 20}}, computing
				},
				GetGraphicsRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) {
					return []nvml.ProcessInfo{{Pid: 2, UsedGpuMemory: 20}, {Pid: 3, UsedGpuMemory: 30}}, nvml.SUCCESS
				},
			}, nvml.SUCCESS
		},
	}}
	s.faults.listen(s.lib)
	samples, err := s.ask()
	if err != nil || len(samples) != 1 {
		t.Fatalf("got %v, %v", samples, err)
	}
	if got, want := samples[0].Processes, map[uint32]uint64{1: 10, 2: 20, 3: 30}; !maps.Equal(got, want) {
		t.Errorf("processes: got %v, want %v", got, want)
	}
	if got, want := samples[0].Draws, map[uint32]bool{3: true}; !maps.Equal(got, want) {
		t.Errorf("who only draws: got %v, want %v", got, want)
	}

	// Where the driver does not say who computes, it is not known who uses the GPU.
	computing = nvml.ERROR_UNKNOWN
	if samples, err := s.ask(); err != nil || len(samples) != 1 || samples[0].Processes != nil {
		t.Errorf("got %v, %v", samples, err)
	}
}
