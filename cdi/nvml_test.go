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
}
