// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// subject is whom a line of log is about.
type subject struct {
	*peer.Peer
	id sched.ClientID // 0: a process that is no client yet
}

func (cl *client) subject() subject { return subject{cl.Peer, cl.id} }

func (c *conn) subject() subject {
	if c.client != nil {
		return c.client.subject()
	}
	return subject{Peer: c.peer}
}

func (d *Daemon) logOf(s subject) *logrus.Entry {
	fields := logrus.Fields{"pid": s.PID, "command": s.Command}
	if s.Container != "" {
		fields["container"] = s.Container
	}
	if s.id != 0 {
		fields["client"] = s.id
	}
	return d.log.WithFields(fields)
}

// tell writes a line that a tenant causes. A tenant can cause as many as it
// likes, so those above a limit are written for debugging only.
func (d *Daemon) tell(s subject, level logrus.Level, text string) {
	d.tellOf(d.logOf(s), level, text)
}

// tellOf is tell with other fields.
func (d *Daemon) tellOf(to *logrus.Entry, level logrus.Level, text string) {
	switch {
	case level >= logrus.DebugLevel:
	case !d.tenantLog.Allow():
		d.traffic.UnloggedLines++
		level = logrus.DebugLevel
	case d.traffic.UnloggedLines > d.unloggedTold:
		d.log.WithField("lines", d.traffic.UnloggedLines-d.unloggedTold).Warn("clients caused more lines than these: they are written with NVSHARE_DEBUG=1 only")
		d.unloggedTold = d.traffic.UnloggedLines
	}
	to.Log(level, text)
}
