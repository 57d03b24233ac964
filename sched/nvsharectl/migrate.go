// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

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
		Args: oneTenant(root),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req := &api.MigrateRequest{Gpu: gpu}
			if req.Container, req.Uid, err = askMeant(cmd.Context(), root.runDir, args[0]); err != nil {
				return err
			}
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
		return likeTenant(ctx, c, req.Container, err)
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
