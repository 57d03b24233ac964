// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"time"
)

// Action is something the caller must carry out, in the order returned. The
// types below are all there are. Close and Fence may concern a client whose
// connection is lost; all others have one.
type Action interface {
	fmt.Stringer
	action()
}

// Persist records, before any later action is carried out, what a restart
// must know: the last epoch given out and who holds it. If recording fails,
// the Grant that follows must not be carried out.
type Persist struct {
	Epoch      Epoch
	Holder     ClientID // 0: none
	Concurrent bool     // clients that are not recorded may hold grants
}

// Grant opens the client's gate: write the epoch's word to its page, wake the
// waiters on it, send GRANT.
type Grant struct {
	Client     ClientID
	Epoch      Epoch
	Quantum    time.Duration // 0: unbounded
	Concurrent bool          // others may hold the GPU at the same time
}

// Revoke asks the grant back: word := 0, then send REVOKE.
type Revoke struct {
	Client  ClientID
	Epoch   Epoch
	Grace   time.Duration // time until the grant is fenced
	Waiters int           // clients that wait for this GPU
}

// Close shuts the gate without a frame: word := 0. The client has released
// early, or its connection is lost (then it is the page of that connection).
type Close struct{ Client ClientID }

// Adopt lets a client that attached again go on under the grant it holds:
// write the epoch's word to its new page before ATTACHED is sent.
type Adopt struct {
	Client ClientID
	Epoch  Epoch
}

// Fence reports a client that did not release within the grace period. Its
// word is 0 already, unless it is on a page from before a restart that nobody
// can write to any more. The client gets no grant before its late release or
// its death; others do.
type Fence struct {
	Client ClientID
	Epoch  Epoch
}

// Notice tells a client that holds a grant, or gets one next, how many others
// there are: write both to its page, and send NOTICE where one of them changed
// between zero and more. Under an exclusive grant both numbers are exact;
// under concurrent ones only whether they are zero.
type Notice struct {
	Client  ClientID
	Waiters int // other clients that wait for this GPU
	Present int // other clients attached to this GPU
}

func (Persist) action() {}
func (Grant) action()   {}
func (Revoke) action()  {}
func (Close) action()   {}
func (Adopt) action()   {}
func (Fence) action()   {}
func (Notice) action()  {}

func (a Persist) String() string {
	s := fmt.Sprintf("persist epoch=%d holder=%d", a.Epoch, a.Holder)
	if a.Concurrent {
		s += " concurrent"
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
	return s
}
func (a Revoke) String() string {
	return fmt.Sprintf("revoke %d epoch=%d grace=%v waiters=%d", a.Client, a.Epoch, a.Grace, a.Waiters)
}
func (a Close) String() string { return fmt.Sprintf("close %d", a.Client) }
func (a Adopt) String() string { return fmt.Sprintf("adopt %d epoch=%d", a.Client, a.Epoch) }
func (a Fence) String() string { return fmt.Sprintf("fence %d epoch=%d", a.Client, a.Epoch) }
func (a Notice) String() string {
	return fmt.Sprintf("notice %d waiters=%d present=%d", a.Client, a.Waiters, a.Present)
}
