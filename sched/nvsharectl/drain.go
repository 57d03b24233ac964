// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func drainCommand(root *rootFlags, io streams) *cobra.Command {
	return drainOrNot(root, io, false, "drain", "have a GPU admit no new tenants",
		`drain has a GPU admit no new tenants, until undrain, also over restarts of the scheduler.
Tenants that use the GPU go on; end them yourself. The programs of others wait. On
Kubernetes no new pod is given the GPU: the plugin refuses it, or, with --dra,
kube-scheduler sees a taint on the device.`)
}

func undrainCommand(root *rootFlags, io streams) *cobra.Command {
	return drainOrNot(root, io, true, "undrain", "have a GPU admit tenants again",
		`undrain has a GPU admit tenants again. The scheduler also forgets the GPU's fault: say it
after the GPU was reset.`)
}

func drainOrNot(root *rootFlags, io streams, undrain bool, use, short, long string) *cobra.Command {
	var gpu string
	cmd := &cobra.Command{
		Use: use + " --gpu GPU", Short: short, Long: long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if gpu == "" {
				return usageError{fmt.Errorf("which GPU? give --gpu with its index or UUID")}
			}
			var r *api.DrainResponse
			if err := call(cmd.Context(), root.runDir, func(ctx context.Context, c *api.Conn) (err error) {
				r, err = c.Drain(ctx, &api.DrainRequest{Gpu: gpu, Undrain: undrain})
				return err
			}); err != nil {
				return err
			}
			fmt.Fprintln(io.out, describeDrain(r, undrain))
			return nil
		},
	}
	cmd.Flags().StringVar(&gpu, "gpu", "", "the GPU, by `index or UUID`")
	return cmd
}

func describeDrain(r *api.DrainResponse, undrain bool) string {
	if undrain {
		return fmt.Sprintf("GPU %d admits tenants", r.Index)
	}
	use := "nobody uses it"
	if len(r.Tenants) > 0 {
		use = "still used by " + strings.Join(r.Tenants, ", ")
	}
	return fmt.Sprintf("GPU %d admits no new tenants; %s", r.Index, use)
}

// drainedOf says that a GPU admits no new tenants; "": it does.
func drainedOf(g *api.GPU) string {
	if !g.Drained {
		return ""
	}
	return fmt.Sprintf("drained: no new tenants are admitted; nvsharectl undrain --gpu %d admits them", g.Index)
}
