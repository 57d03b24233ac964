// SPDX-License-Identifier: Apache-2.0

// Package robustness lets a hundred real processes with the real shim share a simulated
// GPU, and ends schedulers and tenants in many ways. The GPU's own record judges: no
// process exits, no two hold the GPU at the same time, and turns go on. Tenants run as the
// user of the test, without containers; the scheduler does so, or as a user without rights.
package robustness
