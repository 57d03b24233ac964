// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func versionCommand(root *rootFlags, io streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the versions of nvsharectl and of the scheduler that runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintf(io.out, "nvsharectl         %s\n", api.Version)
			r, err := askStatus(cmd.Context(), root.runDir)
			if err == nil {
				fmt.Fprintf(io.out, "nvshare-scheduler  %s\n", printable(r.Version))
			}
			return err
		},
	}
}
