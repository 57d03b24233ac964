// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Wish is what one process is to have of the time slices.
type Wish struct {
	Part  float64 // of the GPU, in any unit; 0: it does not share
	Fixed bool    // its slice stays the driver's own, and those of others are in proportion to it
}

// Lengths returns the slices of processes in the proportion of their parts; 0: the driver's own. The
// longest is as the search says, and bound at most.
func (s *Search) Lengths(wishes []Wish, bound time.Duration) []time.Duration {
	out := make([]time.Duration, len(wishes))
	least, most, fixed := 0.0, 0.0, 0.0
	for _, w := range wishes {
		if w.Part == 0 {
			continue
		}
		if w.Fixed {
			fixed = max(fixed, w.Part)
		}
		if least == 0 || w.Part < least {
			least = w.Part
		}
		most = max(most, w.Part)
	}
	longest := min(s.longest, bound)
	if longest == 0 || fixed > 0 {
		if most-least < most/50 { // nothing to be said against the driver's own
			return out
		}
		longest = DriverSlice
	}
	// The smallest part has LeastSlice, unless the others would have more than MaxSlice. Where
	// that needs slices longer than the driver's, those that are tried are longer as well.
	unit := max(DriverSlice, time.Duration(float64(LeastSlice)*most/max(least, 1)))
	longest = min(time.Duration(float64(longest)*unit.Seconds()/DriverSlice.Seconds()), MaxSlice)
	if fixed > 0 {
		most, longest = fixed, DriverSlice
	}
	for i, w := range wishes {
		if w.Part > 0 && !w.Fixed {
			out[i] = base.Clamp(time.Duration(float64(longest)*w.Part/most).Round(10*time.Microsecond), LeastSlice, MaxSlice)
		}
	}
	return out
}
