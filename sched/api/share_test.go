// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"testing"
)

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
	for name, got := range map[string]string{FormatPercent(0): "none", FormatWeight(0): "100", FormatPriority(0): "batch", FormatGang(GangOfItself): "of itself"} {
		if name != got {
			t.Errorf("%q, want %q", name, got)
		}
	}
}

func TestValidateShare(t *testing.T) {
	for _, s := range []*Share{nil, {}, {CoreLimit: 100, CoreRequest: 100, Weight: MaxWeight, Priority: Priority_PRIORITY_LATENCY, Gang: "true"}, {CoreRequest: 100}} {
		if err := s.Validate(); err != nil {
			t.Errorf("%v: %v", s, err)
		}
	}
	for says, s := range map[string]*Share{
		"core limit 101": {CoreLimit: 101}, "core request 101": {CoreRequest: 101}, "above the core limit": {CoreLimit: 5, CoreRequest: 6},
		"weight 10001": {Weight: 10001}, "priority 3": {Priority: 3}, "priority -1": {Priority: -1}, `gang "a b"`: {Gang: "a b"},
		strings.Repeat("x", 64): {Gang: strings.Repeat("x", 64)},
	} {
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v, want %q", s, err, says)
		}
	}
}
