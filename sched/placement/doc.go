// SPDX-License-Identifier: Apache-2.0

// Package placement decides on which GPU of a node a tenant is: where a new container begins, whether
// a tenant may move to another GPU, and to which. It is pure: the caller carries the answer out, and
// counts it before it asks the next question.
//
// A tenant never goes to a GPU of whose time more than 100 % would then be promised, that is drained or
// does no work, or that its processes cannot open. One that moves goes only where there is a place for its
// memory, and to the same model. Each refusal names its reason. A new container begins on the GPU with
// the fewest tenants; one that moves goes where the least memory is promised.
//
// Whose move makes room for a container that fits nowhere is decided by plugin/placement.
package placement
