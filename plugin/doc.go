// SPDX-License-Identifier: Apache-2.0

// Package plugin is nvshare's NRI plugin: it reads which GPUs a pod asks for in
// its annotations and has the container runtime give them to the containers.
//
// A pod asks with the annotation
//
//	nvshare.com/gpu: nvshare.com/gpu=0
//
// whose value is one or more CDI device names, separated by commas: by index,
// by UUID, or nvshare.com/gpu=all; or a count of GPUs; or "none". With the suffix
// /container.<name> the annotation holds for that container only and goes before
// /pod, which goes before none. Kubernetes accepts only one "/" in a key: there,
// write gpu.nvshare.com/container.<name>.
//
// A bare number is a count, and never an index:
//
//	nvshare.com/gpu: "2"                two GPUs, whichever; always two physical ones
//	nvshare.com/gpu: nvshare.com/gpu=2  the one with index 2
//	nvshare.com/gpu: "0"                refused, because it may be meant as either
//
// A core request (below) asks for one GPU, if no annotation of the pod says which
// or how many for any of its containers. Which GPUs are taken then, package
// placement says: a part goes where it fits best among GPUs in use, a container
// without a core request to where most is left. Memory limits count: those of the
// containers of a GPU add up to no more than its memory, where the plugin chose
// (--promise-memory). Who names a GPU gets it whatever the limits add up to. Of a
// GPU with MIG devices, these are chosen, each with its own time and memory.
//
// Next to whom a container is put, by labels of its namespace:
//
//	nvshare.com/gpu-affinity: ring      on a GPU of those with the same, or an idle one
//	nvshare.com/gpu-anti-affinity: web  on none with one of those with the same
//	nvshare.com/gpu-exclusion: prod     on a GPU that only those with the same are on
//
// These hold where a GPU is named, too; and nobody without an exclusion label gets
// a GPU of those with one. What cannot be met is refused when the container is
// created, with what is left of each GPU and who has the rest; the kubelet tries
// again.
//
// The choice is written on the container (PlacementAnnotation), where the next
// plugin finds it. It is given up when the container ends, and kept in mind until
// it is removed: a container that is started again in its pod returns to its GPUs
// if they still can take it. Somebody else may choose, too: devices that the
// runtime was told to inject already (a device plugin, a resource claim) are not
// chosen again, and are entered in the same book.
//
// How much of each GPU's memory a container may have, with all its processes,
// is said in the same way:
//
//	nvshare.com/gpu-memory-limit: 8Gi
//
// The value is a Kubernetes quantity; a bare number means MiB. And so is what it
// may have of each GPU's time, all its processes together:
//
//	nvshare.com/gpu-core-limit: "60"     percent, at most; also when it is alone
//	nvshare.com/gpu-core-request: "30%"  percent that it gets if it wants it; asks for a GPU
//	nvshare.com/gpu-weight: "200"        its part of what nobody was promised, 1 to 10000; 100
//	nvshare.com/gpu-priority: latency    does not wait for its turn; or batch
//	nvshare.com/gpu-gang: ring           gets GPUs together with the containers of
//	                                     this namespace that say the same; "true": its
//	                                     own processes among themselves
//
// More than 100 % of a GPU cannot be requested: the container that would be too
// much is refused, and told who has what. A container whose GPUs the plugin
// cannot tell, because something else gave them, counts on all, and has no say in
// who is beside it.
//
// These may change while containers run, where package kube watches the pods;
// which GPUs a container gets may not.
//
// What it guarantees:
//
//   - A handler answers from memory: it waits for no scheduler, file or lock
//     held across one. The runtime calls plugins one at a time for the whole
//     node and drops one that takes 2 s.
//   - A request that cannot be met fails the container with an error that names
//     the pod, the container, the annotation and what there is.
//   - A container that does not ask is not touched.
//   - A key like ours that is none, a misspelt limit perhaps, is named in the log
//     and, with package kube, in an Event on the pod. Its pod starts: the key may
//     be of a later nvshare.
//   - A lost connection is made again, whichever side was restarted.
//   - A container that asked and runs without nvshare, because it was created
//     while no plugin was registered, or because its image has musl libc, is
//     reported at the next registration, or when it starts; the former are
//     stopped if the administrator wants that (Audit).
//   - Containers get the same from every runtime. containerd before 1.7.30 and
//     2.0.x drop CDI devices that plugins name, without a word: these get each
//     edit spelled out. Which runtime it is, it says in Configure.
//
// NRI tells the plugin nothing of a pod's resource requests, and only CRI calls
// NRI: podman, nerdctl and ctr use the CDI specs by themselves.
package plugin
