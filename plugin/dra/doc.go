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
//
//	capacity  value                    a claim that does not ask gets
//	cores     100, percent of the time 100 divided by the slots
//	memory    bytes, see below         the memory divided by the slots
//	slots     --slots                  1
//
// The value of memory is what --promise-memory says of the GPU's memory; above 100 %
// the scheduler must swap. The attribute memorySize has the size of the real memory. A
// GPU whose memory is not known has no capacity memory.
//
// # Claims
//
// Cores are the claim's core request, and memory is its memory limit. The opaque
// configuration of a class or a claim (Config) says the other terms. The configuration
// of the claim may not say what the class says.
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
//   - A record whose claim does not exist any more is removed.
//   - While the API server is away, prepared claims stay.
package dra
