// SPDX-License-Identifier: Apache-2.0

// Package metrics serves what the scheduler knows at /metrics, for Prometheus,
// and its problems at /healthz.
//
// What it guarantees:
//
//   - Counting a turn of a GPU (Turns) costs no search, no format and no
//     allocation.
//   - Whoever reaches the port can ask, so the number of connections, of
//     requests and of metrics is bounded, and so is how often the scheduler's
//     loop and the driver are asked. Processes have metrics of their own only
//     where the administrator wants them.
//   - /healthz has status 503 for problems of the scheduler only: what a tenant
//     says or does is named, and never makes somebody restart the scheduler.
//   - A driver that hangs costs its own figures only.
//   - No label and no name is chosen by a process: names come from the container
//     engine.
//
// A new metric gets its name, labels and help in names.go, and its value in
// collect.go.
package metrics
