// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// limitFlags are the settings of one tenant. Those of GPUs are flags of the
// root command.
type limitFlags struct {
	container, user, gpu, memory string
}

func setCommand(root *rootFlags, io streams) *cobra.Command {
	f := &limitFlags{}
	cmd := &cobra.Command{
		Use:   "set (--container ID | --user UID) --memory-limit SIZE",
		Short: "Limit the GPU memory of a container, or of a user's processes outside containers",
		Long: `set changes a limit at once and prints what it was. The limit holds for all
processes of the container together, on each GPU, and outlives the scheduler. It
goes before the one of the pod's annotation. What is in use already stays, also
above the limit: allocations then fail until enough of it is freed.

A size is a number with a unit (8Gi, 4096Mi, 4G) or a number of MiB; "none"
removes the limit. A container is named by its id, the beginning of it, or as
the status shows it.`,
		Example: `  nvsharectl set --container ml/train-a/main --memory-limit 8Gi
  nvsharectl set --container 4f0c2b --memory-limit 4096 --gpu 0
  nvsharectl set --user 1000 --memory-limit none`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), root.runDir, io)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.container, "container", "", "the container, by `id`, the beginning of one, or namespace/pod/name")
	fs.StringVar(&f.user, "user", "", "the `number` of the user whose processes outside containers are meant")
	fs.StringVar(&f.memory, "memory-limit", "", "the `size`, like 8Gi; a bare number means MiB; none removes the limit")
	fs.StringVar(&f.gpu, "gpu", "", "only on the GPU with this `index or UUID`")
	return cmd
}

func (f *limitFlags) request() (*api.SetMemoryLimitRequest, error) {
	req := &api.SetMemoryLimitRequest{Container: f.container, Gpu: f.gpu}
	if (f.container == "") == (f.user == "") {
		return nil, usageError{errors.New("set: say whose limit, with either --container or --user")}
	}
	if f.user != "" {
		n, err := strconv.ParseUint(f.user, 10, 32)
		if err != nil {
			return nil, usageError{fmt.Errorf("--user: %q is not the number of a user (id -u prints it)", f.user)}
		}
		uid := uint32(n)
		req.Uid = &uid
	}
	switch f.memory {
	case "":
		return nil, usageError{errors.New("set: say which limit, with --memory-limit")}
	case "none", "0":
		return req, nil
	}
	var err error
	if req.Bytes, err = api.ParseMemory(f.memory); err != nil {
		return nil, usageError{fmt.Errorf("--memory-limit: %w", err)}
	}
	return req, nil
}

// run changes the limit and prints what it was and is.
func (f *limitFlags) run(ctx context.Context, runDir string, io streams) error {
	req, err := f.request()
	if err != nil {
		return err
	}
	var resp *api.SetMemoryLimitResponse
	if err := call(ctx, runDir, func(ctx context.Context, c *api.Conn) error {
		resp, err = c.SetMemoryLimit(ctx, req)
		return err
	}); err != nil {
		return err
	}
	who := printable(api.Tenant(resp.Container, resp.Uid))
	for _, c := range resp.Changes {
		what := "new GPUs"
		if c.Uuid != "" {
			what = fmt.Sprintf("GPU %d", c.Index)
		}
		note := ""
		if c.NewBytes != 0 && c.UsedBytes > c.NewBytes {
			note = fmt.Sprintf("; %s are in use: allocations fail until enough is freed", size(c.UsedBytes))
		}
		fmt.Fprintf(io.out, "%s: memory limit of %s %s → %s%s\n", what, who, api.FormatMemory(c.OldBytes), api.FormatMemory(c.NewBytes), note)
	}
	return nil
}
