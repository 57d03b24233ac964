//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

const (
	gpuAnnotation = "nvshare.com/gpu"
	firstGPU      = "nvshare.com/gpu=0"

	// The log keeps the records of the whole suite.
	simConfig = "gpus=2\nmemory_mib=16384\nlog_records=1048576\n"

	busyProgram = "/usr/bin/cuda-busy"

	// patience bounds each wait for an event. It does not measure speed.
	patience = 5 * time.Minute
)

// shared is the node that all tests use, one after the other. A test that changes the
// daemons restores them.
var shared *node.Node

// otherContainerd is the directory of a containerd to use instead of the pinned one.
var otherContainerd = os.Getenv("NVSHARE_CONTAINERD")

// crio is the directory of a CRI-O to use in containerd's place.
var crio = os.Getenv("NVSHARE_CRIO")

// buildDir holds what make build, simgpu and tools have made.
var buildDir string

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = filepath.Abs("../../.build"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(node.Isolated(buildDir, "e2e-", func(dir string) int {
		if err := bringUp(dir); err != nil {
			fmt.Fprintln(os.Stderr, "bring up the node:", err)
			return 1
		}
		return m.Run()
	}))
}

func bringUp(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := node.New(dir, node.Options{Build: buildDir, Simulated: true, SimConfig: simConfig, NRI: node.NRIValidates, Containerd: otherContainerd, CRIO: crio})
	if err != nil {
		return err
	}
	shared = n
	return n.Start(ctx)
}

// within returns a context for one test's waits, and shows the daemons' logs
// if the test fails.
func within(t *testing.T) context.Context {
	t.Helper()
	// Not derived from t.Context(), which ends before cleanups that wait.
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("daemons:\n%s", shared.Logs(15))
		}
	})
	return ctx
}

// must ends the test on an error.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// busy is a container that keeps the GPU busy under the given tenant name. It rarely
// waits for its own work, because a tenant without work releases the GPU before its time
// quantum is over.
func busy(tenant string, args ...string) node.ContainerSpec {
	return node.ContainerSpec{
		Args: append([]string{busyProgram, "--kernel-us", "500", "--depth", "400"}, args...),
		Env:  map[string]string{node.TenantEnv: tenant},
	}
}

// busyPod starts a pod of one busy container, annotated for the first GPU. The pod has
// the tenant's name, and is removed at the end of the test.
func busyPod(t *testing.T, name string) *node.Pod {
	t.Helper()
	return startPod(t, name, map[string]string{gpuAnnotation: firstGPU}, busy(name))
}

func startPod(t *testing.T, name string, annotations map[string]string, containers ...node.ContainerSpec) *node.Pod {
	t.Helper()
	return runPod(t, node.PodSpec{Name: name, Annotations: annotations}, containers...)
}

func runPod(t *testing.T, spec node.PodSpec, containers ...node.ContainerSpec) *node.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pod := must(shared.Run(ctx, spec, containers...))(t)
	t.Cleanup(func() { removePod(t, pod) })
	if containers[0].Args[0] == busyProgram {
		// Stop lets the pod's submitted work end before the next test.
		t.Cleanup(func() { check(t, pod.Stop(within(t))) })
	}
	return pod
}

func removePod(t *testing.T, pod *node.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if t.Failed() {
		t.Logf("pod %s printed:\n%s", pod.Name, pod.Log())
	}
	if err := pod.Remove(ctx); err != nil {
		t.Errorf("remove pod %s: %v", pod.Name, err)
	}
}

// client finds the process pid among the clients of any GPU, or nil.
func client(t *testing.T, ctx context.Context, pid int) *api.Client {
	t.Helper()
	for _, gpu := range must(shared.Status(ctx))(t).Gpus {
		for _, c := range gpu.Clients {
			if int(c.Pid) == pid {
				return c
			}
		}
	}
	return nil
}

// awaitClient waits until the scheduler's view of a process satisfies ok.
func awaitClient(t *testing.T, ctx context.Context, what string, pid int, ok func(*api.Client) bool) {
	t.Helper()
	check(t, node.Until(ctx, what, func() error {
		c := client(t, ctx, pid)
		if c == nil {
			return fmt.Errorf("process %d is not a client", pid)
		}
		if !ok(c) {
			return fmt.Errorf("the client is %v", c)
		}
		return nil
	}))
}

func holding(c *api.Client) bool { return c.State == api.ClientState_CLIENT_STATE_HOLDING }
