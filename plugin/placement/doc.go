// SPDX-License-Identifier: Apache-2.0

// Package placement chooses the GPUs of a container, from the devices, their tenants
// and the request. It has no state, clock or I/O: the same question always has the
// same answer. The caller records the answer before it asks the next question.
//
// A device can take a container if
//
//   - it is open, or the container had it before it was started again and it does work;
//   - its tenants' promises leave the requested part of its time (core request) and of
//     its memory (memory limit);
//   - all its tenants have the same exclusion label as the container, or neither they
//     nor the container have one;
//   - no tenant has the same anti-affinity label as the container;
//   - a tenant has the same affinity label as the container, or the device is idle, or
//     the container has no affinity label.
//
// Several devices of one container are on different physical GPUs: two MIG devices of
// one GPU are not two GPUs.
//
// Of the devices that can take it, a container gets first those that it had before it
// was started again, then those with its affinity label, and then
//
//   - with a core request: devices in use before idle ones, with the least time left,
//     then with the least memory left (best fit). Whole GPUs stay free for containers
//     that need them.
//   - without a core request: the device with the most time that is promised to nobody,
//     divided by the containers that live on that time already; then with the fewest
//     tenants, then with the most memory left.
//   - at last by index.
package placement
