// SPDX-License-Identifier: Apache-2.0

// Package loop runs what the daemon does in one goroutine, and its timers.
//
// What it guarantees:
//
//   - Functions run one at a time, in the order in which they came. So they need no locks.
//   - Who asks and gives up gets back what it lent: its question never runs later.
//   - Nothing is lost silently: Do and Ask say that the loop has ended.
//   - A goroutine that Go has started is waited for at the end.
package loop
