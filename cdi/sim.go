// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Where containers find the simulated GPU.
const (
	simLibDir = "/usr/local/nvshare-simgpu/lib"
	simRunDir = "/run/nvshare-simgpu"

	// simDirEnv tells the simulated libraries where their state is. They look
	// at simRunDir without it.
	simDirEnv = "NVSHARE_SIMGPU_DIR"
	// simGPUEnv + index stands for the device node that a real GPU would have:
	// what a container is given, by a key of its own for each GPU because
	// containers may be given several.
	simGPUEnv = "NVSHARE_SIMGPU_GPU_"

	simMaxGPUs = 64
)

// simLibraries are the libraries in Dir/lib that programs look for by name.
var simLibraries = []string{"libcuda.so.1", "libnvidia-ml.so.1"}

// Simulated lists the GPUs of the simulated driver in Dir: through its
// libnvidia-ml.so.1, or from its configuration in programs without cgo.
type Simulated struct {
	Dir string
}

var _ Lister = Simulated{}

// nvml returns the driver's library, and the absolute path of Dir.
func (s Simulated) nvml() (n NVML, dir string, err error) {
	if dir, err = filepath.Abs(s.Dir); err == nil {
		n.Library = filepath.Join(dir, "lib", "libnvidia-ml.so.1")
		// The library reads its environment when it is loaded; Setenv reaches C.
		err = os.Setenv(simDirEnv, filepath.Join(dir, "run"))
	}
	if err != nil {
		err = fmt.Errorf("simulated GPU %s: %w", s.Dir, err)
	}
	return n, dir, err
}

// List returns the simulated GPUs in index order. They have no device nodes.
func (s Simulated) List(ctx context.Context) ([]GPU, error) {
	n, dir, err := s.nvml()
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(n.Library); err != nil {
		return nil, fmt.Errorf("simulated GPU %s: %w (build it with make, or name the directory that holds lib/ and run/)", s.Dir, err)
	}
	gpus, err := n.List(ctx)
	if errors.Is(err, ErrNoNVML) {
		gpus, err = s.fromConfig(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("simulated GPU %s: %w", s.Dir, err)
	}
	for i := range gpus {
		gpus[i].DeviceNodes = nil
	}
	return gpus, nil
}

// fromConfig reads run/config as the simulated libraries do: lines key=value.
func (s Simulated) fromConfig(dir string) ([]GPU, error) {
	count, memory := uint64(1), uint64(0)
	file := filepath.Join(dir, "run", "config")
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		var to *uint64
		switch key {
		case "gpus":
			to = &count
		case "memory_mib":
			to = &memory
		default:
			continue
		}
		if *to, err = strconv.ParseUint(value, 10, 32); err != nil {
			return nil, fmt.Errorf("%s: %s: %q is no number", file, key, value)
		}
	}
	if count > simMaxGPUs {
		return nil, fmt.Errorf("%s: %d GPUs, more than %d", file, count, simMaxGPUs)
	}
	var gpus []GPU
	for i := range int(count) {
		gpus = append(gpus, GPU{
			Index:       i,
			UUID:        fmt.Sprintf("GPU-51600000-0000-4000-8000-%012x", i),
			Name:        "NVIDIA SimGPU",
			MemoryBytes: memory << 20,
			Minor:       i,
		})
	}
	return gpus, nil
}
