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
	Epoch      base.Epoch
	Holders    [MaxRecorded]Holder // the first ones; the rest is zero
	Unrecorded bool                // clients that are not recorded may hold grants
	Way        Way
}

// Holder is a client with the epoch of its grant.
type Holder struct {
	Client base.ClientID
	Epoch  base.Epoch
	Shared bool // others of its cohort, or beside it, may have held the GPU in the same turn
}

// Grant opens the client's gate: write the epoch's word to its page, wake the
// waiters on it, send GRANT.
type Grant struct {
	Client     base.ClientID
	Tenant     string
	Epoch      base.Epoch
	Quantum    time.Duration // 0: unbounded
	Waited     time.Duration // since its request
	Limited    time.Duration // of that, its tenant's core limit kept it away
	Concurrent bool          // others may hold the GPU at the same time
	Latency    bool          // it is let in beside others, and goes when it is idle
	Beside     bool          // it is let in beside others, and stays: their time slices are short
	Shared     bool          // others of its cohort may hold the GPU in the same turn
	Moving     bool          // it has to move memory onto the GPU first; its turn begins with Ready
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
	names := [...]string{"", "quantum", "limit", "priority", "mode", "gang", "memory", "suspend"}
	if int(r) < len(names) && r != 0 {
		return names[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Revoke asks the grant back: word := 0, then send REVOKE.
type Revoke struct {
	Client  base.ClientID
	Epoch   base.Epoch
	Grace   time.Duration // time until the grant is fenced
	Waiters int           // clients that wait for this GPU
	Why     RevokeReason
}

// StepOne lets a client of a gang make one call, because others of the gang that drain
// may wait for that call: send REVOKE of this epoch, with the flag for a step. The word
// stays 0; the client drains and releases.
type StepOne struct {
	Client base.ClientID
	Epoch  base.Epoch
	Grace  time.Duration // time until the grant is fenced
}

// StepGPU asks the caller to step another GPU of the node with GangMoved, because a gang
// has changed: after the actions before this one, and before any other event.
type StepGPU struct{ GPU string } // as in Config.GPU

// Slice changes the GPU's own time slice of a client: send SLICE to a shim that
// understands it. After each Attach a client has the driver's own.
type Slice struct {
	Client base.ClientID
	D      time.Duration // 0: the driver's own
}

// Pause shuts the client's gate while latency tenants are on the GPU: word := 0, and
// nothing else. Its submitted work goes on, and its grant stays.
type Pause struct{ Client base.ClientID }

// Resume opens the gate again: write the epoch's word, wake the waiters on it.
type Resume struct {
	Client base.ClientID
	Epoch  base.Epoch
}

// Stand tells a latency client without a grant whether it may go ahead when it asks for
// a grant, before the grant has come: it would be granted at once anyway.
type Stand struct {
	Client base.ClientID
	On     bool
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
	names := [...]string{"", "revoked", "idle", "exit", "death", "lost", "preempted"}
	if int(r) < len(names) && r != 0 {
		return names[r]
	}
	return fmt.Sprintf("end(%d)", uint8(r))
}

// Released says that a grant has ended. There is nothing to carry out.
type Released struct {
	Client  base.ClientID
	Tenant  string
	Epoch   base.Epoch
	Reason  EndReason
	Held    time.Duration // since the grant, drain included
	Drained time.Duration // the part after the revoke; 0: not revoked
	Moved   time.Duration // the part in which it moved memory, before its turn began
	Fenced  bool          // the grant was fenced before
	Claimed bool          // the client said that it had the grant, and there is no record of that
}

// ModeChosen says which mode is in effect, and why, when either has changed. There is
// nothing to carry out.
type ModeChosen struct {
	Mode  Mode // Exclusive or Concurrent
	Cause Cause
}

// Close shuts the gate without a frame: word := 0. The client has released early, or
// its connection is lost; then the page is that of the lost connection.
type Close struct{ Client base.ClientID }

// Adopt lets a client that attached again go on under the grant it holds:
// write the epoch's word to its new page before ATTACHED is sent.
type Adopt struct {
	Client     base.ClientID
	Epoch      base.Epoch
	Concurrent bool
	Shared     bool // others of its cohort may hold the GPU in the same turn
}

// Fence reports a client that did not release within the grace period. Its word is 0
// already, unless its page is from before a restart, as nobody can write to that page.
// Others are granted now; the client is not before it has released or died.
type Fence struct {
	Client  base.ClientID
	Epoch   base.Epoch
	Claimed bool // only the client itself says that it has this grant
}

// Notice tells a client that holds a grant, or gets one next, about the others on
// its GPU: write all of it to the page, and send NOTICE if Leave or Bound has
// changed. The numbers are exact for up to a few holders.
type Notice struct {
	Client  base.ClientID
	Waiters int  // others that wait for this GPU, or are slowed down by this client
	Present int  // others that are attached to this GPU
	Leave   bool // give the GPU back when idle
	Bound   bool // keep little work ahead of the GPU
	Patient bool // keep the GPU over short pauses in spite of Leave, see PatientIdle
}

func (Persist) Action()    {}
func (Grant) Action()      {}
func (Revoke) Action()     {}
func (Close) Action()      {}
func (Adopt) Action()      {}
func (Fence) Action()      {}
func (Notice) Action()     {}
func (StepOne) Action()    {}
func (StepGPU) Action()    {}
func (Slice) Action()      {}
func (Pause) Action()      {}
func (Resume) Action()     {}
func (Stand) Action()      {}
func (Released) Action()   {}
func (ModeChosen) Action() {}

func (a Persist) String() string {
	s := fmt.Sprintf("persist epoch=%d", a.Epoch)
	for _, h := range a.Holders {
		if h.Client != 0 {
			s += fmt.Sprintf(" %d:%d", h.Client, h.Epoch)
		}
	}
	if a.Unrecorded {
		s += " unrecorded"
	}
	if a.Way != WayTurns {
		s += " way=" + a.Way.String()
	}
	return s
}
func (a Grant) String() string {
	s := fmt.Sprintf("grant %d epoch=%d", a.Client, a.Epoch)
	if a.Quantum != 0 {
		s += fmt.Sprintf(" quantum=%v", a.Quantum)
	}
	if a.Concurrent {
		s += " concurrent"
	}
	if a.Latency {
		s += " latency"
	}
	if a.Beside {
		s += " beside"
	}
	if a.Moving {
		s += " moving"
	}
	return s
}
func (a Revoke) String() string {
	return fmt.Sprintf("revoke %d epoch=%d grace=%v waiters=%d why=%v", a.Client, a.Epoch, a.Grace, a.Waiters, a.Why)
}
func (a StepOne) String() string {
	return fmt.Sprintf("step %d epoch=%d grace=%v", a.Client, a.Epoch, a.Grace)
}
func (a StepGPU) String() string { return "step GPU " + a.GPU }
func (a Slice) String() string   { return fmt.Sprintf("slice %d %v", a.Client, a.D) }
func (a Pause) String() string   { return fmt.Sprintf("pause %d", a.Client) }
func (a Resume) String() string  { return fmt.Sprintf("resume %d epoch=%d", a.Client, a.Epoch) }
func (a Stand) String() string   { return fmt.Sprintf("stand %d %t", a.Client, a.On) }
func (a Released) String() string {
	s := fmt.Sprintf("released %d epoch=%d %v held=%v", a.Client, a.Epoch, a.Reason, a.Held)
	if a.Drained != 0 {
		s += fmt.Sprintf(" drained=%v", a.Drained)
	}
	if a.Moved != 0 {
		s += fmt.Sprintf(" moved=%v", a.Moved)
	}
	if a.Fenced {
		s += " fenced"
	}
	return s
}
func (a ModeChosen) String() string { return fmt.Sprintf("mode %v: %v", a.Mode, a.Cause) }
func (a Close) String() string      { return fmt.Sprintf("close %d", a.Client) }
func (a Adopt) String() string      { return fmt.Sprintf("adopt %d epoch=%d", a.Client, a.Epoch) }
func (a Fence) String() string      { return fmt.Sprintf("fence %d epoch=%d", a.Client, a.Epoch) }
func (a Notice) String() string {
	s := fmt.Sprintf("notice %d waiters=%d present=%d", a.Client, a.Waiters, a.Present)
	switch { // as the numbers do not say
	case a.Leave && a.Waiters == 0:
		s += " leave"
	case !a.Leave && a.Waiters > 0:
		s += " stay"
	}
	if a.Bound && a.Present == 0 {
		s += " bound"
	}
	if a.Patient {
		s += " patient"
	}
	return s
}
