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
	Auto                   // one of the two, as ways.go decides
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
	Cut     bool `text:"cut"`     // its latest grant ended preempted, see Release, and its work is not finished
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
type Withdraw struct {
	Client base.ClientID
	Exits  bool `text:"exits"` // nor one to finish work that was cut
}

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

// HeldOff says that a client whose grant is fenced is kept off the GPU from outside since now, or no more.
// While it is, the fence costs its tenant nothing.
type HeldOff struct {
	Client base.ClientID
	Off    bool `text:"off"`
}

// HeldOn says that a client, which is held from outside, is on the GPU since now; under its grant it was to be so much
// earlier. Its tenant's limit is not charged that.
type HeldOn struct {
	Client base.ClientID
	Late   time.Duration `always:"late=%v"`
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
func (HeldOff) Event() string        { return "held" }
func (HeldOn) Event() string         { return "on" }
func (Exec) Event() string           { return "exec" }
func (Suspend) Event() string        { return "suspend" }
func (ResumeTenant) Event() string   { return "resume" }
func (Called) Event() string         { return "called" }

// Control says how trying a control of the GPU's own scheduler went.
type Control uint8

// The values of a Control, as on the wire.
const (
	ControlUntried Control = iota
	ControlWorks
	ControlUnseen  // no channel group of the GPU was seen, or perhaps not all
	ControlRefused // the driver answers with an error
	ControlFaked   // the driver answers success and changes nothing
	ControlFailed  // the control cannot be sent
)

func (c Control) String() string {
	return base.Name(c, "control", "not tried", "works", "no channel groups seen", "driver refused", "driver fakes it", "cannot be sent")
}

// Controls says what the GPU's own scheduler lets a client do, as its shim has tried it.
type Controls struct {
	Client   base.ClientID
	Slices   Control `always:"slices=%q"`
	Channels Control `always:"channels=%q"`
	Groups   int     `always:"groups=%v"` // compute channel groups that were seen
	Bare     int     `always:"bare=%v"`   // channels in no group that was seen
	Driver   string  `always:"driver=%q"` // version; "": unknown
}

func (Controls) Event() string { return "controls" }

// MaxRecorded is how many holders of a GPU a Persist names.
const MaxRecorded = 64

// Persist records what a restart must know, before any later action is carried out: the
// last epoch, who holds a grant or may be given one without a further Persist, and how
// clients share the GPU. Latency grants are recorded after they are given. If recording
// fails, the Grant that follows must not be carried out.
type Persist struct {
	Epoch      base.Epoch          `always:"epoch=%v"`
	Holders    [MaxRecorded]Holder `text:"%v"`         // the first ones; the rest is zero
	Unrecorded bool                `text:"unrecorded"` // clients that are not recorded may hold grants
	Way        Way                 `text:"way=%v"`
}

// Holder is a client with the epoch of its grant.
type Holder struct {
	Client base.ClientID
	Epoch  base.Epoch
	Shared bool // others of its cohort, or beside it, may have held the GPU in the same turn
}

func (h Holder) String() string { return fmt.Sprintf("%d:%d", h.Client, h.Epoch) }

// Grant opens the client's gate: write the epoch's word to its page, wake the
// waiters on it, send GRANT.
type Grant struct {
	Client     base.ClientID
	Tenant     string
	Epoch      base.Epoch    `always:"epoch=%v"`
	Quantum    time.Duration `text:"quantum=%v"` // 0: unbounded
	Waited     time.Duration // since its request
	Limited    time.Duration // of that, its tenant's core limit kept it away
	Concurrent bool          `text:"concurrent"` // others may hold the GPU at the same time
	Latency    bool          `text:"latency"`    // it is let in beside others, and goes when it is idle
	Beside     bool          `text:"beside"`     // it is let in beside others, and stays: their time slices are short
	Shared     bool          // others of its cohort may hold the GPU in the same turn
	Moving     bool          `text:"moving"` // it has to move memory onto the GPU first; its turn begins with Ready
}

// RevokeReason says why a grant is asked back.
type RevokeReason uint8

const (
	QuantumOver    RevokeReason = iota + 1 // the turn is over, and somebody waits
	LimitReached                           // the tenant has used up its Share.Limit
	PriorityUsedUp                         // a latency tenant kept batch tenants out for too long
	ModeChange                             // the mode became Exclusive
	GangTurn                               // a gang's turn begins or ends on several GPUs
	MoveStalled                            // its memory does not get onto the GPU, and somebody waits
	Suspending                             // its memory is to leave the GPU
)

func (r RevokeReason) String() string {
	return base.Name(r, "reason", "none", "quantum", "limit", "priority", "mode", "gang", "memory", "suspend")
}

// Revoke asks the grant back: word := 0, then send REVOKE.
type Revoke struct {
	Client  base.ClientID
	Epoch   base.Epoch    `always:"epoch=%v"`
	Grace   time.Duration `always:"grace=%v"`   // time until the grant is fenced
	Waiters int           `always:"waiters=%v"` // clients that wait for this GPU
	Why     RevokeReason  `always:"why=%v"`
}

// StepOne lets a client of a gang make one call, because others of the gang that drain
// may wait for that call: send REVOKE of this epoch, with the flag for a step. The word
// stays 0; the client drains and releases.
type StepOne struct {
	Client base.ClientID
	Epoch  base.Epoch    `always:"epoch=%v"`
	Grace  time.Duration `always:"grace=%v"` // time until the grant is fenced
}

// StepGPU asks the caller to step another GPU of the node with GangMoved, because a gang
// has changed: after the actions before this one, and before any other event.
type StepGPU struct {
	GPU string `always:"GPU %v"`
} // as in Config.GPU

// Slice changes the GPU's own time slice of a client: send SLICE to a shim that
// understands it. After each Attach a client has the driver's own.
type Slice struct {
	Client base.ClientID
	D      time.Duration `always:"%v"` // 0: the driver's own
}

// Pause shuts the client's gate while latency tenants are on the GPU: word := 0, and
// nothing else. Its submitted work goes on, and its grant stays.
type Pause struct{ Client base.ClientID }

// Resume opens the gate again: write the epoch's word, wake the waiters on it.
type Resume struct {
	Client base.ClientID
	Epoch  base.Epoch `always:"epoch=%v"`
}

// Stand tells a latency client without a grant whether it may go ahead when it asks for
// a grant, before the grant has come: it would be granted at once anyway.
type Stand struct {
	Client base.ClientID
	On     bool `always:"%v"`
}

// EndReason says how a grant ended.
type EndReason uint8

const (
	EndRevoked   EndReason = iota + 1 // released after a revoke
	EndIdle                           // released early, with nothing to do
	EndExit                           // released because the process ends
	EndDeath                          // the process died
	EndLost                           // the client is back and does not have the grant
	EndPreempted                      // taken off the GPU with work left, which waits for the next grant
)

func (r EndReason) String() string {
	return base.Name(r, "end", "none", "revoked", "idle", "exit", "death", "lost", "preempted")
}

// Released says that a grant has ended. There is nothing to carry out.
type Released struct {
	Client  base.ClientID
	Tenant  string
	Epoch   base.Epoch    `always:"epoch=%v"`
	Reason  EndReason     `always:"%v"`
	Held    time.Duration `always:"held=%v"`  // since the grant, drain included
	Drained time.Duration `text:"drained=%v"` // the part after the revoke; 0: not revoked
	Moved   time.Duration `text:"moved=%v"`   // the part in which it moved memory, before its turn began
	Fenced  bool          `text:"fenced"`     // the grant was fenced before
	Claimed bool          // the client said that it had the grant, and there is no record of that
}

// ModeChosen says which mode is in effect, and why, when either has changed. There is
// nothing to carry out.
type ModeChosen struct {
	Mode  Mode  `always:"%v:"` // Exclusive or Concurrent
	Cause Cause `always:"%v"`
}

// Close shuts the gate without a frame: word := 0. The client has released early, or
// its connection is lost; then the page is that of the lost connection.
type Close struct{ Client base.ClientID }

// Adopt lets a client that attached again go on under the grant it holds:
// write the epoch's word to its new page before ATTACHED is sent.
type Adopt struct {
	Client     base.ClientID
	Epoch      base.Epoch `always:"epoch=%v"`
	Concurrent bool
	Shared     bool // others of its cohort may hold the GPU in the same turn
}

// Fence reports a client that did not release within the grace period. Its word is 0
// already, unless its page is from before a restart, as nobody can write to that page.
// Others are granted now; the client is not before it has released or died.
type Fence struct {
	Client  base.ClientID
	Epoch   base.Epoch `always:"epoch=%v"`
	Claimed bool       // only the client itself says that it has this grant
}

// Notice tells a client that holds a grant, or gets one next, about the others on
// its GPU: write all of it to the page, and send NOTICE if Leave or Bound has
// changed. The numbers are exact for up to a few holders.
type Notice struct {
	Client  base.ClientID
	Waiters int  `always:"waiters=%v"` // others that wait for this GPU, or are slowed down by this client
	Present int  `always:"present=%v"` // others that are attached to this GPU
	Leave   bool `text:"leave"`        // give the GPU back when idle
	Bound   bool `text:"bound"`        // keep little work ahead of the GPU
	Patient bool `text:"patient"`      // keep the GPU over short pauses in spite of Leave, see PatientIdle
}

func (Persist) Action() string    { return "persist" }
func (Grant) Action() string      { return "grant" }
func (Revoke) Action() string     { return "revoke" }
func (Close) Action() string      { return "close" }
func (Adopt) Action() string      { return "adopt" }
func (Fence) Action() string      { return "fence" }
func (Notice) Action() string     { return "notice" }
func (StepOne) Action() string    { return "step" }
func (StepGPU) Action() string    { return "step" }
func (Slice) Action() string      { return "slice" }
func (Pause) Action() string      { return "pause" }
func (Resume) Action() string     { return "resume" }
func (Stand) Action() string      { return "stand" }
func (Released) Action() string   { return "released" }
func (ModeChosen) Action() string { return "mode" }
