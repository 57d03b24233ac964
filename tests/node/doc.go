// SPDX-License-Identifier: Apache-2.0

// Package node runs a throw-away container node for the demo and the
// end-to-end tests: its own containerd with CRI and NRI, nvshare's scheduler
// and plugin, pods, and podman.
//
// What it guarantees:
//
//   - Isolated runs everything in new mount, pid, ipc and uts namespaces with
//     private propagation. /run and /dev/shm are private. So the daemons use
//     their standard socket paths beside those of the machine, and nobody else
//     sees the CDI specs in /var/run/cdi. /etc/cdi is never written.
//   - When the process that called Isolated ends, in any way, everything that it
//     started ends too. The outer process removes the work directory and the
//     cgroups named after it; if the outer process was killed, the next run does.
//   - Nothing is downloaded: images are made of files of the machine.
//
// It needs root on Linux with cgroup v1, hybrid or v2.
package node
