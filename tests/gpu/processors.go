// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// processors are those that this program may use, which need not be the host's first.
type processors []int

func ownProcessors() (processors, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("which processors there are: %w", err)
	}
	var all processors
	for cpu := 0; len(all) < set.Count(); cpu++ {
		if set.IsSet(cpu) {
			all = append(all, cpu)
		}
	}
	return all, nil
}

// part is the i-th set of n of them.
func (p processors) part(i, n int) *unix.CPUSet {
	var set unix.CPUSet
	for _, cpu := range p[i*n : (i+1)*n] {
		set.Set(cpu)
	}
	return &set
}
