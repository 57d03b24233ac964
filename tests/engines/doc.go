// SPDX-License-Identifier: Apache-2.0

// Package engines runs the examples of deployments/examples as they are, each
// with the engine that it is for, on the throw-away node of package node: a
// container on the simulated GPU must be found by name, get the driver, the shim
// and its turn, whatever the engine does with a CDI spec.
//
// make test runs what the machine has: podman as installed, and ctr as pinned.
// make engines also runs podman and Docker of later Debian releases, whose
// packages it unpacks into the build directory, never into the machine.
// nerdctl is in neither, and its module is not to be had from the Go proxy: it
// injects through the same package of containerd as ctr.
package engines
