// SPDX-License-Identifier: Apache-2.0

// Package metrics serves what the scheduler knows at /metrics, for Prometheus, and its problems at
// /healthz.
//
// What it guarantees:
//
//   - Counting a turn of a GPU (Turns) costs no search, no format and no allocation.
//   - Whoever reaches the port can ask: connections, requests and metrics are bounded, and so is how
//     often the loop and the driver are asked.
//   - /healthz has status 503 for problems of the scheduler only, not for what a tenant does.
//   - No label and no name is chosen by a process: names come from the container engine.
//
// A new metric gets its name, labels and help in names.go, and its value in collect.go.
package metrics
