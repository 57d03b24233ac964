// SPDX-License-Identifier: Apache-2.0

// Package dra is nvshare's driver for Kubernetes' Dynamic Resource Allocation (DRA),
// which needs Kubernetes 1.36. kube-scheduler chooses the GPUs, and knows what is left
// of each. A node belongs to one tier: its pods ask by resource claims (this package),
// or by annotations (package plugin).
//
// # Devices
//
// Each GPU is one device of the node's pool, which many claims may use at the same
// time. Of a GPU with MIG devices each of these is a device. A device has the name of
// its UUID, so that a claim never means another GPU after one was lost.
// deployments/kubernetes/claims.md has its capacities and attributes, and the configuration of claims.
//
// Package plugin gives containers the terms of their claims. Events on their pods say what changes.
//
// # Guarantees
//
//   - A claim that is prepared has one record and one CDI spec. Both are flushed to the
//     disk before the kubelet gets an answer. A spec exists only where its record does.
//   - Prepare and unprepare may be repeated, also after a crash at any point, and give
//     the same result.
//   - Names of CDI devices are never used twice.
//   - What a container is promised comes from the records, never from its environment
//     alone: a container names its shares by the CDI devices that the kubelet asked the
//     runtime for, or, where the runtime does not tell, by a random token.
//   - The sum of the prepared shares of a GPU is never above what the GPU has.
//   - A record of a newer version is kept until that version is back, and nothing is written over it.
//   - A record whose claim does not exist any more, or has no device of the node, is removed.
//   - While the API server is away, prepared claims stay.
//   - Two drivers may run while one replaces the other (rolling update). Either answers the
//     kubelet; only the one that leads publishes devices and writes anything else.
//   - Nothing is published any more once the API server has dropped a field that the devices need: the cluster
//     lacks a feature. Only the next driver tries again, because to ask is to write such slices.
//   - Nothing is published where a device plugin or another driver gives the GPUs too.
//   - A driver that starts publishes once the scheduler has said what it knows of the GPUs, or
//     was away for 20 s. What was published before stays until then.
//   - The kubelet is told when a GPU of a prepared claim is lost, or does no more work.
//   - A GPU that is drained or does no more work is tainted.
package dra
