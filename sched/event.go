// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Mode says whether grants of a GPU exclude each other.
type Mode uint8

const (
	Exclusive  Mode = iota // one holder at a time
	Concurrent             // every request is granted at once
	Auto                   // one of the two, as auto.go decides
)

func (m Mode) String() string { return base.Name(m, "mode", "exclusive", "concurrent", "auto") }

// Priority says whether a tenant waits for its turn.
type Priority uint8

const (
	Batch   Priority = iota // takes turns
	Latency                 // is granted at once, while the gates of batch tenants are shut
)

func (p Priority) String() string { return base.Name(p, "priority", "batch", "latency") }

// DefaultWeight is the weight of a tenant that says none. MaxWeight is the greatest.
const (
	DefaultWeight = 100
	MaxWeight     = 10000
)

// Share is what a tenant, with all its processes, may have of a GPU's time and what it
// is promised. The zero Share takes turns like everybody.
type Share struct {
	Limit    int      `text:"limit=%v"`    // percent of the GPU's time, 1 to 100, also when alone; 0: no limit
	Request  int      `text:"request=%v"`  // percent that it gets if it wants it, up to 100; 0: nothing is promised
	Weight   int      `text:"weight=%v"`   // its part of what nobody was promised, up to MaxWeight; 0: DefaultWeight
	Priority Priority `text:"priority=%v"` //
	Gang     string   `text:"gang=%v"`     // its processes are granted and revoked together with those of this name; "": alone
	Overlap  string   `text:"overlap=%v"`  // its processes run at the same time as those of this name, by MPS; "": not so
}

// Group names those that are granted together with it: its gang or its overlap group; "":
// none.
func (s Share) Group() string { return cmp.Or(s.Gang, s.Overlap) }

// Validate returns an error that says what is wrong with a share that a user
// asks for, or nil. A GPU clamps what it is given.
func (s Share) Validate() error {
	switch {
	case s.Limit < 0 || s.Limit > 100:
		return fmt.Errorf("core limit %d: must be a percentage from 1 to 100, or 0 for none", s.Limit)
	case s.Request < 0 || s.Request > 100:
		return fmt.Errorf("core request %d: must be a percentage from 1 to 100, or 0 for none", s.Request)
	case s.Limit != 0 && s.Request > s.Limit:
		return fmt.Errorf("core request %d is above the core limit %d", s.Request, s.Limit)
	case s.Weight < 0 || s.Weight > MaxWeight:
		return fmt.Errorf("weight %d: must be from 1 to %d, or 0 for %d", s.Weight, MaxWeight, DefaultWeight)
	case s.Priority > Latency:
		return fmt.Errorf("unknown %v", s.Priority)
	}
	return nil
}

func (s Share) String() string { return base.Fields(s) }

// Reason says why a client released its grant.
type Reason uint8

const (
	Revoked Reason = iota + 1 // the answer to a revoke
	Idle                      // early release: somebody waits and the client has no work
	Exit                      // the process ends, and wants nothing more
)

func (r Reason) String() string { return base.Name(r, "reason", "none", "revoked", "idle", "exit") }

// Attach says that a process uses this GPU over a new connection. If the process still
// has an old connection, Lost for that comes before Attach, or never. If Step returns
// an Adopt, it is the first action: the caller carries it out, sends ATTACHED, and
// goes on with the rest.
//
// Tenant names the clients whose time is counted together, mostly a container; ""
// makes the client a tenant of its own. Share is the tenant's share from now on.
type Attach struct {
	Client base.ClientID
	Tenant string     `text:"tenant=%v"`
	Share  Share      `text:"%v"`
	Held   base.Epoch `text:"held=%v"` // the grant the client still holds or drains; 0: none
	Want   bool       `text:"want"`    // counts as a Request

	CanMove bool `text:"canmove"` // the client can move its memory; else it stays on the GPU
	Again   bool `text:"again"`   // the process was attached before, perhaps to an earlier scheduler: its memory may be on the GPU
}

// Request says that a thread of the client waits at the gate. A second one changes
// nothing. While the client has a grant, the request is remembered until that grant is
// released: a client may ask again before its release was seen.
type Request struct{ Client base.ClientID }

