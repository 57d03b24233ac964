// SPDX-License-Identifier: Apache-2.0

package memory

import "testing"

const mib, gib = 1 << 20, 1 << 30

func TestHalfOfSpare(t *testing.T) {
	for _, tc := range []struct{ free, total, want uint64 }{
		{free: 80 * gib, total: 80 * gib, want: 35 * gib},
		{free: 10*gib + 63*mib, total: 80 * gib, want: 0}, // less than a segment
		{free: 10 * gib, total: 80 * gib, want: 0},
		{free: 5 * gib, total: 80 * gib, want: 0},
		{free: 12*gib + 100*mib, total: 80 * gib, want: gib},
	} {
		if got := HalfOfSpare(tc.free, tc.total); got != tc.want {
			t.Errorf("of %d MiB with %d free: %d MiB, want %d", tc.total>>20, tc.free>>20, got>>20, tc.want>>20)
		}
	}
}
