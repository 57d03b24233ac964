// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Events and actions about memory. Sizes are bytes.

// Reserve asks for memory: the client is to have Total reserved. Less than it has
// is always granted; so is everything with Force, for that memory exists already.
// More is granted as far as the tenant's limit goes and there is a place for it, if
// that is at least Least. Reserved is the answer; it may come in a later Step.
type Reserve struct {
	Client base.ClientID
	Total  uint64
	Least  uint64
	Force  bool
	Serial uint64 // comes back in the answer
}

// Report is what a client says of its memory on this GPU.
type Report struct {
	Resident uint64 // on the GPU
	Fixed    uint64 // of Resident, what cannot be moved
	Away     uint64 // not on the GPU
	Arena    uint64 // host memory that it has for that
	Out, In  uint64 // copied each way since the client began
}

// Moved says that a client has moved a piece of memory, cannot move, or has made the
// room that it was asked for.
type Moved struct {
	Client   base.ClientID
	Epoch    base.Epoch // of the grant under which it moves in; 0: it has none
	Report   Report
	Ready    bool // all its memory is on the GPU, and its gate is open
	Stuck    bool // it cannot go on
	NoMemory bool // because the driver has none
	NoArena  bool // because it has no host memory
}

// SetTenantMemory changes what a tenant may have of this GPU's memory. It holds for
// clients that come later too, until it is changed again.
type SetTenantMemory struct {
	Tenant string
	Limit  uint64 // of all its clients together; 0: none
	Keep   Keep   // of each client that can move its memory
	// SuspendAfter is in place of Config.SuspendAfter; 0: that holds; less: never.
	SuspendAfter time.Duration
}

// SetGPUMemory says how the memory of a GPU is swapped from now on; nil: as before. It takes effect on a
// GPU that is Unused and was not swapped before: how much memory it has was not known.
type SetGPUMemory struct{ Swap *Config }

// ArenaChanged says how much host memory a client has for what is away, or that is
// being made for it.
type ArenaChanged struct {
	Client base.ClientID
	Bytes  uint64
}

// RestoreMemory says that a client had memory on the GPU before a restart of the
// caller. The GPU's memory is given to nobody until that client reports, is Gone, or
// does not come for too long.
type RestoreMemory struct {
	Client  base.ClientID
	Tenant  string
	Gang    string
	CanMove bool
	Bytes   uint64 // that it had reserved

	Suspended bool
}

func (Reserve) Event()         {}
func (Moved) Event()           {}
func (SetTenantMemory) Event() {}
func (SetGPUMemory) Event()    {}
func (ArenaChanged) Event()    {}
func (RestoreMemory) Event()   {}

// Room tells a client how much memory it may have on the GPU from now on: write it to
// the client's page, wake it, send ROOM. Of the actions that answer an Attach one
// may come even before Adopt: it is for the new page, before ATTACHED is sent.
type Room struct {
	Client base.ClientID
	Bytes  uint64
	Less   bool // the client has to move out, and to report
}

// Refusal says why nothing more was reserved.
type Refusal uint8

const (
	NotRefused  Refusal = iota
	OverLimit           // the tenant's limit is reached
	OverCeiling         // what the GPU is to look like is reached
	NoPlace             // there is no place, on the GPU or in host memory
)

// Reserved answers a Reserve: send RESERVED.
type Reserved struct {
	Client  base.ClientID
	Serial  uint64
	Stands  Standing // as the client is to see it
	Refused Refusal
	Asked   uint64 // what was refused
	Why     error  // of NoPlace
}

// LimitsChanged says that what a tenant's clients may have, or have, has changed:
// write GPU.Standing to their pages.
type LimitsChanged struct{ Tenant string }

// ArenaWanted says how much host memory a client needs for what it may have to move
// out: have it made.
type ArenaWanted struct {
	Client base.ClientID
	Bytes  uint64
	Soon   uint64 // what it needs if reservations go on to grow; nothing depends on it
}

// ArenaFound says that a client has host memory from before a restart of the caller,
// by its own word, as far as that is believed.
type ArenaFound struct {
	Client base.ClientID
	Bytes  uint64
}

// Promised says how much memory a client has been promised, so that it can be
// recorded for RestoreMemory; 0: nothing any more.
type Promised struct {
	Client base.ClientID
	Bytes  uint64
}

// SwapDone says that a client has moved what it had to. There is nothing to carry out.
type SwapDone struct {
	Client base.ClientID
	In     bool // onto the GPU; else off it
	Bytes  uint64
	Took   time.Duration
}

// SwapStalled says that a client has not moved out for a grace period. There is
// nothing to carry out.
type SwapStalled struct {
	Client base.ClientID
	Bytes  uint64 // for which others wait
}

