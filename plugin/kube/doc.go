// SPDX-License-Identifier: Apache-2.0

// Package kube changes pods' terms while they run. It watches the annotations of this
// node's pods in the API server, and says on each pod what a change has done.
//
//	kubectl annotate pod train nvshare.com/gpu-memory-limit=8Gi --overwrite
//
// The terms of package plugin may change; the choice of GPUs may not. All forms of an
// annotation count: nvshare.com/gpu-core-limit, gpu-core-limit.nvshare.com/pod and
// gpu-core-limit.nvshare.com/container.<name>; the narrowest scope wins. The current
// annotations hold:
//
//   - They replace the annotations of the pod's creation, also for containers that are
//     started again, for which the runtime has the old ones. Removing an annotation
//     removes its value.
//   - A value that was set with nvsharectl goes before the annotation until it is
//     removed.
//   - A value that is nonsense or cannot be promised changes nothing. The latest good
//     value stays, also over a restart of the plugin or the scheduler. A value that
//     cannot be promised is tried again every ten seconds: more than 100 % of a GPU's
//     time, or a raised memory limit beyond the memory of a GPU that the plugin chose.
//   - A memory limit below the memory in use takes nothing away. The container gets no
//     more until it has freed enough.
//   - While the API server cannot be reached, everything stays as it is.
//   - Static pods have the annotations of their manifest. The kubelet creates them
//     anew when the manifest changes.
//
// Each change makes an Event on the pod (kubectl describe pod) that names the
// container: GPUShareChanged; GPUShareRefused; GPUShareOverruled, where a setting of
// nvsharectl goes before; GPUChoiceStays, where the change needs a new pod;
// GPUAnnotationUnknown, for a key that looks like nvshare's; and GPULimitsIgnored, on a static pod. A pod gets ten Events at
// once, then one every 30 s; further ones are left out. A container that runs without
// nvshare gets GPUUnmanaged at each registration with the runtime; GPUBypassed,
// GPUOutOfMemory, GPUOOMKilled and GPUOverlapGroup tell what its processes met with.
//
// # Cost
//
// There is one watch per node. The API server filters it to the node's pods and sends
// their metadata only, of which nvshare's annotations are kept; with WatchSpecs the whole pods, of which limits
// of nvshare's resources are kept, too. Advertise watches the node beside, and patches its status when what
// pods have or what is left changes. A lost watch is made again after 0.8 to 30 s. An Event names the container in its note.
//
// # Rights
//
// A ClusterRole with
//
//	apiGroups: [""]               resources: [pods]    verbs: [list, watch]
//	apiGroups: ["events.k8s.io"]  resources: [events]  verbs: [create]
//
// RBAC cannot narrow the first to one node's pods. Without these rights, or without an
// API server, the annotations of the pods' creation hold. RemoveTaint needs get and patch of nodes; Advertise
// list and watch of nodes, and patch of nodes/status.
package kube
