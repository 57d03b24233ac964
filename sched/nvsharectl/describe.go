// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nvshare/nvshare/sched/api"
)

// describeFlags say what a launcher tells of a container.
type describeFlags struct {
	name, engine, gpu string
	end               bool
	terms             termFlags
}

func describeCommand(root *rootFlags, io streams) *cobra.Command {
	f := &describeFlags{terms: termFlags{}}
	cmd := &cobra.Command{
		Use:   "describe ID [--end | SETTING...]",
		Short: "Tell of a job that a batch system starts",

		DisableFlagsInUseLine: true, // its settings are flags

		Long: `describe tells what the processes of a job may have of GPUs, before the first of
them starts. The job is a tenant of its own: all processes whose cgroup has its
ID in the name, as job_71 for Slurm's job 71, or 64 hexadecimal digits. What
describe says holds, also over restarts of the scheduler, until describe --end.
It is meant for prologs and epilogs; deployments/slurm has those for Slurm.`,
		Example: `  nvsharectl describe job_71 --engine slurm --gpu 0 --memory-limit 20Gi
  nvsharectl describe job_71 --end`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, root.runDir, args[0]) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.name, "name", "", "the `name` that status shows (default: the id)")
	flags.StringVar(&f.engine, "engine", "batch system", "the `name` of who starts it")
	flags.StringVar(&f.gpu, "gpu", "", "the GPUs that it has, by `indices or UUIDs`; a promise holds on them")
	flags.BoolVar(&f.end, "end", false, "the job has ended: forget it")
	f.terms.add(flags, api.AllFields&^api.FixedFields)
	return cmd
}

func (f *describeFlags) run(cmd *cobra.Command, runDir, id string) error {
	others := false
	cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) { others = others || flag.Changed && flag.Name != "end" })
	if f.end {
		if others {
			return usageError{errors.New("describe --end forgets all that was said: give it alone")}
		}
		_, err := ask(cmd.Context(), runDir, (*api.Conn).ForgetContainer, &api.ForgetContainerRequest{Id: id})
		return err
	}
	terms, _, err := f.terms.parse(cmd)
	if err != nil {
		return err
	}
	gpus, err := (&runFlags{gpu: f.gpu}).gpus(cmd.Context(), runDir, terms, true)
	if err != nil {
		return err
	}
	c := &api.Container{Id: id, Name: cmp.Or(f.name, id), Engine: f.engine, Gpus: gpus}
	c.SetTerms(terms)
	_, err = ask(cmd.Context(), runDir, (*api.Conn).DescribeContainer, &api.DescribeContainerRequest{Container: c})
	return err
}
