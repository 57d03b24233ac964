// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package cdi

import (
	"context"
	"fmt"

	"github.com/sirupsen/logrus"
)

// NVML would list GPUs through NVIDIA's management library, which cannot be
// loaded without cgo.
type NVML struct {
	Library string
	Log     logrus.FieldLogger
}

var _ Lister = NVML{}

// List returns ErrNoNVML.
func (NVML) List(context.Context) ([]GPU, error) {
	return nil, fmt.Errorf("%w: built without cgo", ErrNoNVML)
}

func (n NVML) look(ctx context.Context) ([]GPU, bool, error) {
	_, err := n.List(ctx)
	return nil, false, err
}

// Sampler would ask NVML how busy GPUs are.
type Sampler struct{ SimDir string }

// Release does nothing.
func (*Sampler) Release(context.Context) {}

// Sample returns ErrNoNVML.
func (*Sampler) Sample(ctx context.Context) ([]Sample, error) {
	_, err := NVML{}.List(ctx)
	return nil, err
}
