// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"fmt"
	"strings"
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

func (m Mode) String() string {
	switch m {
	case Exclusive:
		return "exclusive"
	case Concurrent:
		return "concurrent"
	case Auto:
		return "auto"
	}
	return fmt.Sprintf("mode(%d)", uint8(m))
}

// Priority says whether a tenant waits for its turn.
type Priority uint8

const (
	Batch   Priority = iota // takes turns
	Latency                 // is granted at once, while the gates of batch tenants are shut
)

func (p Priority) String() string {
	switch p {
	case Batch:
		return "batch"
	case Latency:
		return "latency"
	}
	return fmt.Sprintf("priority(%d)", uint8(p))
}

// DefaultWeight is the weight of a tenant that says none. MaxWeight is the greatest.
const (
	DefaultWeight = 100
	MaxWeight     = 10000
)

// Share is what a tenant, with all its processes, may have of a GPU's time and what it
// is promised. The zero Share takes turns like everybody.
type Share struct {
	Limit    int      // percent of the GPU's time, 1 to 100, also when alone; 0: no limit
	Request  int      // percent that it gets if it wants it, up to 100; 0: nothing is promised
	Weight   int      // its part of what nobody was promised, up to MaxWeight; 0: DefaultWeight
	Priority Priority //
	Gang     string   // its processes are granted and revoked together with those of this name; "": alone
	Overlap  string   // its processes run at the same time as those of this name, by MPS; "": not so
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

func (s Share) String() string {
	var b strings.Builder
	add := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	if s.Limit != 0 {
		add(" limit=%d", s.Limit)
	}
	if s.Request != 0 {
		add(" request=%d", s.Request)
	}
	if s.Weight != 0 {
		add(" weight=%d", s.Weight)
	}
	if s.Priority != Batch {
		add(" priority=%v", s.Priority)
	}
	if s.Gang != "" {
		add(" gang=%s", s.Gang)
	}
	if s.Overlap != "" {
		add(" overlap=%s", s.Overlap)
	}
	return strings.TrimPrefix(b.String(), " ")
}

// Reason says why a client released its grant.
type Reason uint8

const (
	Revoked Reason = iota + 1 // the answer to a revoke
	Idle                      // early release: somebody waits and the client has no work
	Exit                      // the process ends, and wants nothing more
)

func (r Reason) String() string {
	switch r {
	case Revoked:
		return "revoked"
	case Idle:
		return "idle"
	case Exit:
		return "exit"
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Attach says that a process uses this GPU over a new connection. If the process still
// has an old connection, Lost for that comes before Attach, or never. If Step returns
// an Adopt, it is the first action: the caller carries it out, sends ATTACHED, and
// goes on with the rest.
//
// Tenant names the clients whose time is counted together, mostly a container; ""
// makes the client a tenant of its own. Share is the tenant's share from now on.
type Attach struct {
	Client ClientID
	Tenant string
	Share  Share
	Held   Epoch // the grant the client still holds or drains; 0: none
	Want   bool  // counts as a Request

	CanMove bool // the client can move its memory; else it stays on the GPU
	Again   bool // the process was attached before, perhaps to an earlier scheduler: its memory may be on the GPU
}

// Request says that a thread of the client waits at the gate. A second one changes
// nothing. While the client has a grant, the request is remembered until that grant is
// released: a client may ask again before its release was seen.
type Request struct{ Client ClientID }

// Release says that the grant with this epoch is drained and given back. If it was
// preempted, its work is off the GPU in the middle and wants the next grant, which
// counts as a Request. An epoch that the client does not have is counted as stale and
// ignored.
type Release struct {
	Client    ClientID
	Epoch     Epoch
	Reason    Reason
	Preempted bool
	Calls     uint64 // gated calls under the grant, as the client says
}

// Withdraw says that the client wants no grant any more.
type Withdraw struct{ Client ClientID }

// Lost says that the client's connection is lost, which proves nothing about
// its work. Events about clients that the core does not know change nothing.
type Lost struct{ Client ClientID }

// Gone says that the process is dead and its work on the GPU has ended.
type Gone struct{ Client ClientID }

// Tick says only that time has passed. See GPU.Deadline.
type Tick struct{}

// SetQuantum changes the time quantum, also of the current turn. The value is
// clamped to MinQuantum..MaxQuantum.
type SetQuantum struct{ D time.Duration }

// SetGrace changes the grace period, also of current drains. The value is
// clamped to MinGrace..MaxGrace.
type SetGrace struct{ D time.Duration }

// SetShare changes the share of a tenant, also while it waits or holds. A tenant that
// the core does not know gets its share by its next Attach.
type SetShare struct {
	Tenant string
	Share  Share
}

// SetTuning changes the accounting, from now on.
type SetTuning struct{ Tuning Tuning }

// GangMoved carries out a StepGPU.
type GangMoved struct{}

// Filled says which part of the GPU's processors had work while kernels ran, since the look
// before, on a GPU that ran kernels for most of that time; 0: that is not known.
type Filled struct{ Part float64 }

// SetSwapShare changes how much of the time moving memory may take, percent: see
// Config.SwapShare.
type SetSwapShare struct{ Percent int }

// SetMode changes the mode. When it becomes Exclusive all grants are revoked, and the
// first exclusive grant is given when all are released or fenced.
type SetMode struct{ M Mode }

// Restore brings back what was persisted before a restart of the caller: a client that
// held Epoch and whose process lives. Nothing is granted until the client attaches
// again, is Gone, or a quantum and a grace period have passed. Gang and Overlap are those
// of its share; with one of them, Tenant is as in Attach: a gang, or an overlap group,
// whose members held goes on when they are back. Restores come before all other events.
type Restore struct {
	Client  ClientID
	Epoch   Epoch
	Tenant  string
	Gang    string
	Overlap string
	Shared  bool // as Holder says
}

// RestoreUnknown says that clients may hold that were not recorded before a restart
// of the caller (Persist.Unrecorded), with epochs up to this one. No exclusive grant
// is given for a quantum and a grace period. It comes when Restores come.
type RestoreUnknown struct{ Epoch Epoch }

// HeldOff says that a client whose grant is fenced is kept off the GPU from outside since now, or no more.
// While it is, the fence costs its tenant nothing.
type HeldOff struct {
	Client ClientID
	Off    bool
}

// Exec says that a process runs another program now: what it had reserved is gone, and the
// grant that it had when its connection was lost is over.
type Exec struct{ Client ClientID }

// Suspend has all memory of a tenant's clients leave the GPU that can be moved, also if
// nobody needs the room: grants are asked back for that. It comes back with the next grant
// of each. GPU.SuspendFits says before whether there is host memory for all of it.
type Suspend struct{ Tenant string }

// ResumeTenant has the memory of a tenant's clients come back that is away from the GPU: each of
// them waits for a grant as if it had sent a Request. GPU.ResumeFits says before whether
// there is any.
type ResumeTenant struct{ Tenant string }

// Called says that a client has made gated calls since the one before. It matters only
// where idle clients are suspended.
type Called struct{ Client ClientID }

func (Attach) Event()         {}
func (Request) Event()        {}
func (Release) Event()        {}
func (Lost) Event()           {}
func (Gone) Event()           {}
func (Tick) Event()           {}
func (SetQuantum) Event()     {}
func (SetGrace) Event()       {}
func (SetMode) Event()        {}
func (SetShare) Event()       {}
func (SetTuning) Event()      {}
func (GangMoved) Event()      {}
func (Filled) Event()         {}
func (SetSwapShare) Event()   {}
func (Restore) Event()        {}
func (RestoreUnknown) Event() {}
func (Withdraw) Event()       {}
func (HeldOff) Event()        {}
func (Exec) Event()           {}
func (Suspend) Event()        {}
func (ResumeTenant) Event()   {}
func (Called) Event()         {}

func (e Attach) String() string {
	s := fmt.Sprintf("attach %d", e.Client)
	if e.Tenant != "" {
		s += " tenant=" + e.Tenant
	}
	if e.Share != (Share{}) {
		s += " " + e.Share.String()
	}
	if e.Held != 0 {
		s += fmt.Sprintf(" held=%d", e.Held)
	}
	if e.Want {
		s += " want"
	}
	return base.Flags(s, "canmove", e.CanMove, "again", e.Again)
}
func (e Request) String() string { return fmt.Sprintf("request %d", e.Client) }
func (e Release) String() string {
	return base.Flags(fmt.Sprintf("release %d epoch=%d %v", e.Client, e.Epoch, e.Reason), "preempted", e.Preempted)
}
func (e Withdraw) String() string       { return fmt.Sprintf("withdraw %d", e.Client) }
func (e RestoreUnknown) String() string { return fmt.Sprintf("restore unknown epoch=%d", e.Epoch) }
func (e Lost) String() string           { return fmt.Sprintf("lost %d", e.Client) }
func (e Gone) String() string           { return fmt.Sprintf("gone %d", e.Client) }
func (Tick) String() string             { return "tick" }
func (e SetQuantum) String() string     { return fmt.Sprintf("set quantum=%v", e.D) }
func (e SetGrace) String() string       { return fmt.Sprintf("set grace=%v", e.D) }
func (e SetMode) String() string        { return fmt.Sprintf("set mode=%v", e.M) }
func (e SetShare) String() string {
	return strings.TrimSuffix(fmt.Sprintf("set tenant=%s %v", e.Tenant, e.Share), " ")
}
func (e SetTuning) String() string    { return "set " + e.Tuning.String() }
func (GangMoved) String() string      { return "gang moved" }
func (e Filled) String() string       { return fmt.Sprintf("filled %.3f", e.Part) }
func (e SetSwapShare) String() string { return fmt.Sprintf("set swapshare=%d", e.Percent) }
func (e Restore) String() string {
	s := fmt.Sprintf("restore %d epoch=%d", e.Client, e.Epoch)
	if e.Tenant != "" {
		s += " tenant=" + e.Tenant
	}
	if e.Gang != "" {
		s += " gang=" + e.Gang
	}
	if e.Overlap != "" {
		s += " overlap=" + e.Overlap
	}
	if e.Shared {
		s += " shared"
	}
	return s
}
func (e HeldOff) String() string      { return base.Flags(fmt.Sprintf("held %d", e.Client), "off", e.Off) }
func (e Exec) String() string         { return fmt.Sprintf("exec %d", e.Client) }
func (e Called) String() string       { return fmt.Sprintf("called %d", e.Client) }
func (e Suspend) String() string      { return "suspend tenant=" + e.Tenant }
func (e ResumeTenant) String() string { return "resume tenant=" + e.Tenant }
