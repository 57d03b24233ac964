// SPDX-License-Identifier: Apache-2.0

// Package quantile has the quantiles that measurements and their report state, so that both
// mean the same.
package quantile

import "slices"

// Of interpolates linearly between the sorted samples, of which there is at least one. q is from
// 0 to 1.
func Of(v []float64, q float64) float64 {
	v = slices.Sorted(slices.Values(v))
	at := q * float64(len(v)-1)
	i := int(at)
	if i+1 >= len(v) {
		return v[len(v)-1]
	}
	return v[i] + (at-float64(i))*(v[i+1]-v[i])
}
