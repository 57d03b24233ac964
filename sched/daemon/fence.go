// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

// FenceAction is what is done, beside a warning, about a process that was asked
// for a GPU and has not released it within the grace period.
type FenceAction string

const (
	// FenceReport does nothing. Others are granted the GPU; what the process
	// still runs there disturbs them.
	FenceReport FenceAction = "report"
	// FenceHold has nvshare-warden take the channels of the process off the GPU but in
	// its tenant's turns, until the process has released it or ended. Where no warden runs, it is
	// FenceReport.
	FenceHold FenceAction = "hold"
	// FenceDemote has all tenants use that GPU at once until the process
	// has released it or ended: none of them pays alone for sharing it.
	FenceDemote FenceAction = "demote"
	// FenceKill sends the process SIGKILL.
	FenceKill FenceAction = "kill"
)

// ParseFenceAction reads what a user writes.
func ParseFenceAction(s string) (FenceAction, error) {
	switch a := FenceAction(s); a {
	case FenceHold, FenceReport, FenceDemote, FenceKill:
		return a, nil
	}
	return "", fmt.Errorf("%q is none of %s, %s, %s, %s", s, FenceHold, FenceReport, FenceDemote, FenceKill)
}

// fenceAction is what to do about a fenced client: what is configured, unless
// nobody asked the client for the GPU. Such a client is only reported: it has
// not come back after a restart, or claims a grant that nobody gave it. A tenant
// could otherwise have a GPU demoted by a claim.
func (d *Daemon) fenceAction(g *node.GPU, a sched.Fence) FenceAction {
	switch {
	case a.Claimed || g.Restored[a.Client] || d.own.FenceAction == "":
		return FenceReport
	case d.own.FenceAction == FenceHold && d.watch.WardenProblem() != "":
		return FenceReport
	}
	return d.own.FenceAction
}

func (d *Daemon) fence(g *node.GPU, a sched.Fence) {
	d.Reach(node.BeforeFence)
	defer d.Reach(node.AfterFence)
	cl := d.Clients[a.Client]
	if cl == nil {
		d.watch.CarryOut(g, a.Client, a)
		return
	}
	log := d.LogOf(cl.Subject())
	text := fmt.Sprintf("GPU %d: fenced: it did not release the GPU within the grace period", g.Index)
	switch d.fenceAction(g, a) {
	case FenceKill:
		if err := cl.Kill(); err != nil {
			log.WithError(err).Errorf("%s, may still use it, and cannot be killed", text)
			return
		}
		log.Warnf("%s; %q is killed", text, cl.Command)
	case FenceHold:
		d.watch.Fence(g, cl)
		log.Warnf("%s; nvshare-warden keeps it off but in its tenant's turns, until it has, or has ended", text)
	case FenceDemote:
		log.Warnf("%s; all tenants use it at once until it has, or has ended", text)
		g.Fenced[a.Client] = true
		d.fencesChanged = true
	default:
		if text += ", and may still use it"; a.Claimed { // a tenant can cause that as often as it connects
			d.Tell(cl.Subject(), logrus.WarnLevel, text)
		} else {
			log.Warn(text)
		}
	}
}

// unfence notes that a grant has ended.
func (d *Daemon) unfence(g *node.GPU, id base.ClientID) {
	if g.Fenced[id] {
		delete(g.Fenced, id)
		d.fencesChanged = true
	}
	if cl := d.Clients[id]; cl != nil {
		d.watch.Unfence(g, cl)
	}
}

// applyFences demotes GPUs that fenced clients still use, and restores GPUs that
// none uses any more. The loop calls it between two events.
func (d *Daemon) applyFences() {
	for d.fencesChanged {
		d.fencesChanged = false
		for _, g := range d.Order {
			if demoted := len(g.Fenced) > 0; demoted != g.Demoted {
				g.Demoted = demoted
				if !demoted {
					d.Log.Infof("GPU %d: no fenced client uses it any more: %v again", g.Index, g.Mode)
				}
				d.step(g, sched.SetMode{M: g.ModeNow()})
			}
		}
	}
}
