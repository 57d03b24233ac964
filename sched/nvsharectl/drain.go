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

func askDrain(ctx context.Context, root *rootFlags, req *api.DrainRequest) (r *api.DrainResponse, err error) {
	if req.Gpu == "" {
		return nil, usageError{errors.New("which GPU? give --gpu with its index or UUID")}
	}
	err = call(ctx, root.runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Drain(ctx, req)
		return err
	})
	return r, err
}

// drainLook is how often a command that waits asks who is left.
const drainLook = 200 * time.Millisecond

// awaitDrained waits until nobody uses a GPU that was drained, for as long as the timeout.
func awaitDrained(ctx context.Context, root *rootFlags, io streams, last *api.DrainResponse, timeout time.Duration) error {
	over := time.NewTimer(timeout)
	defer over.Stop()
	look := time.NewTicker(drainLook)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return staysDrained(last)
		case <-over.C:
			return fmt.Errorf("GPU %d is drained and %s after %v", last.Index, usedBy(last), timeout)
		case <-look.C:
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
