// SPDX-License-Identifier: Apache-2.0

package cdi

// Model is what the driver says of a GPU's kind, and of itself. What the lister cannot
// know is empty.
type Model struct {
	Brand             string // "GeForce", "Tesla", "Nvidia"
	Architecture      string // "Hopper"
	ComputeCapability string // "9.0"
	DriverVersion     string // "580.95.05"
	CUDAVersion       string // the latest one that the driver supports: "13.0"
}
