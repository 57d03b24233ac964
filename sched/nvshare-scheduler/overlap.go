// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
)

// overlapCommand is what the scheduler starts for the MPS daemon of an overlap group.
const overlapCommand = "overlap-daemon"

func overlapDaemonCommand(status *int) *cobra.Command {
	return &cobra.Command{
		Use:                overlapCommand,
		Short:              "Become the MPS daemon of an overlap group; the scheduler starts this",
		Hidden:             true,
		Args:               cobra.MinimumNArgs(4),
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			*status = exitFailed
			return overlap.Start(args)
		},
	}
}

// mpsControl finds the driver's MPS control daemon.
func mpsControl(simGPU string) func() (string, error) {
	return func() (string, error) { return cdi.FindMPSControl(cdi.Options{SimDir: simGPU}) }
}
