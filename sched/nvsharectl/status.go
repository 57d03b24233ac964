// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func statusCommand(f *rootFlags, io streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who has which GPU, who waits, and what each gets",
		Long: `status shows whether all is well, each GPU, and each tenant: a container, or
the processes of one user outside containers.

STATE   what the tenant does, and for how long: holding, waiting, throttled
        (its core limit keeps it from the GPU), moving (its memory), idle, gone
GETS    the part of the GPU's time that it had in the latest five seconds, and
        of which core limit
WAITED  the part of the same five seconds in which it wanted the GPU and had no
        grant
MEMORY  what it has reserved of the GPU's memory, and of which limit

With -o wide also, for each GPU, how many drains, hand-overs and waits for a
grant there were, their median and 99th percentile; and

SET BY HAND   settings that somebody has changed (nvsharectl config), who and
              when
WAIT p50/p99  how long half of its waits for a grant, and 99 of 100, lasted at
              most in the latest minute
DEBT          the time that it used above its core limit and has to make up for
LONGEST WAIT  its longest wait for a grant in the latest minute
OOM           reservations of memory that its memory limit refused
FIXED, AWAY   where memory is swapped: what cannot be moved off the GPU, and
              what is in host memory or was never used; WHY FIXED says why
              nothing of a process can be moved
ENFORCED BY   what the library, the kernel and the hardware hold tenants to,
              and which processes are known to run unarbitrated now

"promised" adds up core requests, the parts of the GPU's time that tenants get
whenever they want them. Core requests and memory limits, also of tenants that
do not use the GPU now, decide where pods are placed. Exit status 1: there is a
problem, also one that only root may read; "healthy" is false then.

Users who may not use the control socket, and containers, see their own tenant,
and of all others numbers.`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return showStatus(cmd.Context(), f, io)
		},
	}
	outputFlag(cmd, f)
	cmd.Flags().StringVar(&f.set.gpu, "gpu", "", "show only the GPU with this `index or UUID`")
	return cmd
}

func outputFlag(cmd *cobra.Command, f *rootFlags) {
	addForm(cmd, &f.output, "wide: every column, and every process", "table", "wide", "json", "yaml")
}

// showStatus prints the status. It returns errUnhealthy if the scheduler reports
// problems.
func showStatus(ctx context.Context, f *rootFlags, io streams) error {
	r, err := askStatus(ctx, f.runDir)
	if err != nil {
		return err
	}
	if err := restrict(r, f.set.gpu); err != nil {
		return err
	}
	switch f.output {
	case "json", "yaml":
		if err := encode(io, f.output, newStatusJSON(r)); err != nil {
			return err
		}
	case "wide":
		printWide(io, r)
	default:
		printStatus(io, r)
	}
	if problems(r) > 0 {
		return errUnhealthy
	}
	return nil
}

// isGPU tells whether a GPU has this index or UUID.
func isGPU(g *api.GPU, name string) bool {
	return strings.EqualFold(g.Uuid, name) || strconv.Itoa(int(g.Index)) == name
}

// restrict removes all GPUs but one, named by index or UUID; "" removes none.
func restrict(r *api.StatusResponse, gpu string) error {
	if gpu == "" {
		return nil
	}
	for _, g := range r.Gpus {
		if isGPU(g, gpu) {
			r.Gpus = []*api.GPU{g}
			return nil
		}
	}
	if len(r.Gpus) == 0 {
		return fmt.Errorf("GPU %q: the scheduler has no GPU (nvsharectl doctor says why)", gpu)
	}
	return fmt.Errorf("GPU %q: no such index or UUID (nvsharectl status lists them)", gpu)
}

// askAll asks the control socket, which knows all tenants.
func askAll(ctx context.Context, runDir string) (r *api.StatusResponse, err error) {
	err = call(ctx, runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Status(ctx, &api.StatusRequest{})
		return err
	})
	return r, err
}

// askStatus is askAll. Users who may not use the control socket, and containers, which do
// not have it, get the answer of the status socket: their own tenant, and numbers.
func askStatus(ctx context.Context, runDir string) (*api.StatusResponse, error) {
	r, err := askAll(ctx, runDir)
	if !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, viewErr := api.AskView(ctx, runDir)
	if errors.Is(viewErr, fs.ErrNotExist) { // no scheduler, or an older one
		return nil, err
	}
	return r, viewErr
}

// viewOf says for whom an answer of the status socket is; "": it is of the control socket.
func viewOf(r *api.StatusResponse) string {
	v := r.View
	if v == nil {
		return ""
	}
	all := "root sees all (sudo nvsharectl)"
	if v.Container.GetId() != "" {
		all = "root of the host sees all"
	}
	text := "only " + api.Tenant(v.Container, v.Uid) + " is named here; " + all
	if v.Problems > 0 {
		text = numbered(int(v.Problems), "problem", "problems") + " that only root may read; " + text
	}
	return text
}

// othersOf says what the tenants of a GPU have that an answer does not name; "": the
// answer names all, or there are none.
func othersOf(g *api.GPU) string {
	o := g.Others
	if o == nil || o.Tenants+o.Clients == 0 && o.MemoryBytes == 0 {
		return ""
	}
	parts := []string{fmt.Sprintf("others: %s with %s, %d holding, %d waiting", numbered(int(o.Tenants), "tenant", "tenants"), numbered(int(o.Clients), "process", "processes"), o.Holding, o.Waiting),
		strings.TrimSuffix(fmt.Sprintf("%.1f", float64(o.GotPermille)/10), ".0") + "% of the time", size(o.MemoryBytes) + " reserved"}
	if o.CoreRequest > 0 {
		parts = append(parts, fmt.Sprintf("%d%% promised", o.CoreRequest))
	}
	return strings.Join(parts, ", ")
}
