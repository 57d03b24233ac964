// SPDX-License-Identifier: Apache-2.0

// Package placement chooses the GPUs of a container: from what there is, who has
// what of it, and what is asked for. It has no state, clock or I/O, so that the
// same question always has the same answer; whoever asks keeps the book, and
// writes the answer into it before the next question.
//
// A device can take a container if
//
//   - what its tenants were promised leaves the part of its time (core request)
//     and of its memory (memory limit) that is asked for;
//   - all its tenants have the same exclusion label as the container, none
//     included: a container without goes to no device of those with one;
//   - no tenant has the same anti-affinity label as the container;
//   - with an affinity label: a tenant has the same, or the device is idle.
//
// Several devices of one container are of different physical GPUs: two MIG
// devices of one GPU are not two GPUs.
//
// Among the devices that can take it, those come first that it had before it was
// started again, then those with its affinity label, and then
//
//   - for a part of a GPU (a core request): those in use before idle ones, where
//     the least time is left after it, then the least memory (best fit), so that
//     whole GPUs stay free for who needs them;
//   - without a core request, as such a container lives on what is promised to
//     nobody: where that is most, divided by those who live on it already, then
//     the one with the fewest tenants, then with the most memory left;
//   - at last by index.
package placement
