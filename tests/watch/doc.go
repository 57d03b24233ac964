// SPDX-License-Identifier: Apache-2.0

// Package watch tests what people look at, on a simulated GPU with real programs: top on a
// terminal, doctor test, the dashboard and the alerts in a Prometheus, the page. A Bed is
// also what pictures takes its screenshots of.
package watch
