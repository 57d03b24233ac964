// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
)

// canCheckpoint says why contexts cannot be taken off GPUs, or not those of all users.
func canCheckpoint(ctx context.Context, r *checkpoint.Runner) error {
	if err := r.Check(ctx); err != nil {
		return err
	}
	if os.Geteuid() != 0 && !inherits(unix.CAP_SYS_PTRACE) {
		return errors.New("the scheduler is not root and has no CAP_SYS_PTRACE to pass on: processes of other users keep their contexts")
	}
	return nil
}

// inherits says whether programs that this one starts have a capability.
func inherits(capability uint) bool {
	text, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(text)) {
		if hex, ok := strings.CutPrefix(line, "CapAmb:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			return err == nil && set&(1<<capability) != 0
		}
	}
	return false
}

// checkpointer returns who takes contexts off GPUs, as --checkpoint says; nil: nobody.
func checkpointer(flag, simGPU string) (*checkpoint.Runner, error) {
	r := &checkpoint.Runner{}
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
