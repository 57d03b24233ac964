// SPDX-License-Identifier: Apache-2.0

// Package timeslice says how long the GPU's own time slices of processes are, where these share the
// GPU by them, and measures how fast each gets on. It is pure arithmetic: what has to be known of
// clients is told, and who shares the GPU in which way is decided elsewhere.
//
// Progress is what is known of one client: how many calls it makes in turns, when it has the GPU
// alone, and beside others. Their quotient is what it gets of what it would get alone.
//
// Search finds the longest slice. It is asked once a window, by the speeds of all: longer slices are
// tried, and kept if clients gain by that and none is harmed. Lengths gives each process a slice in the
// proportion of its part.
//
// # Guarantees
//
// A slice is the driver's own, or from LeastSlice to MaxSlice. Parts have slices in their proportion, as
// far as these bounds allow it. Programs that gain nothing by long slices have the driver's own for nine
// tenths of the time at least, though measurements scatter. A program that is harmed by longer slices
// has these for one window of each try, and tries are made after a time that doubles.
package timeslice
