// SPDX-License-Identifier: Apache-2.0

// Package robustness has a hundred real processes with the real shim share a
// simulated GPU, ends schedulers and tenants in all ways, and lets the GPU's own
// record judge: nobody exits, nobody has the GPU beside another, and turns go on.
// Everything runs as the user that runs the test; no containers are needed.
package robustness
