// SPDX-License-Identifier: Apache-2.0

// Package arena makes host memory for what clients have away from GPUs, and hands it to them, in
// segments: memfds, of huge pages if the node has them, filled with zeros by threads beside the loop. A
// segment is made when a client needs it (Owner.Needs); some are made before: the stock.
//
// What it guarantees:
//
//   - No segment has two clients, one after the other neither. It goes back to the kernel empty, also
//     if the client has passed a descriptor on.
//   - Clients together never get more than Config.Limit. What they need comes before the stock.
//   - A segment near a GPU comes from that GPU's NUMA node, as far as the kernel lets us say so.
//   - The threads run below the priority of tenants, and end with the loop.
//
// A Pool and what belongs to it are used by one goroutine, the loop.
package arena
