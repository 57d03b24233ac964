// SPDX-License-Identifier: Apache-2.0

package api

import "fmt"

// Names of settings of GPUs, which say how tenants share a GPU.
const (
	TurnLengthSetting = "turn-length" // the time quantum
	AntiThrashSetting = "anti-thrash"
	SwapShareSetting  = "swap-share"
)

// MaxSwapShare is the greatest swap share, percent.
const MaxSwapShare = 50

// ParseSwapShare reads the percentage of the time that moving memory may take; none, or 0: turns
// are as long as the time quantum says.
func ParseSwapShare(s string) (uint32, error) {
	if s == "none" || s == "0" {
		return 0, nil
	}
	n, err := ParsePercent(s)
	if err != nil || n > MaxSwapShare {
		return 0, fmt.Errorf("%.64q is not a share of the time: give a percentage from 1 to %d, or none", s, MaxSwapShare)
	}
	return n, nil
}
