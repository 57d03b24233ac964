// SPDX-License-Identifier: Apache-2.0

// Package placement decides on which GPU of a node a tenant is: where a new container
// begins, whether a tenant may move to another GPU, and to which. It has no state, clock or
// I/O: the same question always has the same answer. The caller carries the answer out, and
// counts it before it asks the next question.
//
// What it guarantees:
//
//   - A tenant never goes to a GPU of whose time more than 100 % would then be promised. One
//     that moves does not go to a GPU either whose core has no place for the tenant's memory.
//   - A tenant never goes to a GPU that is drained or does no work, or that its processes
//     cannot open. One that moves does not go to another model or to a MIG device either.
//   - A tenant that may not move never has a destination, and each refusal names its reason.
//   - A new container begins on the GPU with the fewest tenants, and of these on the one of
//     which the least memory is reserved. A tenant that moves goes to the GPU of which the
//     least memory is promised. Of equal GPUs the first is taken.
//
// Whose move makes room for a container that fits nowhere is decided by plugin/placement,
// which knows the labels and limits of containers that have not begun.
package placement
