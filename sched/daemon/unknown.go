// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// A process may have a GPU that the scheduler does not know. Its shim then lets it run on
// that GPU, beside whoever else is there, until it connects anew: also if the GPU is
// found meanwhile.

// noteUnknown notes that an ATTACH was for a GPU that is not known. Who starts processes
// causes as many as he likes, so a tenant causes an event in refusalPause only.
func (d *Daemon) noteUnknown(c *node.Conn, channel uint16, uuid wire.UUID) {
	if c.Unknown == nil {
		c.Unknown = map[uint16]wire.UUID{}
	}
	c.Unknown[channel] = uuid
	text := fmt.Sprintf("no GPU %s on this node: the client runs on it unarbitrated", uuid.String())
	d.Tell(c.Subject(), logrus.WarnLevel, text)
	t := time.Now()
	if !d.MayTell("unknown GPU of "+c.Client.Account, t) {
		return
	}
	d.History.AddCaused(d.EventOf(t, nil, c.Client.ID, &history.Event{Kind: api.EventType_EVENT_TYPE_WARNING, Text: text}))
}

// unknownProblems names the processes that run on GPUs that were not known when they
// began.
func (d *Daemon) unknownProblems() (problems []string) {
	var all []*node.Conn
	for c := range d.conns {
		// A child of a dead process may have its socket.
		if len(c.Unknown) > 0 && d.Clients[c.Client.ID] == c.Client {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b *node.Conn) int { return cmp.Compare(a.Client.ID, b.Client.ID) })
	all = slices.CompactFunc(all, func(a, b *node.Conn) bool { return a.Client == b.Client })
	for _, c := range all[:min(len(all), node.MaxNamed)] {
		problems = append(problems, d.describeUnknown(c))
	}
	if more := len(all) - len(problems); more > 0 {
		problems = append(problems, fmt.Sprintf("%d more processes run unarbitrated on GPUs that the scheduler did not know", more))
	}
	return problems
}

// describeUnknown names a process that runs on GPUs that were not known, and those.
func (d *Daemon) describeUnknown(c *node.Conn) string {
	var gpus []string
	found := true
	for _, uuid := range c.Unknown {
		gpus = append(gpus, uuid.String())
		found = found && d.Gpus[uuid] != nil
	}
	slices.Sort(gpus)
	gpus = slices.Compact(gpus)
	text := "no such GPU is known here"
	if found {
		text = "it was found later: start the process anew"
	}
	p := c.Client.Peer
	return fmt.Sprintf("%s (pid %d) runs unarbitrated on %s: %s", api.Tenant(d.ContainerOf(p), p.UID), p.PID, node.DescribeSome(gpus), text)
}
