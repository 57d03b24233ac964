// SPDX-License-Identifier: Apache-2.0

// Package node has the tables of what the daemon knows: GPUs, connections, the processes that use
// GPUs, and the names of containers. The parts of the daemon share it, and each has state of its own
// beside it.
//
// What it guarantees:
//
//   - The loop alone touches it. No call waits for a client: frames are sent without blocking, and a
//     client that does not read is disconnected.
//   - A process has one Client from its first REGISTER to its proven death, whatever its connections
//     do.
//   - What tenants can cause as often as they like is limited, in the log and in the events.
//   - What is recorded of an earlier process holds until the kernel says that the process has ended.
package node
