// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

// What is done, beside a warning, about a process that was asked for a GPU and has not
// released it within the grace period.
const (
	// fenceReport does nothing. Others are granted the GPU; what the process
	// still runs there disturbs them.
	fenceReport = "report"
	// fenceHold has nvshare-warden take the channels of the process off the GPU but in
	// its tenant's turns, until the process has released it or ended.
	fenceHold = "hold"
	// fenceKill sends the process SIGKILL.
	fenceKill = "kill"
)

// fenceAction is what to do about a fenced client. One that nobody asked for the GPU is only
// reported: it has not come back after a restart, or claims a grant that nobody gave it.
func (d *Daemon) fenceAction(g *node.GPU, a sched.Fence) string {
	switch {
	case a.Claimed || g.Restored[a.Client]:
		return fenceReport
	case d.own.FenceKill:
		return fenceKill
	case d.watch.WardenProblem() != "":
		return fenceReport
	}
	return fenceHold
}

func (d *Daemon) fence(g *node.GPU, a sched.Fence) {
	cl := d.Clients[a.Client]
	if cl == nil {
		d.watch.CarryOut(g, a.Client, a)
		return
	}
	log := d.LogOf(cl.Subject())
	text := fmt.Sprintf("GPU %d: fenced: it did not release the GPU within the grace period", g.Index)
	switch d.fenceAction(g, a) {
	case fenceKill:
		if err := cl.Kill(); err != nil {
			log.WithError(err).Errorf("%s, may still use it, and cannot be killed", text)
			return
		}
		log.Warnf("%s; %q is killed", text, cl.Command)
	case fenceHold:
		d.watch.Fence(g, cl)
		log.Warnf("%s; nvshare-warden keeps it off but in its tenant's turns, until it has, or has ended", text)
	default:
		if text += ", and may still use it"; a.Claimed { // a tenant can cause that as often as it connects
			d.Tell(cl.Subject(), logrus.WarnLevel, text)
		} else {
			log.Warn(text)
		}
	}
}
