//go:build !cgo

// SPDX-License-Identifier: Apache-2.0

package cuda

import "errors"

// Driver is never opened.
type Driver struct{}

// Open fails: a static program cannot load the driver, nor the shim.
func Open() (*Driver, error) {
	return nil, errors.New("this nvsharectl is a static program, which cannot load the CUDA driver: use the one that is linked with the C library")
}

// Spin, Total, Alloc and Read are for callers to compile.
func (*Driver) Spin(int, uint64) error                     { return nil }
func (*Driver) Total() (uint64, error)                     { return 0, nil }
func (*Driver) Alloc(uint64, uint32) (uint64, bool, error) { return 0, false, nil }
func (*Driver) Read([]byte, uint64) error                  { return nil }
