// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// What starts.json holds.
type startsResult struct {
	Tenants int       `json:"tenants"` // of a trial; a native process starts beside them
	Seconds []float64 `json:"seconds"` // of each trial, until all have used the GPU
}

// startsStep starts programs at the same time, again and again. The shim tries the driver's
// controls while a program makes its first calls, which once left programs hanging.
func (b *bench) startsStep(ctx context.Context, _ string) error {
	old := b.shared
	defer func() { b.shared = old }()
	r, trials := startsResult{Tenants: 6}, 20
	if b.cells.quick || b.simulated {
		trials = 3
	}
	b.shared = nil
	if _, err := b.pool(ctx, 0, 1); err != nil { // files are read from the disk once
		return err
	}
	for i := range trials {
		if err := b.shared.stop(); err != nil {
			return err
		}
		b.shared = nil
		began := time.Now()
		if _, err := b.pool(ctx, r.Tenants, 1); err != nil {
			return fmt.Errorf("trial %d of %d: %w", i+1, trials, errors.Join(err, b.shared.stop()))
		}
		r.Seconds = append(r.Seconds, round(time.Since(began).Seconds(), 1))
	}
	if err := b.shared.stop(); err != nil {
		return err
	}
	fmt.Printf("  %d times %d tenants started and used the GPU: held\n", trials, r.Tenants)
	return b.saveJSON("starts.json", r)
}
