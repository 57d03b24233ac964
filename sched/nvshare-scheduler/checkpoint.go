// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon"
)

// checkpointer returns who takes contexts off GPUs, as --checkpoint says; nil: nobody.
func checkpointer(flag, simGPU string) (daemon.Checkpointer, error) {
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
