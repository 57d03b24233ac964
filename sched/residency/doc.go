// SPDX-License-Identifier: Apache-2.0

// Package residency decides about the memory of one GPU. It is a pure state machine, as all of the
// scheduler's core.
//
// The ledger (ledger.go) keeps what clients have reserved, so that a tenant's limit holds for all its
// clients together. Where more can be reserved than the GPU has (Config.Swap), rooms (rooms.go,
// placing.go) decides how much of it each client may have on the GPU at a time, who makes room for
// whom, what is refused because there is no place for it (fits.go), and how much host memory each
// client needs for what is away (Arenas, which the GPUs of a node share). Clients say what they have
// (Moved), and are told their rooms (Room): a client decides nothing itself.
//
// Memory is told who has a grant (SetActive, Granted, Released), and what clients ask for and say
// (Attach, Reserve, Moved). It tells the turns, by the interface Turns, who has memory to move before
// it can go on, and who has no place. Of turns it knows nothing else. View is what the caller may ask.
//
// # Guarantees
//
// What all clients have on the GPU is the capacity at most at any moment, unless memory was forced
// on it, which existed before anybody could refuse it. A client with a grant is never told to move out.
// A client that does not make room is passed over after Config.StallAfter; one for which there is no
// place any more is stranded, and is tried again every half minute. Nothing is promised that could not
// be on the GPU, or whose owner could not be moved out for others to be there.
//
// While all that is reserved fits the GPU, and nobody lacks room, a call costs O(log n) in the number
// of clients; else O(n), which Looked counts. Check tests what is guaranteed.
package residency
