// SPDX-License-Identifier: Apache-2.0

// Package engines runs the scripts of deployments/examples unchanged, each with its
// engine, on the throw-away node of package node. Whatever the engine does with a CDI
// spec, the container must get the driver, the shim and turns on the simulated GPU. The
// units run under a real systemd, in a copy of this machine.
//
// make test runs the machine's podman and the pinned ctr. make engines also runs podman
// and Docker of later Debian releases, make slurm and make apptainer what they name: their
// packages are unpacked into the build directory, never into the machine. nerdctl is in
// neither; it injects through the same package of containerd as ctr.
package engines
