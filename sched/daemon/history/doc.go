// SPDX-License-Identifier: Apache-2.0

// Package history keeps the latest events of the scheduler, for `nvsharectl
// events`.
//
// What it guarantees:
//
//   - Adding an event costs no search, no format and no allocation: the
//     scheduler does so at each turn of a GPU.
//   - Tenants cannot push out what is rare: events that tenants cause by taking turns, those
//     that they cause otherwise, and other events have room of their own.
//   - Who reads learns how many events are gone, and gets each of the others
//     once and in order.
//
// A Log belongs to one goroutine.
package history
