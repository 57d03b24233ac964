// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// versionJSON is what version -o json and -o yaml print. Scheduler is empty where no
// scheduler answers.
type versionJSON struct {
	Ctl       string `json:"nvsharectl"`
	Scheduler string `json:"nvshare_scheduler,omitempty"`
}

func versionCommand(root *rootFlags, io streams) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the versions of nvsharectl and of the scheduler that runs",
		Args:  noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printVersions(cmd.Context(), root.runDir, io, output)
		},
	}
	addForm(cmd, &output, "", "text", "json", "yaml")
	return cmd
}

// printVersions prints what is known before it returns that no scheduler answers.
func printVersions(ctx context.Context, runDir string, io streams, output string) error {
	v := versionJSON{Ctl: api.Version}
	r, unanswered := askStatus(ctx, runDir)
	if unanswered == nil {
		v.Scheduler = printable(r.Version)
	}
	if output != "text" {
		return errors.Join(encode(io, output, v), unanswered)
	}
	fmt.Fprintf(io.out, "nvsharectl         %s\n", v.Ctl)
	if unanswered == nil {
		fmt.Fprintf(io.out, "nvshare-scheduler  %s\n", v.Scheduler)
	}
	return unanswered
}