// Stranded says that there is no place for all of a client's memory, because others'
// cannot be moved: it is granted nothing before there is one. There is nothing to
// carry out.
type Stranded struct {
	Client base.ClientID
	Bytes  uint64 // that do not fit
}

// Suspended says that a client's memory leaves until the client has a grant again. There
// is nothing to carry out.
type Suspended struct {
	Client base.ClientID
	Bytes  uint64 // that leave
	Idle   bool   // because it was idle; else by Suspend
}

func (Suspended) Action()     {}
func (Room) Action()          {}
func (Reserved) Action()      {}
func (LimitsChanged) Action() {}
func (ArenaWanted) Action()   {}
func (ArenaFound) Action()    {}
func (Promised) Action()      {}
func (SwapDone) Action()      {}
func (SwapStalled) Action()   {}
func (Stranded) Action()      {}

func (e Reserve) String() string {
	s := fmt.Sprintf("reserve %d total=%d", e.Client, e.Total)
	if e.Least != 0 {
		s += fmt.Sprintf(" least=%d", e.Least)
	}
	if e.Serial != 0 {
		s += fmt.Sprintf(" serial=%d", e.Serial)
	}
	return base.Flags(s, "force", e.Force)
}

func (e Moved) String() string {
	s := fmt.Sprintf("moved %d", e.Client)
	if e.Epoch != 0 {
		s += fmt.Sprintf(" epoch=%d", e.Epoch)
	}
	r := e.Report
	for _, n := range []struct {
		name  string
		bytes uint64
	}{{"resident", r.Resident}, {"fixed", r.Fixed}, {"away", r.Away}, {"arena", r.Arena}, {"out", r.Out}, {"in", r.In}} {
		if n.bytes != 0 {
			s += fmt.Sprintf(" %s=%d", n.name, n.bytes)
		}
	}
	return base.Flags(s, "ready", e.Ready, "stuck", e.Stuck, "nomemory", e.NoMemory, "noarena", e.NoArena)
}

func (e SetTenantMemory) String() string {
	return strings.TrimSuffix(fmt.Sprintf("keep tenant=%s memory=%d %v", e.Tenant, e.Limit, e.Keep), " swapped")
}
func (e SetGPUMemory) String() string { return base.Flags("set gpumemory", "swap", e.Swap != nil) }
func (e ArenaChanged) String() string { return fmt.Sprintf("arena %d bytes=%d", e.Client, e.Bytes) }
func (e RestoreMemory) String() string {
	s := fmt.Sprintf("restorememory %d tenant=%s bytes=%d", e.Client, e.Tenant, e.Bytes)
	if e.Gang != "" {
		s += " gang=" + e.Gang
	}
	return base.Flags(s, "canmove", e.CanMove)
}

func (a Room) String() string {
	return base.Flags(fmt.Sprintf("room %d bytes=%d", a.Client, a.Bytes), "less", a.Less)
}

func (r Refusal) String() string {
	names := [...]string{"", "limit", "ceiling", "place"}
	if int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("refusal(%d)", uint8(r))
}

func (a Reserved) String() string {
	s := fmt.Sprintf("reserved %d total=%d used=%d", a.Client, a.Stands.Total, a.Stands.Used)
	if a.Stands.Limit != 0 {
		s += fmt.Sprintf(" limit=%d", a.Stands.Limit)
	}
	if a.Serial != 0 {
		s += fmt.Sprintf(" serial=%d", a.Serial)
	}
	if a.Refused != NotRefused {
		s += fmt.Sprintf(" refused=%v", a.Refused)
	}
	return s
}
func (a LimitsChanged) String() string { return "limits of " + a.Tenant }
func (a ArenaWanted) String() string {
	return fmt.Sprintf("arenawanted %d bytes=%d soon=%d", a.Client, a.Bytes, a.Soon)
}
func (a ArenaFound) String() string { return fmt.Sprintf("arenafound %d bytes=%d", a.Client, a.Bytes) }
func (a Promised) String() string   { return fmt.Sprintf("promised %d bytes=%d", a.Client, a.Bytes) }
func (a SwapDone) String() string {
	return fmt.Sprintf("swapped %d %s bytes=%d took=%v", a.Client, map[bool]string{true: "in", false: "out"}[a.In], a.Bytes, a.Took)
}
func (a SwapStalled) String() string { return fmt.Sprintf("stalled %d bytes=%d", a.Client, a.Bytes) }
func (a Suspended) String() string {
	return base.Flags(fmt.Sprintf("suspended %d bytes=%d", a.Client, a.Bytes), "idle", a.Idle)
}
func (a Stranded) String() string { return fmt.Sprintf("stranded %d bytes=%d", a.Client, a.Bytes) }
