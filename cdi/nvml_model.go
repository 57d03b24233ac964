// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The names are those that NVIDIA's own driver for resource claims uses.
var (
	brands = map[nvml.BrandType]string{
		nvml.BRAND_QUADRO: "Quadro", nvml.BRAND_TESLA: "Tesla", nvml.BRAND_NVS: "NVS", nvml.BRAND_GRID: "Grid",
		nvml.BRAND_TITAN: "Titan", nvml.BRAND_GEFORCE: "GeForce", nvml.BRAND_QUADRO_RTX: "QuadroRTX", nvml.BRAND_NVIDIA_RTX: "NvidiaRTX",
		nvml.BRAND_NVIDIA: "Nvidia", nvml.BRAND_GEFORCE_RTX: "GeForceRTX", nvml.BRAND_TITAN_RTX: "TitanRTX",
	}
	architectures = map[nvml.DeviceArchitecture]string{
		nvml.DEVICE_ARCH_KEPLER: "Kepler", nvml.DEVICE_ARCH_MAXWELL: "Maxwell", nvml.DEVICE_ARCH_PASCAL: "Pascal",
		nvml.DEVICE_ARCH_VOLTA: "Volta", nvml.DEVICE_ARCH_TURING: "Turing", nvml.DEVICE_ARCH_AMPERE: "Ampere",
		nvml.DEVICE_ARCH_ADA: "Ada Lovelace", nvml.DEVICE_ARCH_HOPPER: "Hopper", nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
		nvml.DEVICE_ARCH_RUBIN: "Rubin",
	}
)

// versionsNVML says the versions of the driver.
func versionsNVML(lib nvml.Interface, has func(symbol string) bool) (m Model) {
	if has("nvmlSystemGetDriverVersion") {
		m.DriverVersion, _ = lib.SystemGetDriverVersion()
	}
	if has("nvmlSystemGetCudaDriverVersion") {
		if v, ret := lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
			m.CUDAVersion = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
		}
	}
	return m
}

// modelNVML adds what NVML says of one GPU.
func modelNVML(m Model, dev nvml.Device, has func(symbol string) bool) Model {
	if has("nvmlDeviceGetBrand") {
		if brand, ret := dev.GetBrand(); ret == nvml.SUCCESS {
			m.Brand = brands[brand]
		}
	}
	if has("nvmlDeviceGetArchitecture") {
		if arch, ret := dev.GetArchitecture(); ret == nvml.SUCCESS {
			m.Architecture = architectures[arch]
		}
	}
	if has("nvmlDeviceGetCudaComputeCapability") {
		if major, minor, ret := dev.GetCudaComputeCapability(); ret == nvml.SUCCESS {
			m.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
		}
	}
	return m
}
