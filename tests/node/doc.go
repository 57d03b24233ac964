// SPDX-License-Identifier: Apache-2.0

// Package node runs a throw-away container node for the demo and the
// end-to-end tests: its own containerd with CRI and NRI, nvshare's scheduler
// and plugin, pods, and podman.
//
// What it guarantees:
//
//   - Isolated runs everything in new mount, pid, ipc and uts namespaces with
//     private propagation. /run and /dev/shm are private, so that the daemons
//     use their standard socket paths without meeting those of the machine,
//     and so that CDI specs go to a /var/run/cdi nobody else sees. /etc/cdi is
//     never written.
//   - When the process that called Isolated ends, in whatever way, so does
//     everything started inside it. What outlives namespaces, one work
//     directory and the cgroups named after it, is removed by the outer
//     process, or by the next run if that was killed too.
//   - Nothing is downloaded: images are made of files of the machine.
//
// It needs root on Linux with cgroup v1, hybrid or v2.
package node
