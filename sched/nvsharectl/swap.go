// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

// swapTable shows how much memory is where, by GPU, if memory is swapped.
func swapTable() table {
	return table{head: []string{"GPU", "ON GPU", "FIXED", "AWAY", "HOST MEMORY", "MOVED OUT", "MOVED IN", "OUT/S", "IN/S", "SWAP SHARE", "REFUSED"}}
}

func addSwap(t *table, g *api.GPU) {
	s := g.Swap
	if s == nil {
		return
	}
	t.add(map[int]string{10: alarm(s.Refused > 0)},
		fmt.Sprint(g.Index), size(s.ResidentBytes)+"/"+size(s.CapacityBytes), size(s.FixedBytes), size(s.AwayBytes),
		size(s.ArenaBytes)+"/"+size(s.ArenaLimitBytes), size(s.OutBytes), size(s.InBytes),
		size(s.OutBytesPerSecond), size(s.InBytesPerSecond), api.FormatPercent(s.SharePercent), fmt.Sprint(s.Refused))
}

// placeHead names what addPlace says of a process.
var placeHead = []string{"KEPT", "ON GPU", "FIXED", "AWAY", "ROOM", "LACKS", "HOST MEMORY", "IN FILE", "MOVED OUT", "MOVED IN", "WHY FIXED"}

// addPlace appends to a process's cells how much of its memory is where.
func addPlace(cells []string, colours map[int]string, g *api.GPU, c *api.Client) []string {
	at := len(cells)
	if g.Swap == nil {
		return append(cells, slices.Repeat([]string{"-"}, len(placeHead))...)
	}
	colours[at], colours[at+slices.Index(placeHead, "LACKS")] = alarm(c.Stalled), alarm(c.LacksBytes > 0)
	return append(cells, kept(c), size(c.ResidentBytes), size(c.FixedBytes), size(c.AwayBytes),
		size(c.RoomBytes), size(c.LacksBytes), size(c.ArenaBytes), size(c.FileBytes), size(c.SwappedOutBytes), size(c.SwappedInBytes),
		cmp.Or(c.FixedReason, "-"))
}

func kept(c *api.Client) string {
	switch {
	case c.Stalled:
		return "stalled"
	case c.MemoryMode == api.MemoryMode_MEMORY_MODE_UNSPECIFIED:
		return "-"
	}
	return api.FormatMemoryMode(c.MemoryMode)
}

// doing returns what a client does, in one word.
func doing(c *api.Client) string {
	if c.Moving && c.State == api.ClientState_CLIENT_STATE_HOLDING {
		return "moving"
	}
	if c.Suspended && c.State == api.ClientState_CLIENT_STATE_IDLE {
		return "suspended"
	}
	return stateName(c)
}

type swapJSON struct {
	CapacityBytes     uint64  `json:"capacity_bytes"` // what clients may have on the GPU, together
	PromisedBytes     uint64  `json:"promised_bytes"`
	ResidentBytes     uint64  `json:"resident_bytes"`
	FixedBytes        uint64  `json:"fixed_bytes"` // of these, what cannot be moved
	AwayBytes         uint64  `json:"away_bytes"`  // in host memory, or never used
	ArenaBytes        uint64  `json:"arena_bytes"` // host memory that this GPU's clients were given
	ArenaLimitBytes   uint64  `json:"arena_limit_bytes"`
	ArenaUsedBytes    uint64  `json:"arena_used_bytes"`  // of all GPUs
	ArenaReadyBytes   uint64  `json:"arena_ready_bytes"` // kept ready besides, for all GPUs
	ArenaFileBytes    uint64  `json:"arena_file_bytes"`  // in files instead of host memory, of all GPUs
	OutBytes          uint64  `json:"out_bytes"`
	InBytes           uint64  `json:"in_bytes"`
	OutSeconds        float64 `json:"out_seconds"`
	InSeconds         float64 `json:"in_seconds"`
	Outs              uint64  `json:"outs"`
	Ins               uint64  `json:"ins"`
	OutBytesPerSecond uint64  `json:"out_bytes_per_second"` // the latest time
	InBytesPerSecond  uint64  `json:"in_bytes_per_second"`
	Refused           uint64  `json:"refused"`
	SwapShare         uint32  `json:"swap_share"` // percent; 0: turns are as long as the time quantum says
	Suspends          uint64  `json:"suspends"`   // of processes, by order or because they were idle
	Suspended         uint32  `json:"suspended"`  // processes that are now
}

func newSwapJSON(s *api.Swap) *swapJSON {
	if s == nil {
		return nil
	}
	return &swapJSON{
		s.CapacityBytes, s.PromisedBytes, s.ResidentBytes, s.FixedBytes, s.AwayBytes, s.ArenaBytes, s.ArenaLimitBytes, s.ArenaUsedBytes, s.ArenaReadyBytes, s.ArenaFileBytes,
		s.OutBytes, s.InBytes, seconds(s.OutNs), seconds(s.InNs), s.Outs, s.Ins, s.OutBytesPerSecond, s.InBytesPerSecond, s.Refused, s.SharePercent, s.Suspends, s.Suspended,
	}
}

type clientSwapJSON struct {
	MemoryMode    string `json:"memory_mode"` // "" : its shim cannot move memory
	ResidentBytes uint64 `json:"resident_bytes"`
	FixedBytes    uint64 `json:"fixed_bytes"`
	FixedReason   string `json:"fixed_reason,omitempty"` // why nothing of it can be moved
	AwayBytes     uint64 `json:"away_bytes"`
	RoomBytes     uint64 `json:"room_bytes"`  // that it may have on the GPU
	LacksBytes    uint64 `json:"lacks_bytes"` // that it needs more, and does not get yet
	ArenaBytes    uint64 `json:"arena_bytes"`
	FileBytes     uint64 `json:"file_bytes"` // in a file instead of host memory
	OutBytes      uint64 `json:"out_bytes"`
	InBytes       uint64 `json:"in_bytes"`
	Moving        bool   `json:"moving"`    // has the GPU, and moves memory onto it
	Stalled       bool   `json:"stalled"`   // does not move off the GPU as it was told to
	Suspended     bool   `json:"suspended"` // its memory has left, or is leaving, until it has the GPU again

	Context        string  `json:"context,omitempty"`         // leaving, away, returning; "": it is on the GPU
	ContextProblem string  `json:"context_problem,omitempty"` // why it stays there, or does not come back
	RestoreSeconds float64 `json:"restore_seconds,omitempty"` // what its latest return took
}

// contextOf says where the context of a process is; "": on the GPU.
func contextOf(c *api.Client) string {
	if c.Context == api.ContextState_CONTEXT_STATE_PRESENT {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(c.Context.String(), "CONTEXT_STATE_"))
}

func newClientSwapJSON(g *api.GPU, c *api.Client) *clientSwapJSON {
	if g.Swap == nil {
		return nil
	}
	mode := ""
	if c.MemoryMode != api.MemoryMode_MEMORY_MODE_UNSPECIFIED {
		mode = api.FormatMemoryMode(c.MemoryMode)
	}
	return &clientSwapJSON{mode, c.ResidentBytes, c.FixedBytes, c.FixedReason, c.AwayBytes, c.RoomBytes, c.LacksBytes, c.ArenaBytes, c.FileBytes,
		c.SwappedOutBytes, c.SwappedInBytes, c.Moving, c.Stalled, c.Suspended, contextOf(c), c.ContextProblem, seconds(c.RestoreNs)}
}
