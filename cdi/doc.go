// SPDX-License-Identifier: Apache-2.0

// Package cdi finds the GPUs of this node and describes them to container
// engines as CDI devices (https://github.com/cncf-tags/container-device-interface).
//
// What it guarantees:
//
//   - A device nvshare.com/gpu=<index>, =<UUID> or =all is complete in itself:
//     the GPU's device nodes, the driver's files, the shim and the scheduler's
//     socket directory. No other vendor's hook or runtime is needed, and none
//     is used unless the host has an NVIDIA CDI spec of its own to build on.
//   - Specs declare version 0.5.0 and use nothing newer: Debian 12's podman
//     refuses a whole spec for one unknown field.
//   - A spec file is replaced as a whole or not at all, is readable by
//     everyone, and a file that is not ours is never touched.
//
// Finding things (Discover, FindDriver) reads the host; Build and the functions
// that make a Base are pure.
//
// Two kinds are written because an environment variable in a CDI spec replaces
// the container's own: nvshare.com/gpu sets LD_PRELOAD, for people who say
// --device; nvshare.com/gpu-nri does not, for the NRI plugin, which merges it.
package cdi
