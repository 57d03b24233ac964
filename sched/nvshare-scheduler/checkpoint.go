// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
	"github.com/nvshare/nvshare/sched/daemon/rundir"
)

// canCheckpoint says why contexts cannot be taken off GPUs, or not those of all users.
func canCheckpoint(ctx context.Context, r *checkpoint.Runner) error {
	if err := r.Check(ctx); err != nil {
		return err
	}
	if set, _ := unix.PrctlRetInt(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_IS_SET, unix.CAP_SYS_PTRACE, 0, 0); os.Geteuid() != 0 && set != 1 {
		return errors.New("the scheduler is not root and has no CAP_SYS_PTRACE to pass on: processes of other users keep their contexts")
	}
	return nil
}

// checkpointer returns who takes contexts off GPUs, as --checkpoint says; nil: nobody.
func checkpointer(flag, simGPU, runDir string) (*checkpoint.Runner, error) {
	r := &checkpoint.Runner{Lock: filepath.Join(runDir, rundir.LockFile)}
	switch flag {
	case "off":
		return nil, nil
	case "auto", "":
		if r.Program = checkpoint.Find(); r.Program == "" {
			return nil, nil
		}
	default:
		path, err := exec.LookPath(flag)
		if err != nil {
			return nil, fmt.Errorf("--checkpoint: %w", err)
		}
		r.Program = path
	}
	if simGPU != "" {
		r.Env = []string{"LD_LIBRARY_PATH=" + filepath.Join(simGPU, "lib"), "NVSHARE_SIMGPU_DIR=" + filepath.Join(simGPU, "run")}
	}
	return r, nil
}

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
