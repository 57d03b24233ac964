// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/nvshare/nvshare/sched/api"
)

// nobody is the unprivileged user of Local, by Linux's convention.
const nobody = 65534

// Local is nvshare without containers, for a user without privileges: one
// run directory, a scheduler, programs with the shim preloaded.
type Local struct {
	RunDir string // $NVSHARE_RUN_DIR of scheduler and programs
	SimGPU string // a simulated GPU of its own

	node      *Node
	dir       string
	processes []*Process
}

// NewLocal prepares a Local below /run. Programs are copied there, because other users
// may not be allowed to read the clone.
func (n *Node) NewLocal(name string) (*Local, error) {
	dir := filepath.Join("/run", name)
	l := &Local{RunDir: dir + "/run", SimGPU: dir + "/simgpu", node: n, dir: dir}
	for _, d := range []string{dir, dir + "/bin", l.RunDir, l.SimGPU, l.SimGPU + "/lib", l.SimGPU + "/run"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
		if err := os.Chown(d, nobody, nobody); err != nil {
			return nil, err
		}
	}
	for to, from := range map[string]string{
		dir + "/bin/nvshare-scheduler":      n.Bin("nvshare-scheduler"),
		dir + "/bin/nvsharectl":             n.Bin("nvsharectl"),
		dir + "/bin/cuda-busy":              n.Bin("cuda-busy"),
		dir + "/libnvshare.so":              n.Shim(),
		l.SimGPU + "/lib/libcuda.so.1":      filepath.Join(SimGPU, "lib/libcuda.so.1"),
		l.SimGPU + "/lib/libnvidia-ml.so.1": filepath.Join(SimGPU, "lib/libnvidia-ml.so.1"),
	} {
		if err := copyFile(to, from); err != nil {
			return nil, err
		}
	}
	return l, nil
}

func (l *Local) env(extra ...string) []string {
	return append([]string{"PATH=/usr/bin:/bin", "HOME=/", "NVSHARE_RUN_DIR=" + l.RunDir,
		"NVSHARE_SIMGPU_DIR=" + l.SimGPU + "/run", "LD_LIBRARY_PATH=" + l.SimGPU + "/lib"}, extra...)
}

func (l *Local) start(name, program string, env []string, args ...string) (*Process, error) {
	argv := append([]string{filepath.Join(l.dir, "bin", program)}, args...)
	p, err := startAs(&syscall.Credential{Uid: nobody, Gid: nobody}, name, l.node.logFile("local-"+name), env, argv...)
	if err == nil {
		l.processes = append(l.processes, p)
	}
	return p, err
}

// StartScheduler starts the user's scheduler and waits until it answers.
func (l *Local) StartScheduler(ctx context.Context) error {
	p, err := l.start("scheduler", "nvshare-scheduler", l.env(), "--simgpu", l.SimGPU)
	if err != nil {
		return err
	}
	return p.ready(ctx, "its control socket", func() error {
		_, err := l.Status(ctx)
		return err
	})
}

// Status asks the user's scheduler.
func (l *Local) Status(ctx context.Context) (*api.StatusResponse, error) {
	conn, err := api.Dial(ctx, l.RunDir)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Status(ctx, &api.StatusRequest{})
}

// StartProgram starts a program with the shim preloaded; name is the tenant.
func (l *Local) StartProgram(name, program string, args ...string) (*Process, error) {
	return l.start(name, program, l.env("LD_PRELOAD="+l.dir+"/libnvshare.so", TenantEnv+"="+name), args...)
}

// Ctl runs nvsharectl as the user.
func (l *Local) Ctl(ctx context.Context, args ...string) (string, error) {
	p, err := l.start("nvsharectl", "nvsharectl", l.env(), args...)
	if err != nil {
		return "", err
	}
	status, err := p.Wait(ctx)
	if err != nil {
		return "", err
	}
	if status != 0 {
		return "", fmt.Errorf("nvsharectl %v: status %d: %s", args, status, p.Tail(10))
	}
	return p.Tail(1000), nil
}

// Stop ends all processes, programs first.
func (l *Local) Stop() error {
	var errs []error
	for i := len(l.processes) - 1; i >= 0; i-- {
		errs = append(errs, l.processes[i].Stop())
	}
	return errors.Join(errs...)
}
