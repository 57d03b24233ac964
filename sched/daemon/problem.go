// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
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
	return fmt.Sprintf("GPU %d: %s: %d entry points of CUDA bypass the shim; its work may not be arbitrated", gpu, who(c), c.Bypassed)
}

// ownProblems are the scheduler's own: what tenants say and do cannot cause one.
// Status.Problems begins with them, and /healthz answers 503 for them.
func (d *Daemon) ownProblems() (p []problem) {
	for _, e := range []struct {
		code api.ProblemCode
		what string
		err  error
	}{
		{api.ProblemCode_PROBLEM_CODE_BUG, "bug in nvshare-scheduler, please report: ", d.invariantErr},
		{api.ProblemCode_PROBLEM_CODE_NO_GRANTS, "no grants: ", d.persistErr},
		{api.ProblemCode_PROBLEM_CODE_SUSPEND_DIR, "memory of suspended processes stays in host memory: ", d.away.Files.Err},
		{api.ProblemCode_PROBLEM_CODE_SETTINGS, "shares and memory limits are not as they were set: ", d.tenants.SharesErr},
		{api.ProblemCode_PROBLEM_CODE_SETTINGS, "time quanta and modes are not as they were set: ", d.settings.Err},
		{api.ProblemCode_PROBLEM_CODE_PORT, "", d.metricsErr},
		{api.ProblemCode_PROBLEM_CODE_PORT, "", d.pageErr},
		{api.ProblemCode_PROBLEM_CODE_IDENTIFY, "processes are refused and run unarbitrated: ", d.identifyErr},
		{api.ProblemCode_PROBLEM_CODE_HOST_MEMORY, "host memory for what is swapped out is short: ", d.memory.Pool.Err()},
	} {
		if e.err != nil {
			p = append(p, problem{e.code, e.what + e.err.Error()})
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

// problems are the texts of the scheduler's own.
func (d *Daemon) problems() (texts []string) {
	for _, p := range d.ownProblems() {
		texts = append(texts, p.text)
	}
	return texts
}
