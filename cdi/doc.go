// SPDX-License-Identifier: Apache-2.0

// Package cdi finds the GPUs of this node and describes them to container
// engines as CDI devices (https://github.com/cncf-tags/container-device-interface).
//
// What it guarantees:
//
//   - A device nvshare.com/gpu=<index>, =<UUID> or =all is complete in itself:
//     the GPU's device nodes, the driver's files, the shim and the scheduler's
//     socket directory. It needs no other vendor's hook or runtime, and uses one only
//     if the host has an NVIDIA CDI spec to build on.
//   - Specs declare version 0.5.0 and use nothing newer: Debian 12's podman
//     refuses a whole spec for one unknown field.
//   - A spec file is replaced as a whole or not at all, and is readable by everyone.
//     A spec that nvshare did not write is never changed. A regular file with a name
//     of ours and no spec in it is written anew.
//
// Discover and FindDriver read the host; Build and the functions that make a Base are
// pure.
//
// There are two kinds because an environment variable in a CDI spec replaces the
// container's own: nvshare.com/gpu sets LD_PRELOAD and NVSHARE_RUN_DIR, for people who
// say --device; nvshare.com/gpu-nri sets neither, for the NRI plugin, which merges
// LD_PRELOAD.
package cdi
