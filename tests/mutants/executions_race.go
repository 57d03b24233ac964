// SPDX-License-Identifier: Apache-2.0

//go:build race

package mutants

// executions is how many inputs Run gives a target. With the race detector each takes four times
// as long, and the inputs are the first of those without it.
const executions = 2_500
