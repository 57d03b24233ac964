// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nvshare/nvshare/sched/api"
)

// shareFlags name one tenant and its terms. The settings of GPUs are flags of the
// root command.
type shareFlags struct {
	tenant          string // either of the next two
	container, user string
	gpu             string
	list            bool
	terms           termFlags
}

// termFlags are the flags of terms, by key.
type termFlags map[string]*string

// add gives a command a flag for each of these fields.
func (f termFlags) add(fs *pflag.FlagSet, fields api.FieldSet) {
	for _, t := range api.Fields {
		if fields&t.ID != 0 {
			f[t.Key] = fs.String(t.Key, "", t.Usage)
		}
	}
}

// parse reads the flags that are given. A term that is removed is in the fields, and unsaid.
func (f termFlags) parse(cmd *cobra.Command) (terms api.Terms, fields api.FieldSet, err error) {
	for _, t := range api.Fields {
		if !cmd.Flags().Changed(t.Key) {
			continue
		}
		fields |= t.ID
		value := *f[t.Key]
		if value == "none" || value == "0" && t.ID == api.MemoryLimitField {
			continue
		}
		if err := t.Parse(&terms, value); err != nil {
			return terms, fields, usageError{fmt.Errorf("--%s: %w, or none", t.Key, err)}
		}
	}
	return terms, fields, nil
}

func setCommand(root *rootFlags, io streams) *cobra.Command {
	f := &shareFlags{terms: termFlags{}}
	cmd := &cobra.Command{
		Use: "set --list | (TENANT | --container NAME | --user UID) SETTING...",

		DisableFlagsInUseLine: true, // its settings are flags

		Short: "Change what a tenant may have of GPUs",
		Long: `set changes at once a tenant's limits and requests on each GPU, and prints the
old and the new values. A value applies to the whole container, survives
restarts of the scheduler, and overrides the annotation; "none" restores the
annotation. All changes apply, or none. They end with the container. --list
shows what is set, by annotations too.

A core limit caps the container's part of the GPU's time, also when it is
alone. A core request promises a part, which it gets whenever it wants it: more
than 100 % of a GPU cannot be promised. What is left is shared by weight.
Containers of priority latency do not wait for their turn. What is in use of
the memory stays, also above a new limit: allocations then fail until enough of
it is freed.

A size is a number with a unit (8Gi, 4096Mi, 4G) or a number of MiB.` + tenantHelp,
		Example: `  nvsharectl set ml/train-a/main --core-limit 25 --memory-limit 8Gi
  nvsharectl set --container 4f0c2b --core-request 30 --weight 200 --gpu 0
  nvsharectl set --container ml/serve/main --priority latency
  nvsharectl set --user 1000 --core-limit none`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				f.tenant = args[0]
			}
			if f.list {
				alone := len(args) == 0
				cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) { alone = alone && (!flag.Changed || flag.Name == "list") })
				if !alone {
					return usageError{errors.New("set: --list changes nothing and shows what is set for all: give it alone, or leave it out")}
				}
				return listSettings(cmd.Context(), root.runDir, io)
			}
			return f.run(cmd, root.runDir, io)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.container, "container", "", "the container, by its `name`, its pod's, namespace/pod/name, or the beginning of its id")
	fs.BoolVar(&f.list, "list", false, "show what is set for whom")
	fs.StringVar(&f.user, "user", "", "the `number` of the user whose processes outside containers are meant")
	fs.StringVar(&f.gpu, "gpu", "", "only on the GPU with this `index or UUID`")
	f.terms.add(fs, api.AllFields&^api.FixedFields)
	return cmd
}

