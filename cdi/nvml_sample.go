// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Sampler asks the driver, through NVML, how busy GPUs are. NVML stays started
// from one Sample to the next, until Release: starting it takes a while, and a second for each
// GPU where the driver does not keep them initialised. A Sampler must not be
// copied after the first Sample.
type Sampler struct {
	SimDir string // directory of a simulated GPU; empty: this host's GPUs

	lib    nvml.Interface  // nil: not started
	lacks  map[string]bool // which functions, since it was started
	faults faults
	uses   map[string]use // by UUID
}

// use is how far it is known what processes had of a GPU.
type use struct {
	latest uint64    // the driver's time of the latest period in which one used it
	at     time.Time // the latest look that said something
}

// longestPeriod is that of any driver, over which it says what a process had.
const longestPeriod = time.Second

// Sample returns what NVML says of each GPU that it can open, or ErrNoNVML. It returns when ctx
// ends even if NVML hangs; further calls then fail until it goes on.
func (s *Sampler) Sample(ctx context.Context) ([]Sample, error) {
	var samples []Sample
	err := inside(ctx, func() (err error) {
		samples, err = s.sample()
		return err
	})
	if err != nil {
		return nil, err
	}
	return samples, nil
}

// Release ends NVML, without which the driver cannot be unloaded and no GPU reset, unless NVML
// hangs until ctx ends. Errors of GPUs until the next Sample are not told.
func (s *Sampler) Release(ctx context.Context) {
	_ = inside(ctx, func() error {
		s.stop()
		return nil
	})
}

func (s *Sampler) stop() {
	if s.lib != nil {
		s.lib.Shutdown()
		s.lib = nil
	}
}

func (s *Sampler) sample() ([]Sample, error) {
	if s.lib == nil {
		if err := s.start(); err != nil {
			return nil, err
		}
	}
	samples, err := s.ask()
	if err != nil { // the driver was changed, or a GPU fell off
		s.stop()
	}
	return samples, err
}

func (s *Sampler) start() (err error) {
	var n NVML
	if s.SimDir != "" {
		if n, _, err = (Simulated{s.SimDir}).nvml(); err != nil {
			return err
		}
	}
	lib, err := n.start()
	if err == nil {
		s.lib, s.lacks = lib, nil
		s.faults.listen(lib)
	}
	return err
}

func (s *Sampler) ask() ([]Sample, error) {
	count, ret := s.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count GPUs through NVML: %v", ret)
	}
	s.faults.collect()
	var samples []Sample
	var failed []error
	for i := range count {
		dev, ret := s.lib.DeviceGetHandleByIndex(i)
		if sample, ok := s.faults.lost(i, ret); ok {
			samples = append(samples, sample)
			continue
		}
		if ret != nvml.SUCCESS {
			failed = append(failed, fmt.Errorf("open GPU %d through NVML: %v", i, ret))
			continue
		}
		sample := Sample{Utilization: -1, MemoryUtilization: -1}
		if sample.UUID, ret = dev.GetUUID(); ret != nvml.SUCCESS {
			failed = append(failed, fmt.Errorf("read the UUID of GPU %d through NVML: %v", i, ret))
			continue
		}
		s.faults.saw(i, sample.UUID, dev)
		s.measure(dev, &sample)
		s.faults.fill(&sample)
		samples = append(samples, sample)
	}
	if len(samples) == 0 {
		return nil, errors.Join(failed...)
	}
	return samples, nil // the metrics say of which GPUs there is none
}

// read asks for one figure, if the library has the function: a call to one that it lacks would end this
// program.
func read[T any](s *Sampler, symbol string, ask func() (T, nvml.Return)) (figure T, ok bool) {
	lacks, known := s.lacks[symbol]
	if !known {
		if s.lacks == nil {
			s.lacks = map[string]bool{}
		}
		lacks = s.lib.Extensions().LookupSymbol(symbol) != nil
		s.lacks[symbol] = lacks
	}
	if lacks {
		return figure, false
	}
	figure, ret := ask()
	return figure, ret == nvml.SUCCESS
}

