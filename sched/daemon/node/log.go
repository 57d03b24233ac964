// SPDX-License-Identifier: Apache-2.0

package node

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

// Subject is whom a line of log is about.
type Subject struct {
	*peer.Peer
	id sched.ClientID // 0: a process that is no client yet
}

// Subject is whom lines about a client name.
func (cl *Client) Subject() Subject { return Subject{cl.Peer, cl.ID} }

// Subject is the same for a connection, which may have no client yet.
func (c *Conn) Subject() Subject {
	if c.Client != nil {
		return c.Client.Subject()
	}
	return Subject{Peer: c.Peer}
}

// LogOf returns the log with fields that name a subject.
func (n *Node) LogOf(s Subject) *logrus.Entry {
	fields := logrus.Fields{"pid": s.PID, "command": s.Command}
	if s.Container != "" {
		fields["container"] = s.Container
	}
	if s.id != 0 {
		fields["client"] = s.id
	}
	return n.Log.WithFields(fields)
}

// Tell writes a line that a tenant causes. A tenant can cause as many as it
// likes, so those above a limit are written for debugging only.
func (n *Node) Tell(s Subject, level logrus.Level, text string) {
	n.TellOf(n.LogOf(s), level, text)
}

// TellOf is tell with other fields.
func (n *Node) TellOf(to *logrus.Entry, level logrus.Level, text string) {
	switch {
	case level >= logrus.DebugLevel:
	case !n.TenantLog.Allow():
		n.Traffic.UnloggedLines++
		level = logrus.DebugLevel
	case n.Traffic.UnloggedLines > n.unloggedTold:
		n.Log.WithField("lines", n.Traffic.UnloggedLines-n.unloggedTold).Warn("clients caused more lines than these: they are written with NVSHARE_DEBUG=1 only")
		n.unloggedTold = n.Traffic.UnloggedLines
	}
	to.Log(level, text)
}

// Turn notes an event that a client causes. g may be nil.
func (n *Node) Turn(t time.Time, g *GPU, id sched.ClientID, e *history.Event) {
	n.History.AddTurn(n.EventOf(t, g, id, e))
}

// EventOf fills in when, where and who.
func (n *Node) EventOf(t time.Time, g *GPU, id sched.ClientID, e *history.Event) *history.Event {
	e.At, e.Client = t.UnixNano(), id
	if g != nil {
		e.UUID, e.Index = g.UUID, g.Index
	}
	if cl := n.Clients[id]; cl != nil {
		e.Peer = cl.Peer
		if names := n.Names[cl.Container]; names != nil && cl.Container != "" {
			cl.named = names
		}
		e.Names = cl.named
	} else if p := n.Held[id]; p != nil {
		e.Peer, e.Names = p, n.Names[p.Container]
	}
	return e
}

// NoteClient notes that a process came or went. n is what the kind says.
func (n *Node) NoteClient(cl *Client, kind api.EventType, count uint32) {
	n.Turn(time.Now(), nil, cl.ID, &history.Event{Kind: kind, N: count})
}

// NoteChange notes an event that no client causes. g may be nil.
func (n *Node) NoteChange(g *GPU, e *history.Event) {
	n.History.AddChange(n.EventOf(time.Now(), g, 0, e))
}

// NoteSetting notes a setting that was changed: on one GPU, or (nil) for GPUs that
// are found later. account is the tenant whose setting it is, or "". caused: by a container that
// comes or goes, which may be often.
func (n *Node) NoteSetting(g *GPU, account string, caused bool, setting string, old, new any) {
	c := &history.Change{Setting: setting, Old: fmt.Sprint(old), New: fmt.Sprint(new)}
	if c.Old == c.New {
		return
	}
	if account != "" {
		c.Tenant, c.UID = n.TenantOf(account)
	}
	e := n.EventOf(time.Now(), g, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_SET, Change: c})
	if caused {
		n.History.AddCaused(e)
	} else {
		n.History.AddChange(e)
	}
}

// MayTell says whether an event may be noted that a tenant causes as often as it likes: once in
// refusalPause for each subject, also if its processes end meanwhile.
func (n *Node) MayTell(what string, t time.Time) bool {
	if told, ok := n.Told[what]; ok && t.Sub(told) < RefusalPause {
		return false
	}
	maps.DeleteFunc(n.Told, func(_ string, told time.Time) bool { return t.Sub(told) >= RefusalPause })
	n.Told[what] = t
	return true
}

// NoteAway notes an event of a client's on each of its GPUs.
func (n *Node) NoteAway(cl *Client, text string) {
	for g := range cl.Attached {
		n.Turn(time.Now(), g, cl.ID, &history.Event{Kind: api.EventType_EVENT_TYPE_CONTEXT, Text: text})
	}
}
