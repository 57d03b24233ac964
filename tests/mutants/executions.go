// SPDX-License-Identifier: Apache-2.0

//go:build !race

package mutants

// executions is how many inputs Run gives a target.
const executions = 50_000