// request returns the request that the flags make, and the terms that it changes.
func (f *shareFlags) request(cmd *cobra.Command) (*api.SetShareRequest, api.FieldSet, error) {
	terms, fields, wrong := f.terms.parse(cmd)
	req := &api.SetShareRequest{Container: f.container, Gpu: f.gpu}
	named := 0
	for _, name := range []string{f.tenant, f.container, f.user} {
		if name != "" {
			named++
		}
	}
	switch {
	case named == 0 && fields == 0:
		return nil, 0, usageError{errors.New("set what, and whose? give a tenant and a setting, like nvsharectl set ml/train-a/main --core-limit 25 (nvsharectl set --list shows what is set)")}
	case named == 0:
		return nil, 0, usageError{errors.New("set: whose? give a tenant's name, --container or --user")}
	case named > 1:
		return nil, 0, usageError{fmt.Errorf("set: give one tenant, not %d: its name, --container or --user", named)}
	case f.tenant != "":
		req.Container, req.Uid = nameTenant(f.tenant)
	case f.user != "":
		n, err := strconv.ParseUint(f.user, 10, 32)
		if err != nil {
			return nil, 0, usageError{fmt.Errorf("--user: %q is not the number of a user (id -u prints it)", f.user)}
		}
		uid := uint32(n)
		req.Uid = &uid
	}
	if fields == 0 {
		var flags []string
		for _, t := range api.Fields {
			if f.terms[t.Key] != nil {
				flags = append(flags, "--"+t.Key)
			}
		}
		return nil, 0, usageError{fmt.Errorf("set: say what to change, with %s", strings.Join(flags, ", "))}
	}
	req.Change(terms, fields)
	return req, fields, wrong
}

// run changes the share and prints the old and the new values.
func (f *shareFlags) run(cmd *cobra.Command, runDir string, io streams) error {
	req, fields, err := f.request(cmd)
	if err != nil {
		return err
	}
	resp, err := ask(cmd.Context(), runDir, (*api.Conn).SetShare, req)
	if err != nil {
		return err
	}
	for _, line := range describeShareChange(resp, fields) {
		fmt.Fprintln(io.out, line)
	}
	return nil
}

// describeShareChange says the old and the new values of these fields, a line for each GPU.
func describeShareChange(resp *api.SetShareResponse, fields api.FieldSet) (lines []string) {
	who := printable(api.Tenant(resp.Container, resp.Uid))
	for _, c := range resp.Changes {
		if c.Uuid == "" && len(resp.Changes) > 1 { // the same goes for GPUs that are found later
			continue
		}
		what := "GPUs found later"
		if c.Uuid != "" {
			what = fmt.Sprintf("GPU %d", c.Index)
		}
		var parts []string
		old, now := api.TermsOf(c.Old, c.OldMemoryBytes), api.TermsOf(c.New, c.NewMemoryBytes)
		for _, t := range api.Fields {
			if fields&t.ID != 0 {
				parts = append(parts, fmt.Sprintf("%s %s → %s", t.Name, printable(t.Format(old)), printable(t.Format(now))))
			}
		}
		note := ""
		if n := c.NewMemoryBytes; fields&api.MemoryLimitField != 0 && n != 0 && c.UsedMemoryBytes > n {
			note = fmt.Sprintf("; %s are in use: allocations fail until enough is freed", size(c.UsedMemoryBytes))
		}
		lines = append(lines, fmt.Sprintf("%s, %s: %s%s", what, who, strings.Join(parts, ", "), note))
	}
	return lines
}

// listSettings prints what annotations and nvsharectl set say of tenants' terms.
func listSettings(ctx context.Context, runDir string, io streams) error {
	r, err := askAll(ctx, runDir)
	if err != nil {
		return err
	}
	t := table{names: 0, head: []string{"TENANT", "GPU", "SET BY", "SHARE"}}
	for _, s := range r.Settings {
		t.add(nil, api.Tenant(s.Container, s.Uid), gpuOf(r, s.Uuid), setBy(s), describeTerms(api.TermsOf(s.Share, s.MemoryBytes)))
	}
	if len(t.rows) == 0 {
		fmt.Fprintln(io.out, "Nothing is set.")
		return nil
	}
	t.print(io)
	return nil
}

// setBy names what says a setting.
func setBy(s *api.Setting) string {
	switch {
	case !s.Annotated:
		return "nvsharectl"
	case s.Container.GetEngine() == runEngine:
		return runEngine
	}
	return "annotations"
}

// describeTerms writes the terms that are said.
func describeTerms(terms api.Terms) string {
	var parts []string
	for _, f := range api.Fields {
		if f.Said(terms) {
			parts = append(parts, f.Short+f.Format(terms))
		}
	}
	return strings.Join(parts, ", ")
}
