// SPDX-License-Identifier: Apache-2.0

// Package timeslice says how long the GPU's own time slices of processes are, where these share the
// GPU by them, and measures how fast each gets on. It is pure arithmetic.
//
// Progress is what is known of one client: how many calls it makes when it has the GPU alone, and beside
// others. Search finds the longest slice: longer ones are tried, and kept if clients gain by that and
// none is harmed. Lengths gives each process a slice in the proportion of its part.
//
// A slice is the driver's own, or from LeastSlice to MaxSlice. Programs that gain nothing by long slices
// have the driver's own for nine tenths of the time at least. A program that is harmed by longer slices
// has these for one window of each try, and tries are made after a time that doubles.
package timeslice
