// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"fmt"
	"slices"
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
	Total  uint64 `always:"total=%v"`
	Least  uint64 `text:"least=%v"`
	Serial uint64 `text:"serial=%v"` // comes back in the answer
	Force  bool   `text:"force"`
}

// Report is what a client says of its memory on this GPU.
type Report struct {
	Resident uint64 `text:"resident=%v"` // on the GPU
	Fixed    uint64 `text:"fixed=%v"`    // of Resident, what cannot be moved
	Away     uint64 `text:"away=%v"`     // not on the GPU
	Arena    uint64 `text:"arena=%v"`    // host memory that it has for that
	Out      uint64 `text:"out=%v"`      // copied off the GPU since the client began
	In       uint64 `text:"in=%v"`       // copied onto it
}

// Moved says that a client has moved a piece of memory, cannot move, or has made the
// room that it was asked for.
type Moved struct {
	Client   base.ClientID
	Epoch    base.Epoch `text:"epoch=%v"` // of the grant under which it moves in; 0: it has none
	Report   Report     `text:"%v"`
	Seen     uint32     `text:"seen=%v"`  // Room.Seq of the client's page then; 0: it does not say, and grows only under a grant
	Ready    bool       `text:"ready"`    // all its memory is on the GPU, and its gate is open
	Stuck    bool       `text:"stuck"`    // it cannot go on
	NoMemory bool       `text:"nomemory"` // because the driver has none
	NoArena  bool       `text:"noarena"`  // because it has no host memory
}

// SetTenantMemory changes what a tenant may have of this GPU's memory. It holds for
// clients that come later too, until it is changed again.
type SetTenantMemory struct {
	Tenant string `always:"tenant=%v"`
	Limit  uint64 `always:"memory=%v"` // of all its clients together; 0: none
	Keep   Keep   `text:"%v"`          // of each client that can move its memory
	// SuspendAfter is in place of Config.SuspendAfter; 0: that holds; less: never.
	SuspendAfter time.Duration
}

// SetGPUMemory says how the memory of a GPU is swapped from now on; nil: as before. It takes effect on a
// GPU that is Unused and was not swapped before: how much memory it has was not known.
type SetGPUMemory struct {
	Swap *Config `text:"swap"`
}

// ArenaChanged says how much host memory a client has for what is away, or that is
// being made for it.
type ArenaChanged struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"`
}

// RestoreMemory says that a client had memory on the GPU before a restart of the
// caller. The GPU's memory is given to nobody until that client reports, is Gone, or
// does not come for too long.
type RestoreMemory struct {
	Client  base.ClientID
	Tenant  string `always:"tenant=%v"`
	Bytes   uint64 `always:"bytes=%v"` // that it had reserved
	Gang    string `text:"gang=%v"`
	CanMove bool   `text:"canmove"`

	Suspended bool
}

func (Reserve) Event() string         { return "reserve" }
func (Moved) Event() string           { return "moved" }
func (SetTenantMemory) Event() string { return "keep" }
func (SetGPUMemory) Event() string    { return "set gpumemory" }
func (ArenaChanged) Event() string    { return "arena" }
func (RestoreMemory) Event() string   { return "restorememory" }

// Room tells a client how much memory it may have on the GPU from now on: write it to
// the client's page, wake it, send ROOM. Of the actions that answer an Attach one
// may come even before Adopt: it is for the new page, before ATTACHED is sent.
type Room struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"`
	Less   bool   `text:"less"` // the client has to move out, and to report
	Seq    uint32 // write it to the page after Bytes
}

// Still says whether the clients of the GPU have all their memory there, or have a place for it, so that
// nobody has to make room for others: write it to the pages of all, before what follows.
type Still struct {
	On bool `always:"on=%v"`
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
	Serial  uint64   `text:"serial=%v"`
	Stands  Standing `always:"%v"` // as the client is to see it
	Refused Refusal  `text:"refused=%v"`
	Asked   uint64   // what was refused
	Why     error    // of NoPlace
}

// LimitsChanged says that what a tenant's clients may have, or have, has changed:
// write GPU.Standing to their pages.
type LimitsChanged struct {
	Tenant string `always:"of %v"`
}

// ArenaWanted says how much host memory a client needs for what it may have to move
// out: have it made.
type ArenaWanted struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"`
}

// ArenaFound says that a client has host memory from before a restart of the caller,
// by its own word, as far as that is believed.
type ArenaFound struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"`
}

// Promised says how much memory a client has been promised, so that it can be
// recorded for RestoreMemory; 0: nothing any more.
type Promised struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"`
}

// SwapDone says that a client has moved what it had to. There is nothing to carry out.
type SwapDone struct {
	Client base.ClientID
	In     bool          `text:"in"` // onto the GPU; else off it
	Bytes  uint64        `always:"bytes=%v"`
	Took   time.Duration `always:"took=%v"`
}

// SwapStalled says that a client has not moved out for a grace period. There is
// nothing to carry out.
type SwapStalled struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"` // for which others wait
}

// Stranded says that there is no place for all of a client's memory, because others'
// cannot be moved: it is granted nothing before there is one. There is nothing to
// carry out.
type Stranded struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"` // that do not fit
}

// Suspended says that a client's memory leaves until the client has a grant again. There
// is nothing to carry out.
type Suspended struct {
	Client base.ClientID
	Bytes  uint64 `always:"bytes=%v"` // that leave
	Idle   bool   `text:"idle"`       // because it was idle; else by Suspend
}

