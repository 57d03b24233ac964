//go:build !cgo

// SPDX-License-Identifier: Apache-2.0

package main

import "errors"

type driver struct{}

// openDriver fails: a static program cannot load the driver, nor the shim.
func openDriver() (*driver, error) {
	return nil, errors.New("this nvsharectl is a static program, which cannot load the CUDA driver: use the one that is linked with the C library")
}

func (*driver) spin(int, uint64) error                     { return nil }
func (*driver) total() (uint64, error)                     { return 0, nil }
func (*driver) alloc(uint64, uint32) (uint64, bool, error) { return 0, false, nil }
func (*driver) read([]byte, uint64) error                  { return nil }
