// SPDX-License-Identifier: Apache-2.0

// Package residency decides about the memory of one GPU. It is a pure state machine.
//
// The ledger keeps what clients have reserved, so that a limit holds for all clients of a tenant. Where
// more can be reserved than the GPU has (Config.Swap), rooms decides how much of it each client may have
// on the GPU at a time, who makes room for whom, what is refused because there is no place for it, and
// how much host memory each client needs (Arenas, which the GPUs of a node share). A client decides
// nothing itself. Memory is told who has a grant, and tells the turns, by the interface Turns, who has
// memory to move before it can go on.
//
// What all clients have on the GPU is the capacity at most, unless memory was forced on it that existed
// before. A client with a grant is never told to move out. A client that does not make room is passed
// over after Config.StallAfter; one without a place is stranded, and tried again. Nothing is promised
// that could not be on the GPU, or whose owner could not be moved out.
//
// A call costs O(log n) while all that is reserved fits, else O(n), which Looked counts.
package residency
