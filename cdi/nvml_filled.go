// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import "github.com/NVIDIA/go-nvml/pkg/nvml"

// filled returns Sample.Filled of a GPU. Hopper and later count it; the two counts are percent.
func (s *Sampler) filled(dev nvml.Device, uuid string) (part float64) {
	if support, ret := dev.GpmQueryDeviceSupport(); ret != nvml.SUCCESS || support.IsSupportedDevice == 0 {
		return 0
	}
	now, ret := s.lib.GpmSampleAlloc()
	if ret != nvml.SUCCESS {
		return 0
	}
	if ret := dev.GpmSampleGet(now); ret != nvml.SUCCESS {
		now.Free()
		return 0
	}
	if before := s.before[uuid]; before != nil {
		m := nvml.GpmMetricsGetType{NumMetrics: 2, Sample1: before, Sample2: now}
		m.Metrics[0].MetricId, m.Metrics[1].MetricId = uint32(nvml.GPM_METRIC_GRAPHICS_UTIL), uint32(nvml.GPM_METRIC_SM_UTIL)
		if s.lib.GpmMetricsGet(&m) == nvml.SUCCESS && m.Metrics[0].NvmlReturn == 0 && m.Metrics[1].NvmlReturn == 0 && m.Metrics[0].Value >= 50 {
			part = min(m.Metrics[1].Value/m.Metrics[0].Value, 1)
		}
		before.Free()
	}
	if s.before == nil {
		s.before = map[string]nvml.GpmSample{}
	}
	s.before[uuid] = now
	return part
}

func (s *Sampler) forgetFilled() {
	for _, sample := range s.before {
		sample.Free()
	}
	s.before = nil
}
