// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// RunDir is the scheduler's default run directory; /run is private.
	RunDir = "/var/run/nvshare"
	// SimGPU holds the simulated driver (lib) and its state (run). It is below /run,
	// because an unprivileged user may not reach the clone.
	SimGPU = "/run/simgpu"
	// LibDir is where the plugin puts the shim for containers.
	LibDir = "/run/nvshare-host/lib"
)

// TenantEnv names a tenant in the simulated GPU's record.
const TenantEnv = "NVSHARE_SIMGPU_TENANT"

// installSimGPU puts the simulated driver libraries where the scheduler, the
// plugin and local programs find them.
func (n *Node) installSimGPU(config string) error {
	for _, dir := range []string{"/lib", "/bin"} {
		if err := os.MkdirAll(SimGPU+dir, 0o755); err != nil {
			return err
		}
	}
	for _, program := range []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
		if err := copyFile(filepath.Join(SimGPU, "bin", program), filepath.Join(n.build, "simgpu", "bin", program)); err != nil {
			return err
		}
	}
	// Tenants of all users share this state, as they share a GPU.
	if err := os.MkdirAll(SimGPU+"/run", 0o777); err != nil {
		return err
	}
	if err := os.Chmod(SimGPU+"/run", 0o777); err != nil {
		return err
	}
	for _, lib := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if err := copyFile(filepath.Join(SimGPU, "lib", lib), filepath.Join(n.build, "simgpu", lib)); err != nil {
			return fmt.Errorf("%w (make simgpu builds it)", err)
		}
	}
	if config == "" {
		return nil
	}
	return os.WriteFile(SimGPU+"/run/config", []byte(config), 0o644)
}

func copyFile(to, from string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o755)
}

// Bin is the path of one of the project's programs.
func (n *Node) Bin(name string) string { return filepath.Join(n.build, "bin", name) }

// SchedulerBin is the path of nvshare-scheduler. Of a bundle, one that knows NVML: without that it may not know how much
// memory a GPU has, and swaps nothing. In a build directory all do.
func (n *Node) SchedulerBin() string {
	nvml := filepath.Join(n.build, "nvml", "nvshare-scheduler")
	if _, err := os.Stat(nvml); err != nil {
		return n.Bin("nvshare-scheduler")
	}
	return nvml
}

// Shim is the path of libnvshare.so in the build directory.
func (n *Node) Shim() string { return filepath.Join(n.build, "lib", "libnvshare.so") }

func (n *Node) simFlag() []string {
	if !n.simulated {
		return nil
	}
	return []string{"--simgpu", SimGPU}
}

// Start starts a node that New has made: containerd with its images, the
// scheduler, the plugin.
func (n *Node) Start(ctx context.Context) error {
	for _, step := range []func(context.Context) error{
		n.StartContainerd, n.BuildImages,
		func(ctx context.Context) error { return n.StartScheduler(ctx) },
		func(ctx context.Context) error { return n.StartPlugin(ctx) },
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// StartScheduler starts or restarts nvshare-scheduler, and waits for its Status.
// args are added to the command line. Tenants take turns unless args say otherwise:
// most tests judge that no two of them are on the GPU at the same time. Pods may ask for
// whatever they like.
func (n *Node) StartScheduler(ctx context.Context, args ...string) error {
	argv := append(append([]string{n.SchedulerBin(), "--anti-thrash", "on",
		"--latency-namespaces=*", "--gang-namespaces=*", "--overlap-namespaces=*", "--max-weight="}, n.simFlag()...), args...)
	p, err := start("scheduler", n.logFile("scheduler"), n.env, argv...)
	if err != nil {
		return err
	}
	n.Scheduler = p
	return p.ready(ctx, "its control socket", func() error {
		_, err := n.Status(ctx)
		return err
	})
}

// StartWarden starts nvshare-warden. The scheduler finds it, sooner or later.
func (n *Node) StartWarden() (*Process, error) {
	return start("warden", n.logFile("warden"), n.env, append([]string{n.Bin("nvshare-warden")}, n.simFlag()...)...)
}

// Status asks the scheduler, which answers before it has looked for GPUs. Until it has found the
// simulated ones that is an error.
func (n *Node) Status(ctx context.Context) (*api.StatusResponse, error) {
	conn, err := api.Dial(ctx, RunDir)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	s, err := conn.Status(ctx, &api.StatusRequest{})
	if err == nil && n.simulated && len(s.Gpus) == 0 {
		return nil, errors.New("the scheduler has found no GPU yet")
	}
	return s, err
}

// Ctl runs nvsharectl as a user would and returns what it printed.
func (n *Node) Ctl(ctx context.Context, args ...string) (string, error) {
	return output(ctx, n.env, append([]string{n.Bin("nvsharectl")}, args...)...)
}

// StartPlugin starts or restarts nvshare-plugin, and waits until containerd has
// accepted it: from then on, new pods are adjusted. args are added to the command line.
func (n *Node) StartPlugin(ctx context.Context, args ...string) error {
	before := n.PluginAccepts()
	argv := append(append([]string{n.Bin("nvshare-plugin"), "--lib-dir", LibDir, "--nri-socket", n.NRISocket(), "--exclusion-namespaces=*"}, n.simFlag()...), args...)
	p, err := start("plugin", n.logFile("plugin"), n.env, argv...)
	if err != nil {
		return err
	}
	n.Plugin = p
	return n.PluginAccepted(ctx, before)
}

// PluginAccepts counts in containerd's log how often it has accepted the plugin.
func (n *Node) PluginAccepts() int {
	data, err := os.ReadFile(n.logFile("containerd"))
	if err != nil {
		return 0
	}
	return strings.Count(string(data), "connected and synchronized")
}

// PluginAccepted waits until PluginAccepts is above before.
func (n *Node) PluginAccepted(ctx context.Context, before int) error {
	return n.Plugin.ready(ctx, "containerd to accept it", func() error {
		if n.PluginAccepts() <= before {
			return errors.New("containerd's log does not say so")
		}
		return nil
	})
}
