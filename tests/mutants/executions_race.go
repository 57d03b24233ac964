// SPDX-License-Identifier: Apache-2.0

//go:build race

package mutants

// executions is how many inputs Run gives a target. With the race detector each takes four times
// as long.
const executions = 10_000
