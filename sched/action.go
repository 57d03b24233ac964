// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

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
