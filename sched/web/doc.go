// SPDX-License-Identifier: Apache-2.0

// Package web serves one page about the GPUs of a node: what is wrong and what to do, who has
// them, a timeline of the last minute, a day of GPU time and memory by tenant, GPU hours of each
// namespace, and what would fit. Its pictures are drawn by uPlot 1.6.32 (page/uplot, MIT licence),
// which is embedded as its author released it.
// Cluster is a second page, of the GPUs of all nodes of a cluster.
//
// What it guarantees:
//
//   - It changes nothing: it asks for the status and the events, and answers GET and HEAD
//     only.
//   - It keeps a day of history in at most MaxGPUs · Minutes · MaxTenants records, some
//     100 bytes each, whatever tenants there are. Tenants beyond MaxTenants of a minute
//     count together. The history ends with the process.
//   - A browser is served on a loopback address under the name of such an address only, so
//     no page of another site reads it by a name that leads here. With a token, requests
//     need the token.
//   - At most MaxConns browsers are served at a time, and a slow one holds up nobody.
//   - The page loads nothing from elsewhere, and names of tenants are text to it.
package web
