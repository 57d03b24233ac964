// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

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
	return base.Name(c, "control", "not tried", "works", "no channels seen", "driver refused", "driver fakes it", "cannot be sent")
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

// listedDrivers has the versions of the driver with which the controls were seen to work,
// by their effect on a GPU. The shim's list (hook/core/controls.c) is the same: a test
// compares them.
func listedDrivers() []string { return []string{"580.159.04"} }

// Listed says whether time slices were seen to work, by their effect on a GPU, with this
// version of the driver. With others they are tried.
func (e Controls) Listed() bool { return slices.Contains(listedDrivers(), e.Driver) }

// proofPatience is how long a client that comes while others share by slices may take to
// prove its controls: the shim proves them within 0.1 s of the first grant.
const proofPatience = 2 * time.Second

// control takes note of what a client has proved.
func (c *GPU) control(ev Controls) {
	if cl := c.clients[ev.Client]; cl != nil && cl.connected && cl.controls != ev {
		cl.controls, c.slices.stale = ev, true
	}
}

// wantsGPU notes when a client first wanted the GPU over its connection.
func (c *GPU) wantsGPU(cl *client) {
	if !cl.wanted {
		cl.wanted, cl.wantedAt, c.slices.stale = true, c.now, true
		c.addUp(cl)
	}
}

// notSliceable says why a client's time slice cannot be set; reasonNone: it can.
func (c *GPU) notSliceable(cl *client) Cause {
	switch p := &cl.controls; {
	case p.Client == 0 && c.anySliced() && c.now.Sub(cl.wantedAt) < proofPatience:
		return Cause{}
	case p.Client == 0:
		return Cause{Why: reasonUnproved, Client: cl.id}
	case p.Slices != ControlWorks:
		return Cause{reasonUnsliceable, cl.id, p.Slices}
	case p.Bare > 0:
		return Cause{Why: reasonBare, Client: cl.id}
	}
	return Cause{}
}
