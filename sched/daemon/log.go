// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"maps"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
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

func (n *node) logOf(s subject) *logrus.Entry {
	fields := logrus.Fields{"pid": s.PID, "command": s.Command}
	if s.Container != "" {
		fields["container"] = s.Container
	}
	if s.id != 0 {
		fields["client"] = s.id
	}
	return n.log.WithFields(fields)
}

// tell writes a line that a tenant causes. A tenant can cause as many as it
// likes, so those above a limit are written for debugging only.
func (n *node) tell(s subject, level logrus.Level, text string) {
	n.tellOf(n.logOf(s), level, text)
}

// tellOf is tell with other fields.
func (n *node) tellOf(to *logrus.Entry, level logrus.Level, text string) {
	switch {
	case level >= logrus.DebugLevel:
	case !n.tenantLog.Allow():
		n.traffic.UnloggedLines++
		level = logrus.DebugLevel
	case n.traffic.UnloggedLines > n.unloggedTold:
		n.log.WithField("lines", n.traffic.UnloggedLines-n.unloggedTold).Warn("clients caused more lines than these: they are written with NVSHARE_DEBUG=1 only")
		n.unloggedTold = n.traffic.UnloggedLines
	}
	to.Log(level, text)
}

// turn notes an event that a client causes. g may be nil.
func (n *node) turn(t time.Time, g *gpu, id sched.ClientID, e *history.Event) {
	n.history.AddTurn(n.eventOf(t, g, id, e))
}

// eventOf fills in when, where and who.
func (n *node) eventOf(t time.Time, g *gpu, id sched.ClientID, e *history.Event) *history.Event {
	e.At, e.Client = t.UnixNano(), id
	if g != nil {
		e.UUID, e.Index = g.UUID, g.Index
	}
	if cl := n.clients[id]; cl != nil {
		e.Peer = cl.Peer
		if names := n.names[cl.Container]; names != nil && cl.Container != "" {
			cl.named = names
		}
		e.Names = cl.named
	}
	return e
}

// noteClient notes that a process came or went. n is what the kind says.
func (n *node) noteClient(cl *client, kind api.EventType, count uint32) {
	n.turn(time.Now(), nil, cl.id, &history.Event{Kind: kind, N: count})
}

// noteChange notes an event that no client causes. g may be nil.
func (n *node) noteChange(g *gpu, e *history.Event) {
	n.history.AddChange(n.eventOf(time.Now(), g, 0, e))
}

// noteSetting notes a setting that was changed: on one GPU, or (nil) for GPUs that
// are found later. account is the tenant whose setting it is, or "". caused: by a container that
// comes or goes, which may be often.
func (n *node) noteSetting(g *gpu, account string, caused bool, setting string, old, new any) {
	c := &history.Change{Setting: setting, Old: fmt.Sprint(old), New: fmt.Sprint(new)}
	if c.Old == c.New {
		return
	}
	if account != "" {
		c.Tenant, c.UID = n.tenantOf(account)
	}
	e := n.eventOf(time.Now(), g, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_SET, Change: c})
	if caused {
		n.history.AddCaused(e)
	} else {
		n.history.AddChange(e)
	}
}

// mayTell says whether an event may be noted that a tenant causes as often as it likes: once in
// refusalPause for each subject, also if its processes end meanwhile.
func (n *node) mayTell(what string, t time.Time) bool {
	if told, ok := n.told[what]; ok && t.Sub(told) < refusalPause {
		return false
	}
	maps.DeleteFunc(n.told, func(_ string, told time.Time) bool { return t.Sub(told) >= refusalPause })
	n.told[what] = t
	return true
}

// noteAway notes an event of a client's on each of its GPUs.
func (n *node) noteAway(cl *client, text string) {
	for g := range cl.attached {
		n.turn(time.Now(), g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_CONTEXT, Text: text})
	}
}
