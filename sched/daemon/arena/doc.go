// SPDX-License-Identifier: Apache-2.0

// Package arena makes host memory for what clients have away from GPUs, and
// hands it to them.
//
// The memory is made in segments: memfds, of huge pages if the node has them,
// filled with zeros by threads beside the caller's loop. A segment is made when a
// client needs it, or soon may (Owner.Needs). Some are made before anybody needs
// them: the stock. How much each client needs is decided elsewhere.
//
// What it guarantees:
//
//   - Nothing of one tenant is ever seen by another: no segment has two clients,
//     one after the other neither. A client keeps its segments until Drop. Then
//     they are emptied and go back to the kernel, also if the client has passed a
//     descriptor on.
//   - Clients together never get more than Config.Limit, and the stock stays
//     below what they leave of that.
//   - What clients need comes before the stock: where both cannot be had, the
//     stock goes back first.
//   - A segment near a GPU comes from that GPU's NUMA node, as far as the kernel
//     lets us say so.
//   - The threads that fill memory run below the priority of tenants, and end
//     with the loop.
//
// A Pool and what belongs to it are used by one goroutine, the loop.
package arena
