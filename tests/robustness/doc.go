// SPDX-License-Identifier: Apache-2.0

// Package robustness lets a hundred real processes with the real shim share a simulated
// GPU, and ends schedulers and tenants in many ways. Hostile users crowd the scheduler's
// door and send it each kind of frame as fast as they can. The GPU's own record judges: no
// process exits, no two hold the GPU at the same time, and turns go on. All processes run
// without containers, and as the user of the test where they are not hostile users.
package robustness
