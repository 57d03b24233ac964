// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import (
	"context"
	"errors"
	"strings"
	"testing"
)

// While one call hangs in NVML, others give up without a thread of their own.
func TestHungNVMLIsEnteredOnce(t *testing.T) {
	inNVML <- struct{}{}
	defer func() { <-inNVML }()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := (NVML{}).List(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "earlier call") {
		t.Errorf("got %v", err)
	}
	if _, err := new(Sampler).Sample(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "earlier call") {
		t.Errorf("a sample: %v", err)
	}
}

// A node without driver is told apart from one with a driver that fails.
func TestSamplerWithoutNVML(t *testing.T) {
	dir := t.TempDir() // no libnvidia-ml.so.1 in it
	if _, err := (&Sampler{SimDir: dir}).Sample(context.Background()); !errors.Is(err, ErrNoNVML) {
		t.Errorf("got %v", err)
	}
}
