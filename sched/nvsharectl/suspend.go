// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

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
		Args: oneTenant(root),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req := &api.SuspendRequest{Gpu: gpu}
			if req.Container, req.Uid, err = askMeant(cmd.Context(), root.runDir, args[0]); err != nil {
				return err
			}
			var resp *api.SuspendResponse
			if err := call(cmd.Context(), root.runDir, func(ctx context.Context, c *api.Conn) (err error) {
				resp, err = move(c, ctx, req)
				return likeTenant(ctx, c, req.Container, err)
			}); err != nil {
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
		memory, context := size(g.Bytes)+" leave the GPU until it calls CUDA again", "its context stays (nvshare-scheduler --checkpoint)"
		switch {
		case g.Context && g.Bytes > 0:
			context = "then its context, if the driver can take it off"
		case g.Context:
			context = "its context leaves the GPU until it calls CUDA again, if the driver can take it off"
		}
		if g.Bytes == 0 {
			memory = "none of its memory is on the GPU"
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
