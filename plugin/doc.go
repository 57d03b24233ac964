// SPDX-License-Identifier: Apache-2.0

// Package plugin is nvshare's NRI plugin. It reads from a pod's annotations which
// GPUs its containers ask for, and tells the container runtime to give them. README.md has the
// annotations and how GPUs are chosen; package placement chooses.
//
// The plugin writes its choice on the container (PlacementAnnotation), where the next
// plugin finds it. While that one replaces this one, the runtime asks both, and the second
// leaves alone what has the first one's choice. The choice ends with the container. A container that is started
// again in its pod returns to its GPUs if it can. GPUs that a device plugin or a
// resource claim chose are counted in the same way. A container whose GPUs the
// plugin does not know counts on all GPUs and is nobody's neighbour.
//
// Terms say what a container may have of each of its GPUs, all its processes together: sched/api.Fields.
// They may change while containers run, where package kube watches the pods. The
// choice of GPUs may not. The plugin says what the pod says; the scheduler owns the
// latest good value.
//
// # Guarantees
//
//   - A handler answers from memory. It waits for no scheduler and no file, and for no
//     lock that is held across one. Only a container that names a claim which is not known waits
//     for the records of claims, 500 ms at most. The runtime calls plugins one at a time for the
//     whole node and drops a plugin that takes 2 s.
//   - A container whose request cannot be met fails with an error that names the pod,
//     the container, the annotation and what is possible. It names nobody of another namespace.
//   - A container that does not ask is not changed.
//   - While the files that containers need are not right and cannot be put right,
//     containers that ask are refused with the reason.
//   - A container with GPUs has the node's shim and the node's run directory, whatever
//     its image or pod says of LD_PRELOAD and NVSHARE_RUN_DIR. Its programs that are started
//     without the environment have the shim, too (/etc/ld.so.preload).
//   - Only what a pod cannot write counts as a sign of GPUs: the record of the
//     placement, devices, and mounts of the node's own shim.
//   - A misspelt annotation refuses the container, as a wrong value does. Another one that
//     looks like nvshare's and is unknown is named in the log and, with package kube, in an
//     Event on the pod. The pod starts: the annotation may be of a later nvshare.
//   - What a container was promised is free once its processes have ended, also where it ended after the
//     runtime sent the list of its containers, and before it had registered the plugin.
//   - A lost connection to the runtime is made again, whichever side was restarted. A
//     runtime that does not ask the plugin about pods is a problem of its Health.
//   - A container that asked and runs without nvshare is reported, because it was
//     created while no plugin was registered or because its image has musl libc. The
//     former are ended, unless the administrator wants them reported only (Audit).
//   - A runtime that drops CDI devices that plugins name, as containerd before 1.7.30 and 2.0.x
//     do silently, is a problem of Health, and containers that ask are refused. The runtime says
//     in Configure which it is.
//
// # Limits
//
// With SetSpecs, a container also asks by limits of its spec, nvshare.com/gpu-memory and
// nvshare.com/gpu-cores, for a part of one GPU, which is promised and is the most that it has. Annotations
// may lower it. Capacity is what kube-scheduler is to count: what it has placed here is kept for it, also
// from pods that are created first. Such a container is refused only where several GPUs have memory
// and time left in different places. A handler waits for the API server, 1 s at most, only for a pod that it
// was not told of.
//
// # Claims
//
// With Containers.Claims, resource claims give this node's GPUs (package dra). A container has
// the terms of its claims. Annotations may lower these, and say what the claims leave
// open. A container that asks for a GPU by annotation is refused; a core request does not
// ask for one here. Containers that use one claim at the same time have equal parts of
// what the claim has. A container whose claim's record is lost keeps what the scheduler was told
// of it before, and is not started again.
//
// NRI tells the plugin nothing of a pod's resources, and only CRI calls NRI:
// podman, nerdctl and ctr use the CDI specs by themselves.
package plugin
