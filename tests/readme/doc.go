// SPDX-License-Identifier: Apache-2.0

// Package readme tests that the commands of README.md and of the
// pages behind it work as they are printed: it runs
// what needs no container engine, with a scheduler and a tenant on the simulated GPU, and
// knows which test runs each other command. A new command that nothing runs fails.
package readme
