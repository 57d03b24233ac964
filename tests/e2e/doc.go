// SPDX-License-Identifier: Apache-2.0

// Package e2e has the end-to-end tests: real containerd, runc and podman, and the
// daemons as they are shipped. They run with the build tag e2e (make test-e2e), need
// root, and change nothing of the machine: see package node.
//
// Whether two tenants used a GPU at the same time is read from the record of the
// simulated GPU, never from nvshare's own view.
package e2e
