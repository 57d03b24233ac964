// SPDX-License-Identifier: Apache-2.0

// Package wire is the Go side of hook/wire.h: the 64-byte frames that
// libnvshare.so and nvshare-scheduler exchange, and the layout of the grant
// page.
//
// What it guarantees:
//
//   - Decode accepts exactly the frames that Encode can produce: for every
//     packet b that decodes, Encode of the result equals b. Reserved bytes,
//     unknown flags and fields that a type does not have must be zero. The one
//     exception is a REGISTER of a newer version, of which only the fields that
//     version 1 defines are read.
//   - Neither allocates memory, and neither panics, whatever the bytes.
//   - A Page store becomes visible to the client in the order written: the word
//     last when a gate opens, first when it closes.
//
// hook/wire.h is the definition; where they differ, this package is wrong. The
// golden frames in tests/golden are printed from the C structures and hold the
// two together.
package wire