func (Suspended) Action() string     { return "suspended" }
func (Still) Action() string         { return "still" }
func (Room) Action() string          { return "room" }
func (Reserved) Action() string      { return "reserved" }
func (LimitsChanged) Action() string { return "limits" }
func (ArenaWanted) Action() string   { return "arenawanted" }
func (ArenaFound) Action() string    { return "arenafound" }
func (Promised) Action() string      { return "promised" }
func (SwapDone) Action() string      { return "swapped" }
func (SwapStalled) Action() string   { return "stalled" }
func (Stranded) Action() string      { return "stranded" }

func (r Report) String() string { return base.Fields(r) }

func (r Refusal) String() string { return base.Name(r, "refusal", "none", "limit", "ceiling", "place") }

// View answers what the caller asks about the memory of a GPU. It changes nothing.
type View struct{ mem *Memory }

// View returns what the caller may ask.
func (mem *Memory) View() View { return View{mem} }

// Check returns an error that names the first broken invariant, which is a bug in this package, or
// nil. It costs O(clients) and changes nothing.
func (mem *Memory) Check() error {
	if err := mem.ledger.check(); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if mem.rooms == nil {
		return nil
	}
	if err := mem.rooms.check(); err != nil {
		return fmt.Errorf("rooms: %w", err)
	}
	for id, m := range mem.members {
		o := mem.rooms.clients[id]
		switch {
		case o == nil:
			return fmt.Errorf("no rooms are known for client %d", id)
		case (m.answer != nil) != slices.Contains(mem.awaiting, m):
			return fmt.Errorf("client %d waits for room: %t", id, m.answer != nil)
		case m.stranded != slices.Contains(mem.stranded, m):
			return fmt.Errorf("client %d is stranded: %t", id, m.stranded)
		case !mem.turns.Known(id) && (o.active || m.stranded):
			return fmt.Errorf("client %d is gone, and has a grant: %t, is stranded: %t", id, o.active, m.stranded)
		}
	}
	if mem.due != 0 && mem.due <= mem.now {
		return fmt.Errorf("memory was due at %d, it is %d", mem.due, mem.now)
	}
	return nil
}

// CheckClient returns an error if the turns know something else about a client than Memory.
func (mem *Memory) CheckClient(id base.ClientID, granted, away, stranded bool) error {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return nil
	}
	if o := mem.rooms.clients[id]; o.active != granted || (o.away > 0) != away || m.stranded != stranded {
		return fmt.Errorf("has a grant: %t, away: %t, stranded: %t; its memory: %+v", granted, away, stranded, *o)
	}
	return nil
}

// MemorySnapshot describes a GPU's memory where it is swapped.
type MemorySnapshot struct {
	Capacity, Promised uint64
	Lacking            uint64 // room that clients wait for
	Out, In            Direction
	Refused            uint64 // reservations without a place
	Suspends           uint64 // of clients, by order or because they were idle
	Clients            []ClientMemory
}

// ClientMemory describes the memory of one client, as it says.
type ClientMemory struct {
	Client                          base.ClientID
	Keep                            Keep
	Promised, Resident, Fixed, Away uint64
	Room, Lacks                     uint64
	Out, In                         uint64 // copied
	PassedOver                      bool   // it does not move out as it should
	Stalled                         bool   // for so long that it was reported
	Stalls                          int    // so often in a row that was reported
	Suspended                       bool   // its memory left, or is leaving, until it has a grant
	Stranded                        uint64 // that have no place, if it is stranded
}

// Still says whether nobody has to make room, as Still has said.
func (v View) Still() bool { return v.mem.still }

// ClientMemory returns what a client has; false: it is not known, or nothing is
// swapped.
func (v View) ClientMemory(id base.ClientID) (ClientMemory, bool) {
	mem := v.mem
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return ClientMemory{}, false
	}
	o := mem.rooms.clients[id]
	cm := ClientMemory{Client: id, Keep: o.keep, Promised: m.promised, Resident: o.resident, Fixed: o.fixed, Away: o.away,
		Room: o.room, Lacks: o.counted.lacks, Out: m.report.Out, In: m.report.In, Suspended: o.suspended && !o.active, PassedOver: o.stalled, Stalled: m.stalled, Stalls: m.stalls}
	if m.stranded && !m.behind {
		cm.Stranded = mem.rooms.stranded(id)
	}
	return cm, true
}

// MemorySnapshot returns nil where nothing is swapped. Clients are in the order of
// their IDs, those that are not connected included.
func (v View) MemorySnapshot() *MemorySnapshot {
	mem := v.mem
	r := mem.rooms
	if r == nil {
		return nil
	}
	s := &MemorySnapshot{Capacity: r.bound(), Promised: r.promised(), Lacking: r.sum.lacks, Out: mem.out, In: mem.in, Refused: mem.refused, Suspends: mem.suspends}
	for _, o := range r.all {
		cm, _ := v.ClientMemory(o.id)
		s.Clients = append(s.Clients, cm)
	}
	return s
}

// Reservations returns the tenants with a limit or with something reserved, in order,
// and where each stands.
func (v View) Reservations() (tenants []string, stand []Standing) {
	tenants = v.mem.ledger.names()
	for _, t := range tenants {
		stand = append(stand, v.mem.ledger.reservedBy(t, 0))
	}
	return tenants, stand
}

// ReservedBy returns what a client, and all of its tenant's clients, have reserved.
func (v View) ReservedBy(tenant string, id base.ClientID) Standing {
	return v.mem.ledger.reservedBy(tenant, id)
}
