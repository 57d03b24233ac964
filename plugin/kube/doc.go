// SPDX-License-Identifier: Apache-2.0

// Package kube lets pods' shares of GPUs change while they run: it watches the
// annotations of this node's pods in the API server, and says on each pod what
// came of a change.
//
//	kubectl annotate pod train nvshare.com/gpu-memory-limit=8Gi --overwrite
//
// All annotations of package plugin may change but those that say which GPUs a
// container gets and next to whom. They have all their forms:
// nvshare.com/gpu-core-limit, gpu-core-limit.nvshare.com/pod and
// gpu-core-limit.nvshare.com/container.<name>; the narrowest goes before. What
// holds is what the pod's annotations say now:
//
//   - It goes before what they said when the pod was created, also for containers
//     that are started again, of which the runtime has the old annotations.
//     Removing one removes the limit, as if it had never been there.
//   - What was set with nvsharectl goes before it, until that is removed.
//   - A value that is nonsense, or that cannot be promised, changes nothing: what
//     held before stays, also over a restart of the plugin or the scheduler. The
//     latter kind is tried again every ten seconds. (More than 100 % of a GPU's
//     time cannot be promised; nor can, by a memory limit that is raised, more
//     than its memory, where the plugin chose the GPU.)
//   - A memory limit below what is in use takes nothing away: no more is granted
//     until enough was freed.
//   - While the API server cannot be reached, everything stays as it is.
//   - Static pods have what their manifest says: kubelet makes them anew when that
//     changes.
//
// Each change is told in an Event on the pod (kubectl describe pod), by the
// container it concerns: GPUShareChanged, GPUShareRefused, GPUShareOverruled (an
// nvsharectl setting goes before), GPUChoiceStays (something else of ours was
// changed, which takes a new pod) and GPUAnnotationUnknown (a key like ours that
// is none). A pod gets ten of them at once, then one every
// 30 s; the others are left out. Containers that run without nvshare are told of
// in the same way, as GPUUnmanaged, at each registration with the runtime.
//
// # Cost
//
// One watch per node, filtered to its pods by the API server, of which only the
// metadata is sent, and kept: the annotations that matter. Lost watches are made
// again after 0.8 to 30 s, with the usual backoff. The clientset of client-go,
// and with it its recorder of events, would triple the program: events are posted
// as they are.
//
// # Rights
//
// A ClusterRole with
//
//	apiGroups: [""]               resources: [pods]    verbs: [list, watch]
//	apiGroups: ["events.k8s.io"]  resources: [events]  verbs: [create]
//
// RBAC cannot narrow the first to one node's pods. Without these rights, or
// without an API server, annotations hold as they were when pods were created.
package kube
