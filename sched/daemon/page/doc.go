// SPDX-License-Identifier: Apache-2.0

// Package page makes grant pages: the memory in which the scheduler opens and
// shuts a client's gates. The layout is package wire's.
//
// What it guarantees:
//
//   - Whoever gets the descriptor can map the page for reading only, and cannot
//     change its size (from Linux 5.1 on).
//   - A change that a thread of the client may wait for wakes that thread.
//   - No call waits for a client.
package page
