// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func drainCommand(root *rootFlags, io streams) *cobra.Command {
	var gpu string
	var wait, move bool
	timeout := 10 * time.Minute
	cmd := &cobra.Command{
		Use: "drain --gpu GPU [--wait]", Short: "Have a GPU admit no new tenants",
		Long: `drain has a GPU admit no new tenants, until undrain, also over restarts of the
scheduler. A start of the machine ends it: the run directory is emptied then.
Tenants that can move to another GPU of the node are moved there, one after the
other, as with nvsharectl migrate. The others go on; end them yourself. The
programs of others wait, and podman and Docker refuse new containers with the
GPU. On Kubernetes no new pod is given the GPU: the plugin refuses it, or, with
--dra, kube-scheduler sees a taint on the device.

With --wait the command ends when nobody uses the GPU. After --timeout it fails
and names those that still do; the GPU stays drained.`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := askDrain(cmd.Context(), root, &api.DrainRequest{Gpu: gpu})
			if err != nil {
				return err
			}
			fmt.Fprintln(io.out, describeDrain(r))
			if move {
				if r, err = moveAway(cmd.Context(), root, io, r); err != nil {
					return err
				}
			}
			if !wait || len(r.Tenants) == 0 {
				return nil
			}
			return awaitDrained(cmd.Context(), root, io, r, timeout)
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "the GPU, by `index or UUID`")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until nobody uses the GPU")
	cmd.Flags().BoolVar(&move, "move", true, "move the tenants that can move to other GPUs")
	cmd.Flags().Var((*durationFlag)(&timeout), "timeout", "with --wait, fail after this `time`, in seconds or with a unit")
	return cmd
}

