// SPDX-License-Identifier: Apache-2.0

// Package e2e has the end-to-end tests: real containerd, runc and podman,
// the daemons as they are shipped, a simulated GPU as judge. They run with
// the build tag e2e (make test-e2e), need root, and touch nothing of the
// machine: see package node.
//
// Whether tenants kept out of each other's way is read from the record of
// the simulated GPU, never from nvshare's own view.
package e2e
