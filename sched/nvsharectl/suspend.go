// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func suspendCommand(root *rootFlags, io streams) *cobra.Command {
	gpu := ""
	cmd := &cobra.Command{
		Use:   "suspend TENANT [--gpu N]",
		Short: "Move a tenant's memory off the GPU until it calls CUDA again",
		Long: `suspend moves all memory of a tenant that can be moved off the GPU to host memory,
also if nobody needs the room. Each process comes back by itself when it calls CUDA
again, in its turn, with its memory at the same addresses. One that works now goes on at
its next call, so suspend is for tenants that are idle.

What stays on the GPU: the contexts of its processes, some 500 MiB each, and memory that
cannot be moved (FIXED in the status with -o wide). It needs --swap-memory.`,
		Example: `  nvsharectl suspend ml/notebook/main
  nvsharectl suspend 1000 --gpu 0    the processes of user 1000 outside containers`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &api.SuspendRequest{Container: args[0], Gpu: gpu}
			if n, err := strconv.ParseUint(args[0], 10, 32); err == nil {
				uid := uint32(n)
				req.Container, req.Uid = "", &uid
			}
			var resp *api.SuspendResponse
			if err := call(cmd.Context(), root.runDir, func(ctx context.Context, c *api.Conn) (err error) {
				resp, err = c.Suspend(ctx, req)
				return err
			}); err != nil {
				return err
			}
			for _, line := range describeSuspend(resp) {
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
		lines = append(lines, fmt.Sprintf("GPU %d, %s: %s leave the GPU until it calls CUDA again; its context stays", g.Index, who, size(g.Bytes)))
	}
	return lines
}
