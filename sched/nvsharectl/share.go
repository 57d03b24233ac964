// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// shareFlags are the settings of one tenant. Those of GPUs are flags of the
// root command.
type shareFlags struct {
	container, user, gpu                           string
	limit, request, weight, priority, gang, memory string
	keep                                           string
}

func setCommand(root *rootFlags, io streams) *cobra.Command {
	f := &shareFlags{}
	cmd := &cobra.Command{
		Use:   "set (--container ID | --user UID) [--gpu N] SETTING...",
		Short: "Change what a container, or a user's processes outside containers, may have of GPUs",
		Long: `set changes at once what a container may have of each GPU and is promised, and
prints what it was. It holds for all processes of the container together,
outlives the scheduler, and goes before what the pod's annotations say; "none"
removes it, so that those hold again. Either all of it is changed or nothing.

A core limit caps the container's part of the GPU's time, also when it is alone.
A core request promises a part, which it gets whenever it wants it: more than
100 % of a GPU cannot be promised. What is left is shared by weight. Containers
of priority latency do not wait for their turn. What is in use of the memory
stays, also above a new limit: allocations then fail until enough of it is freed.

A size is a number with a unit (8Gi, 4096Mi, 4G) or a number of MiB. A container
is named by its id, the beginning of it, or as the status shows it.`,
		Example: `  nvsharectl set --container ml/train-a/main --core-limit 25 --memory-limit 8Gi
  nvsharectl set --container 4f0c2b --core-request 30 --weight 200 --gpu 0
  nvsharectl set --container ml/serve/main --priority latency
  nvsharectl set --user 1000 --core-limit none`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd, root.runDir, io)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.container, "container", "", "the container, by `id`, the beginning of one, or namespace/pod/name")
	fs.StringVar(&f.user, "user", "", "the `number` of the user whose processes outside containers are meant")
	fs.StringVar(&f.gpu, "gpu", "", "only on the GPU with this `index or UUID`")
	fs.StringVar(&f.limit, "core-limit", "", "at most this `percentage` of the GPU's time, 1 to 100, or none")
	fs.StringVar(&f.request, "core-request", "", "at least this `percentage` of the GPU's time when it wants it, 1 to 100, or none")
	fs.StringVar(&f.weight, "weight", "", "its part of what nobody was promised: a `number` from 1 to 10000, or none, which is 100")
	fs.StringVar(&f.priority, "priority", "", "`batch|latency`: whether it waits for its turn; or none")
	fs.StringVar(&f.gang, "gang", "", "the `name` of those, in its namespace, that get GPUs together with it; true: its own processes; or none")
	fs.StringVar(&f.keep, "memory-mode", "", "`swap|resident|managed`: whether its memory may be moved off a GPU that is promised beyond what it has; or none, which is swap")
	fs.StringVar(&f.memory, "memory-limit", "", "the `size`, like 8Gi; a bare number means MiB; or none")
	return cmd
}

// setting is one of shareFlags.
type setting struct {
	flag, value, name string
	// parse stores the value in a request; "none" is zero, and stored by remove.
	parse  func(*api.SetShareRequest, string) error
	remove func(*api.SetShareRequest)
	// show writes what holds before and after.
	show func(share *api.Share, memory uint64) string
}

