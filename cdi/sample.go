// SPDX-License-Identifier: Apache-2.0

package cdi

// Sample is what the driver says of a GPU, just now.
type Sample struct {
	UUID string
	// From 0 to 1, negative if the driver does not say.
	Utilization       float64 // part of the time in which a kernel ran
	MemoryUtilization float64 // part of the time in which its memory was read or written
	// 0 if the driver does not say.
	Watts, Celsius uint32
	// Bytes, all 0 if the driver does not say.
	MemoryTotal, MemoryUsed, MemoryFree uint64
	// Processes are those that use the GPU, with the bytes of its memory that
	// they have (0: unknown), by pid. Nil if the driver does not say.
	Processes map[uint32]uint64
	// Draws are those of them that use it for graphics only, as a desktop does.
	Draws map[uint32]bool
	// Busy is which part of the GPU's time processes had lately, by pid, from 0 to 1: the mean
	// of the periods, of a second at most, that ended since the Sample before and in which somebody
	// used it. Nil if the driver does not say.
	Busy map[uint32]float64
	// Faults counts what ended all work on the GPU, since the first sample; Fault is the
	// latest.
	Faults uint64
	Fault  string
}
