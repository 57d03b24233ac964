// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// The bound is reached where parts fit exactly, and knows parts that cannot share.
func TestPacking(t *testing.T) {
	for _, c := range []struct {
		sizes []int64
		want  int
	}{
		{nil, 0},
		{[]int64{100}, 1},
		{[]int64{50, 50, 50}, 2},
		{[]int64{60, 60, 60}, 3},         // 180, and never two in one
		{[]int64{70, 70, 40, 40}, 3},     // 40 does not fit beside 70
		{[]int64{70, 70, 30, 30}, 2},     // 30 does
		{[]int64{34, 34, 34}, 2},         // 102
		{[]int64{51, 51, 49, 49, 10}, 3}, // full, and one more
	} {
		if got := packing(c.sizes, 100); got != c.want {
			t.Errorf("%v need %d bins at least, want %d", c.sizes, got, c.want)
		}
	}
}
