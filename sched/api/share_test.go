// SPDX-License-Identifier: Apache-2.0

package api

import "testing"

// What is written can be read again.
func TestShareText(t *testing.T) {
	for _, n := range []uint32{1, 60, 100} {
		if got, err := ParsePercent(FormatPercent(n)); got != n || err != nil {
			t.Errorf("%d %%: %d, %v", n, got, err)
		}
	}
	for _, n := range []uint32{1, 100, MaxWeight} {
		if got, err := ParseWeight(FormatWeight(n)); got != n || err != nil {
			t.Errorf("weight %d: %d, %v", n, got, err)
		}
	}
	for _, p := range []Priority{Priority_PRIORITY_BATCH, Priority_PRIORITY_LATENCY} {
		if got, err := ParsePriority(FormatPriority(p)); got != p || err != nil {
			t.Errorf("%v: %v, %v", p, got, err)
		}
	}
	for _, gang := range []string{"", "ring", "a.b_c-1"} {
		if got, err := ParseGang(FormatGang(gang)); got != gang || err != nil {
			t.Errorf("gang %q: %q, %v", gang, got, err)
		}
	}
	for name, got := range map[string]string{FormatPercent(0): "none", FormatWeight(0): "100", FormatPriority(0): "batch", FormatGang(GangOfItself): "of itself", FormatGang("ml/ring"): "ml/ring"} {
		if name != got {
			t.Errorf("%q, want %q", name, got)
		}
	}
}