func undrainCommand(root *rootFlags, io streams) *cobra.Command {
	var gpu string
	cmd := &cobra.Command{
		Use: "undrain --gpu GPU", Short: "Have a GPU admit tenants again",
		Long: `undrain has a GPU admit tenants again. The scheduler also forgets the GPU's
fault: say it after the GPU was reset.`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := askDrain(cmd.Context(), root, &api.DrainRequest{Gpu: gpu, Undrain: true})
			if err == nil {
				fmt.Fprintf(io.out, "GPU %d admits tenants\n", r.Index)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "the GPU, by `index or UUID`")
	return cmd
}

func askDrain(ctx context.Context, root *rootFlags, req *api.DrainRequest) (*api.DrainResponse, error) {
	if req.Gpu == "" {
		return nil, usageError{errors.New("which GPU? give --gpu with its index or UUID")}
	}
	return ask(ctx, root.runDir, (*api.Conn).Drain, req)
}

// drainLook is how often a command that waits asks who is left.
const drainLook = 200 * time.Millisecond

// awaitDrained waits until nobody uses a GPU that was drained, for as long as the timeout.
func awaitDrained(ctx context.Context, root *rootFlags, io streams, last *api.DrainResponse, timeout time.Duration) error {
	over := time.After(timeout)
	look := time.Tick(drainLook)
	for {
		select {
		case <-ctx.Done():
			return staysDrained(last)
		case <-over:
			return fmt.Errorf("GPU %d is drained and %s after %v", last.Index, usedBy(last), timeout)
		case <-look:
		}
		r, err := askDrain(ctx, root, &api.DrainRequest{Gpu: last.Uuid, Look: true})
		switch {
		case ctx.Err() != nil:
			return staysDrained(last)
		case err != nil:
			return err
		case !r.WasDrained:
			return fmt.Errorf("GPU %d admits tenants again: somebody has undrained it", r.Index)
		case !slices.Equal(r.Tenants, last.Tenants):
			fmt.Fprintln(io.out, describeDrain(r))
		}
		if len(r.Tenants) == 0 {
			return nil
		}
		last = r
	}
}

// staysDrained is what a command says that its user ends.
func staysDrained(r *api.DrainResponse) error {
	return fmt.Errorf("interrupted; GPU %d stays drained until nvsharectl undrain --gpu %d", r.Index, r.Index)
}

func describeDrain(r *api.DrainResponse) string {
	return fmt.Sprintf("GPU %d admits no new tenants; %s", r.Index, usedBy(r))
}

func usedBy(r *api.DrainResponse) string {
	if len(r.Tenants) == 0 {
		return "nobody uses it"
	}
	return "still used by " + printable(strings.Join(r.Tenants, ", "))
}

// drainedOf says that a GPU admits no new tenants; "": it does.
func drainedOf(g *api.GPU) string {
	if !g.Drained {
		return ""
	}
	return fmt.Sprintf("drained: no new tenants are admitted; nvsharectl undrain --gpu %d admits them", g.Index)
}

func suspendCommand(root *rootFlags, io streams) *cobra.Command {
	cmd := tenantMove(root, io, (*api.Conn).Suspend, describeSuspend)
	cmd.Use = "suspend TENANT [--gpu N]"
	cmd.Short = "Move a tenant's memory off the GPU until it calls CUDA again"
	cmd.Long = `suspend moves all memory of a tenant that can be moved off the GPU to host
memory, also if nobody needs the room. Each process comes back by itself when
it calls CUDA again, in its turn, with its memory at the same addresses;
nvsharectl resume brings it back before. A process that works now goes on at
its next call, so suspend is for tenants that are idle.

Then the driver takes the processes off the GPU with their contexts, some 500
MiB each (nvshare-scheduler --checkpoint). Where that cannot be, a process
keeps its context, and nvsharectl status and nvsharectl events say why: its
memory cannot be moved (FIXED in the status with -o wide), it shares memory
with other processes, uses managed memory or MPS, or the scheduler may not
checkpoint it. It needs --swap-memory.` + tenantHelp
	cmd.Example = `  nvsharectl suspend ml/notebook/main
  nvsharectl suspend 1000 --gpu 0  the processes of user 1000 outside containers`
	return cmd
}

func resumeCommand(root *rootFlags, io streams) *cobra.Command {
	cmd := tenantMove(root, io, (*api.Conn).Resume, describeResume)
	cmd.Use = "resume TENANT [--gpu N]"
	cmd.Short = "Bring a suspended tenant's memory back to the GPU"
	cmd.Long = `resume brings the memory of a tenant back to the GPU that nvsharectl suspend,
or the room that others needed, has taken off it. Each process waits for its
turn as if it had called CUDA, and moves its memory in when the turn comes.
Then it is idle, and gives the GPU back to those that wait. If they need the
room, its memory may leave again.

The command does not wait for the turn: nvsharectl status shows when the memory
is back. Running it again changes nothing. It fails if none of the tenant's
memory is off the GPU. A process without a connection to the scheduler comes
back when it calls CUDA.` + tenantHelp
	cmd.Example = `  nvsharectl resume ml/notebook/main
  nvsharectl resume 1000 --gpu 0   the processes of user 1000 outside containers`
	return cmd
}

// tenantMove returns a command that moves the memory of the tenant that it is given, and
// prints what the answer says.
func tenantMove(root *rootFlags, io streams, move func(*api.Conn, context.Context, *api.SuspendRequest) (*api.SuspendResponse, error), describe func(*api.SuspendResponse) []string) *cobra.Command {
	gpu := ""
	cmd := &cobra.Command{
		Args: oneTenant,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &api.SuspendRequest{Gpu: gpu}
			req.Container, req.Uid = nameTenant(args[0])
			resp, err := ask(cmd.Context(), root.runDir, move, req)
			if err != nil {
				return err
			}
			for _, line := range describe(resp) {
				fmt.Fprintln(io.out, line)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "only on the GPU with this `index or UUID`")
	return cmd
}

// describeSuspend says how much leaves each GPU, a line for each.
func describeSuspend(resp *api.SuspendResponse) (lines []string) {
	who := printable(api.Tenant(resp.Container, resp.Uid))
	for _, g := range resp.Gpus {
		memory, context := size(g.Bytes)+" of memory moves to the host until its next CUDA call", "its context stays on the GPU (nvshare-scheduler --checkpoint)"
		switch {
		case g.Context && g.Bytes > 0:
			context = "then its context leaves the GPU, if the driver can do that"
		case g.Context:
			context = "its context leaves the GPU until its next CUDA call, if the driver can do that"
		}
		if g.Bytes == 0 {
			memory = "no memory of it is on the GPU"
		}
		lines = append(lines, fmt.Sprintf("GPU %d, %s: %s; %s", g.Index, who, memory, context))
	}
	return lines
}

// describeResume says how much comes back to each GPU, a line for each.
func describeResume(resp *api.SuspendResponse) (lines []string) {
	who := printable(api.Tenant(resp.Container, resp.Uid))
	for _, g := range resp.Gpus {
		what := "it stays on the GPU"
		switch {
		case g.Bytes > 0 && g.Context:
			what = size(g.Bytes) + " and its context come back to the GPU in its turn"
		case g.Bytes > 0:
			what = size(g.Bytes) + " come back to the GPU in its turn"
		case g.Context:
			what = "its context comes back to the GPU"
		}
		lines = append(lines, fmt.Sprintf("GPU %d, %s: %s", g.Index, who, what))
	}
	return lines
}

// migrateLimit bounds a move: the tenant's turn and its memory may take a minute, each
// process two.
const migrateLimit = 5 * time.Minute

func migrateCommand(root *rootFlags, io streams) *cobra.Command {
	gpu := ""
	cmd := &cobra.Command{
		Use:   "migrate TENANT [--gpu N]",
		Short: "Move a tenant to another GPU of the node",
		Long: `migrate moves a tenant, with its memory and all that its processes have on the
GPU, to another GPU of the same model, while its programs go on. They wait
meanwhile: about a second, and a second more for each 25 GiB. Without --gpu the
scheduler chooses the GPU with the least memory promised. If the tenant cannot
be moved it goes on where it is, and the command says why.

What can move: processes outside containers, pods with the annotation
nvshare.com/gpu: any (or with one GPU and nvshare.com/gpu-migratable: "true"),
and containers of podman with --device nvshare.com/gpu=any. What cannot: gangs,
overlap groups, MIG devices, processes that share GPU memory with others, and
what the driver refuses. It needs nvshare-scheduler --swap-memory,
nvshare-checkpoint, and a driver of CUDA 12.8 or later.

After the move a process sees the UUID of the new GPU, and the PCI address of
the old one.` + tenantHelp,
		Example: `  nvsharectl migrate ml/notebook/main --gpu 1
  nvsharectl migrate 1000     the processes of user 1000 outside containers`,
		Args: oneTenant,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &api.MigrateRequest{Gpu: gpu}
			req.Container, req.Uid = nameTenant(args[0])
			return migrate(cmd.Context(), root, io, req)
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "the GPU to move to, by `index or UUID`")
	return cmd
}

// migrate has a tenant moved, and waits for that.
func migrate(ctx context.Context, root *rootFlags, io streams, req *api.MigrateRequest) error {
	who := req.Container
	if req.Uid != nil {
		who = api.Tenant(nil, *req.Uid)
	}
	ctx, cancel := context.WithTimeout(ctx, migrateLimit)
	defer cancel()
	left := false // while the tenant moves: no tenant stops halfway because nobody waits
	var r *api.MigrateResponse
	if err := callWithin(ctx, migrateLimit, root.runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Migrate(ctx, req)
		left = api.TimedOut(err) || ctx.Err() != nil
		return err
	}); err != nil {
		if left {
			return fmt.Errorf("%s has not arrived yet; the move goes on without this command: nvsharectl events -f --since 10m --type migrate --tenant %q shows how it ends", printable(who), who)
		}
		return err
	}
	fmt.Fprintf(io.out, "%s has moved from GPU %d to GPU %d in %s: %s, %s\n", printable(api.Tenant(r.Container, r.Uid)), r.FromIndex, r.ToIndex,
		short(r.TookNs), numbered(int(r.Processes), "process", "processes"), size(r.Bytes))
	return nil
}

// moveAway moves the tenants of a GPU that can move, and says why the others stay. It
// returns who is left.
func moveAway(ctx context.Context, root *rootFlags, io streams, r *api.DrainResponse) (*api.DrainResponse, error) {
	for _, t := range r.Uses {
		why := t.Stays
		if why == "" {
			req := &api.MigrateRequest{Container: t.Container.GetId()}
			if req.Container == "" {
				req.Uid = &t.Uid
			}
			if err := migrate(ctx, root, io, req); err != nil {
				why = messageOf(err)
			}
		}
		if why != "" {
			fmt.Fprintln(io.out, printable(why))
		}
		if ctx.Err() != nil {
			return nil, staysDrained(r)
		}
	}
	if len(r.Uses) == 0 {
		return r, nil
	}
	left, err := askDrain(ctx, root, &api.DrainRequest{Gpu: r.Uuid, Look: true})
	if err == nil && !slices.Equal(left.Tenants, r.Tenants) { // drain has said the same already
		fmt.Fprintln(io.out, describeDrain(left))
	}
	return left, err
}