// Release says that the grant with this epoch is drained and given back. If it was
// preempted, its work is off the GPU in the middle and wants the next grant, which
// counts as a Request. An epoch that the client does not have is counted as stale and
// ignored.
type Release struct {
	Client    base.ClientID
	Epoch     base.Epoch `always:"epoch=%v"`
	Reason    Reason     `always:"%v"`
	Preempted bool       `text:"preempted"`
	Calls     uint64     // gated calls under the grant, as the client says
}

// Withdraw says that the client wants no grant any more.
type Withdraw struct{ Client base.ClientID }

// Lost says that the client's connection is lost, which proves nothing about
// its work. Events about clients that the core does not know change nothing.
type Lost struct{ Client base.ClientID }

// Gone says that the process is dead and its work on the GPU has ended.
type Gone struct{ Client base.ClientID }

// Tick says only that time has passed. See GPU.Deadline.
type Tick struct{}

// SetQuantum changes the time quantum, also of the current turn. The value is
// clamped to MinQuantum..MaxQuantum.
type SetQuantum struct {
	D time.Duration `always:"quantum=%v"`
}

// SetShare changes the share of a tenant, also while it waits or holds. A tenant that
// the core does not know gets its share by its next Attach.
type SetShare struct {
	Tenant string `always:"tenant=%v"`
	Share  Share  `text:"%v"`
}

// GangMoved carries out a StepGPU.
type GangMoved struct{}

// SetSwapShare changes how much of the time moving memory may take, percent: see
// Config.SwapShare.
type SetSwapShare struct {
	Percent int `always:"swapshare=%v"`
}

// SetMode changes the mode. When it becomes Exclusive all grants are revoked, and the
// first exclusive grant is given when all are released or fenced.
type SetMode struct {
	M Mode `always:"mode=%v"`
}

// Restore brings back what was persisted before a restart of the caller: a client that
// held Epoch and whose process lives. Nothing is granted until the client attaches
// again, is Gone, or a quantum and a grace period have passed. Gang and Overlap are those
// of its share; with one of them, Tenant is as in Attach: a gang, or an overlap group,
// whose members held goes on when they are back. Restores come before all other events.
type Restore struct {
	Client  base.ClientID
	Epoch   base.Epoch `always:"epoch=%v"`
	Tenant  string     `text:"tenant=%v"`
	Gang    string     `text:"gang=%v"`
	Overlap string     `text:"overlap=%v"`
	Shared  bool       `text:"shared"` // as Holder says
}

// RestoreUnknown says that clients may hold that were not recorded before a restart
// of the caller (Persist.Unrecorded), with epochs up to this one. No exclusive grant
// is given for a quantum and a grace period. It comes when Restores come.
type RestoreUnknown struct {
	Epoch base.Epoch `always:"epoch=%v"`
}

// Exec says that a process runs another program now: what it had reserved is gone, and the
// grant that it had when its connection was lost is over.
type Exec struct{ Client base.ClientID }

// Suspend has all memory of a tenant's clients leave the GPU that can be moved, also if
// nobody needs the room: grants are asked back for that. It comes back with the next grant
// of each. GPU.SuspendFits says before whether there is host memory for all of it.
type Suspend struct {
	Tenant string `always:"tenant=%v"`
}

// ResumeTenant has the memory of a tenant's clients come back that is away from the GPU: each of
// them waits for a grant as if it had sent a Request. GPU.ResumeFits says before whether
// there is any.
type ResumeTenant struct {
	Tenant string `always:"tenant=%v"`
}

// Called says that a client has made gated calls since the one before. It matters only
// where idle clients are suspended.
type Called struct{ Client base.ClientID }

func (Attach) Event() string         { return "attach" }
func (Request) Event() string        { return "request" }
func (Release) Event() string        { return "release" }
func (Lost) Event() string           { return "lost" }
func (Gone) Event() string           { return "gone" }
func (Tick) Event() string           { return "tick" }
func (SetQuantum) Event() string     { return "set" }
func (SetMode) Event() string        { return "set" }
func (SetShare) Event() string       { return "set" }
func (GangMoved) Event() string      { return "gang moved" }
func (SetSwapShare) Event() string   { return "set" }
func (Restore) Event() string        { return "restore" }
func (RestoreUnknown) Event() string { return "restore unknown" }
func (Withdraw) Event() string       { return "withdraw" }
func (Exec) Event() string           { return "exec" }
func (Suspend) Event() string        { return "suspend" }
func (ResumeTenant) Event() string   { return "resume" }
func (Called) Event() string         { return "called" }
