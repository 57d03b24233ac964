// SPDX-License-Identifier: Apache-2.0

package main

import "slices"

// bound returns how many GPUs every placement needs at least: the bound L2 of Martello and
// Toth for bin packing, for time and memory each, and the greater of the two.
func bound(asks []ask) int {
	var cores, memory []int64
	for _, a := range asks {
		cores, memory = append(cores, a.Cores), append(memory, a.Memory)
	}
	return max(packing(cores, 100), packing(memory, gpuMemory))
}

// packing is L2 for bins of a size. For each small size k: two parts above size-k never
// share a bin with each other or with a part of k or more; two of more than half a bin
// never share one; what is left of these bins takes other parts of k or more.
func packing(sizes []int64, bin int64) (most int) {
	kinds := slices.Compact(slices.Sorted(slices.Values(sizes)))
	for _, k := range append([]int64{0}, kinds...) {
		if k > bin/2 {
			break
		}
		var whole, half int64
		var inHalf, small int64
		for _, s := range sizes {
			switch {
			case s > bin-k:
				whole++
			case 2*s > bin:
				half++
				inHalf += s
			case s >= k:
				small += s
			}
		}
		more := max(0, small-(half*bin-inHalf))
		most = max(most, int(whole+half+(more+bin-1)/bin))
	}
	return most
}