func (f *shareFlags) settings() []setting {
	return []setting{
		of("core-limit", f.limit, "core limit", api.ParsePercent, func(r *api.SetShareRequest, v *uint32) { r.CoreLimit = v },
			func(s *api.Share, _ uint64) string { return api.FormatPercent(s.GetCoreLimit()) }),
		of("core-request", f.request, "core request", api.ParsePercent, func(r *api.SetShareRequest, v *uint32) { r.CoreRequest = v },
			func(s *api.Share, _ uint64) string { return api.FormatPercent(s.GetCoreRequest()) }),
		of("weight", f.weight, "weight", api.ParseWeight, func(r *api.SetShareRequest, v *uint32) { r.Weight = v },
			func(s *api.Share, _ uint64) string { return api.FormatWeight(s.GetWeight()) }),
		of("priority", f.priority, "priority", api.ParsePriority, func(r *api.SetShareRequest, v *api.Priority) { r.Priority = v },
			func(s *api.Share, _ uint64) string { return api.FormatPriority(s.GetPriority()) }),
		of("gang", f.gang, "gang", api.ParseGang, func(r *api.SetShareRequest, v *string) { r.Gang = v },
			func(s *api.Share, _ uint64) string { return api.FormatGang(s.GetGang()) }),
		of("memory-limit", f.memory, "memory limit", api.ParseMemory, func(r *api.SetShareRequest, v *uint64) { r.MemoryBytes = v },
			func(_ *api.Share, n uint64) string { return api.FormatMemory(n) }),
		of("memory-mode", f.keep, "memory mode", api.ParseMemoryMode, func(r *api.SetShareRequest, v *api.MemoryMode) { r.MemoryMode = v },
			func(s *api.Share, _ uint64) string { return api.FormatMemoryMode(s.GetMemoryMode()) }),
	}
}

func of[T any](flag, value, name string, parse func(string) (T, error), store func(*api.SetShareRequest, *T), show func(*api.Share, uint64) string) setting {
	return setting{
		flag: flag, value: value, name: name, show: show,
		parse: func(r *api.SetShareRequest, text string) error {
			v, err := parse(text)
			store(r, &v)
			return err
		},
		remove: func(r *api.SetShareRequest) { store(r, new(T)) },
	}
}

// compose returns what to ask for, and which settings that concerns.
func (f *shareFlags) compose(given func(flag string) bool) (*api.SetShareRequest, []setting, error) {
	req := &api.SetShareRequest{Container: f.container, Gpu: f.gpu}
	if (f.container == "") == (f.user == "") {
		return nil, nil, usageError{errors.New("set: say whose share, with either --container or --user")}
	}
	if f.user != "" {
		n, err := strconv.ParseUint(f.user, 10, 32)
		if err != nil {
			return nil, nil, usageError{fmt.Errorf("--user: %q is not the number of a user (id -u prints it)", f.user)}
		}
		uid := uint32(n)
		req.Uid = &uid
	}
	var changed []setting
	var flags []string
	for _, s := range f.settings() {
		flags = append(flags, "--"+s.flag)
		if !given(s.flag) {
			continue
		}
		changed = append(changed, s)
		if s.value == "none" || s.value == "0" && s.flag == "memory-limit" {
			s.remove(req)
		} else if err := s.parse(req, s.value); err != nil {
			return nil, nil, usageError{fmt.Errorf("--%s: %w, or none", s.flag, err)}
		}
	}
	if len(changed) == 0 {
		return nil, nil, usageError{fmt.Errorf("set: say what to change, with %s", strings.Join(flags, ", "))}
	}
	return req, changed, nil
}

// run changes the share and prints what it was and is.
func (f *shareFlags) run(cmd *cobra.Command, runDir string, io streams) error {
	req, changed, err := f.compose(func(flag string) bool { return cmd.Flags().Changed(flag) })
	if err != nil {
		return err
	}
	var resp *api.SetShareResponse
	if err := call(cmd.Context(), runDir, func(ctx context.Context, c *api.Conn) error {
		resp, err = c.SetShare(ctx, req)
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
		var parts []string
		for _, s := range changed {
			parts = append(parts, fmt.Sprintf("%s %s → %s", s.name, printable(s.show(c.Old, c.OldMemoryBytes)), printable(s.show(c.New, c.NewMemoryBytes))))
		}
		note := ""
		if n := c.NewMemoryBytes; req.MemoryBytes != nil && n != 0 && c.UsedMemoryBytes > n {
			note = fmt.Sprintf("; %s are in use: allocations fail until enough is freed", size(c.UsedMemoryBytes))
		}
		fmt.Fprintf(io.out, "%s, %s: %s%s\n", what, who, strings.Join(parts, ", "), note)
	}
	return nil
}
