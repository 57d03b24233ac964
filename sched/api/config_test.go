// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"testing"
)

func TestParseSwapShare(t *testing.T) {
	for text, want := range map[string]uint32{"none": 0, "0": 0, "1": 1, "10%": 10, "50": 50} {
		if got, err := ParseSwapShare(text); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "51", "-1", "2.5", "half", "0%", "None"} {
		if got, err := ParseSwapShare(text); err == nil || !strings.Contains(err.Error(), "from 1 to 50, or none") {
			t.Errorf("%q is %d, %v", text, got, err)
		}
	}
}