// measure fills in what the driver says of a GPU.
func (s *Sampler) measure(dev nvml.Device, sample *Sample) {
	if u, ok := read(s, "nvmlDeviceGetUtilizationRates", dev.GetUtilizationRates); ok {
		sample.Utilization, sample.MemoryUtilization = float64(u.Gpu)/100, float64(u.Memory)/100
	}
	if mw, ok := read(s, "nvmlDeviceGetPowerUsage", dev.GetPowerUsage); ok {
		sample.Watts = (mw + 500) / 1000
	}
	sample.Celsius, _ = read(s, "nvmlDeviceGetTemperature", func() (uint32, nvml.Return) { return dev.GetTemperature(nvml.TEMPERATURE_GPU) })
	if m, ok := read(s, "nvmlDeviceGetMemoryInfo", dev.GetMemoryInfo); ok {
		sample.MemoryTotal, sample.MemoryUsed, sample.MemoryFree = m.Total, m.Used, m.Free
	}
	if ps, ok := read(s, "nvmlDeviceGetComputeRunningProcesses", dev.GetComputeRunningProcesses); ok {
		sample.Processes = memoryOf(ps)
		if ps, ok := read(s, "nvmlDeviceGetGraphicsRunningProcesses", dev.GetGraphicsRunningProcesses); ok {
			sample.addGraphics(memoryOf(ps))
		}
	}
	sample.Busy, _ = read(s, "nvmlDeviceGetProcessUtilization", func() (map[uint32]float64, nvml.Return) {
		return s.busy(dev, sample.UUID), nvml.SUCCESS
	})
}

// memoryOf returns the memory of processes, by pid, in bytes. A process has a line for each context.
func memoryOf(ps []nvml.ProcessInfo) map[uint32]uint64 {
	memory := make(map[uint32]uint64, len(ps))
	for _, p := range ps {
		bytes := p.UsedGpuMemory
		if bytes == ^uint64(0) { // NVML_VALUE_NOT_AVAILABLE
			bytes = 0
		}
		memory[p.Pid] += bytes
	}
	return memory
}

// addGraphics adds the processes that draw. The driver lists one that computes as well in both lists, with the same memory.
func (s *Sample) addGraphics(memory map[uint32]uint64) {
	s.Draws = map[uint32]bool{}
	for pid, bytes := range memory {
		if _, computes := s.Processes[pid]; !computes {
			s.Processes[pid], s.Draws[pid] = bytes, true
		}
	}
}

// busy returns which part of a GPU's time processes had lately, nil if the driver does not
// say.
func (s *Sampler) busy(dev nvml.Device, uuid string) (parts map[uint32]float64) {
	// The library counts first and reads then, and panics if there are more by then.
	defer func() {
		if recover() != nil {
			parts = nil
		}
	}()
	if s.uses == nil {
		s.uses = map[string]use{}
	}
	was, known := s.uses[uuid]
	if known && time.UnixMicro(int64(was.latest)).After(time.Now().Add(time.Minute)) {
		known, was = false, use{} // the host's clock was set back, by which the driver says when periods ended
	}
	used, ret := dev.GetProcessUtilization(was.latest)
	if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_FOUND {
		return nil
	}
	parts = make(map[uint32]float64, len(used))
	periods := map[uint64]bool{} // by when they ended; of each the driver may name one process only
	now := use{latest: was.latest, at: time.Now()}
	for _, u := range used {
		if u.TimeStamp > was.latest {
			parts[u.Pid] += float64(u.SmUtil) / 100
			periods[u.TimeStamp] = true
			now.latest = max(now.latest, u.TimeStamp)
		}
	}
	if len(periods) == 0 && known && now.at.Sub(was.at) < longestPeriod {
		return nil // no period has ended since: another look was there just now
	}
	s.uses[uuid] = now
	if !known {
		return nil // the driver remembers many seconds
	}
	for pid := range parts {
		parts[pid] /= float64(len(periods))
	}
	return parts
}
