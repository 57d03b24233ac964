// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/store"
	"github.com/nvshare/nvshare/sched/wire"
)

// problem is what is wrong: the code is for programs, the text for people.
type problem struct {
	code api.ProblemCode
	text string
}

// report adds problems of one kind to a status.
func report(r *api.StatusResponse, code api.ProblemCode, texts ...string) {
	for _, text := range texts {
		r.Problems, r.ProblemCodes = append(r.Problems, text), append(r.ProblemCodes, code)
	}
}

// reportClient adds what is wrong with a client of a GPU.
func reportClient(r *api.StatusResponse, gpu uint32, c *api.Client) {
	if c.State == api.ClientState_CLIENT_STATE_FENCED {
		report(r, api.ProblemCode_PROBLEM_CODE_FENCED, fencedProblem(gpu, c))
	}
	if c.Bypassed > 0 {
		report(r, api.ProblemCode_PROBLEM_CODE_BYPASS, bypassProblem(gpu, c))
	}
}

func fencedProblem(gpu uint32, c *api.Client) string {
	if api.IsHeld(c.Held) {
		return fmt.Sprintf("GPU %d: %s is fenced: it did not release the GPU in time; until it does, %s", gpu, who(c), c.Held)
	}
	return fmt.Sprintf("GPU %d: %s is fenced: it did not release the GPU in time and may still use it", gpu, who(c))
}

func bypassProblem(gpu uint32, c *api.Client) string {
	return fmt.Sprintf("GPU %d: %s: %d entry points of CUDA bypass the shim; some of its work may not be scheduled", gpu, who(c), c.Bypassed)
}

// ownProblems are the scheduler's own: what tenants say and do cannot cause one.
// StatusResponse.Problems begins with them, and /healthz answers 503 for them.
func (d *Daemon) ownProblems() (p []problem) {
	for _, e := range []struct {
		code api.ProblemCode
		what string
		err  error
	}{
		{api.ProblemCode_PROBLEM_CODE_BUG, "bug in nvshare-scheduler, please report: ", d.invariantErr},
		{api.ProblemCode_PROBLEM_CODE_NO_GRANTS, "no grants: ", d.persistErr},
		{api.ProblemCode_PROBLEM_CODE_SETTINGS, "shares and memory limits are not as they were set: ", d.tenants.Record.Err},
		{api.ProblemCode_PROBLEM_CODE_SETTINGS, "time quanta and modes are not as they were set: ", d.settings.Err},
		{api.ProblemCode_PROBLEM_CODE_IDENTIFY, "processes are refused and run without scheduling: ", d.identifyErr},
	} {
		if e.err != nil {
			p = append(p, problem{e.code, e.what + e.err.Error()})
		}
	}
	if err := d.away.Files.Err; err != nil && !errors.Is(err, store.ErrFull) {
		p = append(p, filesProblem(err))
	}
	for _, port := range d.ports {
		if port.err != nil {
			p = append(p, problem{api.ProblemCode_PROBLEM_CODE_PORT, port.err.Error()})
		}
	}
	if loop.Now().Sub(d.pluginAt) < reportLife {
		for _, text := range d.plugin {
			p = append(p, problem{api.ProblemCode_PROBLEM_CODE_PLUGIN, "nvshare-plugin: " + text})
		}
	}
	if len(d.Order) == 0 {
		text := "no GPU found"
		switch {
		case d.discoverErr != nil:
			text += ": " + d.discoverErr.Error()
		case d.discovered == 0:
			text = "still searching for GPUs"
		}
		p = append(p, problem{api.ProblemCode_PROBLEM_CODE_NO_GPU, text})
	}
	return p
}

func filesProblem(err error) problem {
	return problem{api.ProblemCode_PROBLEM_CODE_SUSPEND_DIR, "memory of suspended processes stays in host memory: " + err.Error()}
}

// fullProblems are of host memory and files that tenants have filled.
func (d *Daemon) fullProblems() (p []problem) {
	if err := d.memory.Pool.Err(); err != nil {
		p = append(p, problem{api.ProblemCode_PROBLEM_CODE_HOST_MEMORY, "host memory for what is swapped out is short: " + err.Error()})
	}
	if err := d.away.Files.Err; errors.Is(err, store.ErrFull) {
		p = append(p, filesProblem(err))
	}
	return p
}

// A process may have a GPU that the scheduler does not know. Its shim then lets it run on
// that GPU, beside whoever else is there, until it connects anew: also if the GPU is
// found meanwhile.

// noteUnknown notes that an ATTACH was for a GPU that is not known. Who starts processes
// causes as many as he likes, so a tenant causes an event in node.RefusalPause only.
func (d *Daemon) noteUnknown(c *node.Conn, channel uint16, uuid wire.UUID) {
	if c.Unknown == nil {
		c.Unknown = map[uint16]wire.UUID{}
	}
	c.Unknown[channel] = uuid
	text := fmt.Sprintf("GPU %s is not known on this node: the process runs on it without scheduling", uuid.String())
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
	for _, c := range all {
		problems = append(problems, d.describeUnknown(c))
	}
	return node.FirstProblems(problems, "%d more processes run without scheduling on GPUs that the scheduler did not know")
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
		text = "it was found later: restart the process"
	}
	p := c.Client.Peer
	return fmt.Sprintf("%s (pid %d) runs without scheduling on %s: %s", api.Tenant(d.ContainerOf(p), p.UID), p.PID, node.DescribeSome(gpus), text)
}
