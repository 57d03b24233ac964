// SPDX-License-Identifier: Apache-2.0

package quantile

import (
	"math"
	"testing"
)

func TestOf(t *testing.T) {
	v := []float64{4, 1, 3, 2}
	for q, want := range map[float64]float64{0: 1, 0.25: 1.75, 0.5: 2.5, 1: 4} {
		if got := Of(v, q); math.Abs(got-want) > 1e-12 {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
}
