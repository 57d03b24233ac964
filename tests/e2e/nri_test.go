//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// requires is the annotation with which containerd's validator refuses containers while
// nvshare's plugin is not registered.
const requires = "required-plugins.noderesource.dev"

func restartPlugin(t *testing.T, args ...string) {
	t.Helper()
	check(t, shared.Plugin.Stop())
	check(t, shared.StartPlugin(within(t), args...))
}

// pluginSays waits for a line of the plugin's log that contains all these parts.
func pluginSays(t *testing.T, parts ...string) {
	t.Helper()
	check(t, node.Until(within(t), fmt.Sprintf("the plugin to say %q", parts), func() error {
		text := string(must(os.ReadFile(shared.Plugin.Log))(t))
		for line := range strings.Lines(text) {
			line = unescaped(line)
			all := true
			for _, part := range parts {
				all = all && strings.Contains(line, part)
			}
			if all {
				return nil
			}
		}
		return fmt.Errorf("the end of its log is\n%s", shared.Plugin.Tail(5))
	}))
}

// While no plugin is registered, a pod that requires the plugin is refused, and a pod
// that does not starts without a GPU. When the plugin is back, it reports that pod, and
// stops it if told to. Its container has the GPU when it is started again.
func TestFailClosed(t *testing.T) {
	ctx := within(t)
	closed := map[string]string{gpuAnnotation: firstGPU, requires: `["nvshare"]`}
	if pod := startPod(t, "closed-served", closed, sleeper("main", nil)); !adjusted(t, pod.Containers[0]) {
		t.Error("a pod that requires the plugin is not adjusted although it is there")
	}

	check(t, shared.Plugin.Stop())
	back := false
	defer func() {
		if !back {
			check(t, shared.StartPlugin(within(t)))
		}
	}()
	// containerd has the validator from 2.2 on. Before, there is only the audit.
	refuses := otherContainerd == ""
	for name, annotations := range map[string]map[string]string{
		"closed-pod":       closed,
		"closed-container": {gpuAnnotation: firstGPU, requires + "/container.main": `["nvshare"]`},
	} {
		if pod, err := shared.RunPod(ctx, name, annotations, sleeper("main", nil)); err == nil {
			removePod(t, pod)
			if refuses {
				t.Errorf("%s was started without the plugin that it requires", name)
			}
		} else if !strings.Contains(err.Error(), "nvshare") || !strings.Contains(err.Error(), "required plugin") {
			t.Errorf("%s is refused with %v", name, err)
		}
	}
	missed := runPod(t, node.PodSpec{Name: "open-missed", Annotations: map[string]string{gpuAnnotation: firstGPU}, SharedPIDs: true}, sleeper("main", nil), sleeper("second", nil))
	spared := startPod(t, "open-spared", nil, sleeper("main", nil))
	if adjusted(t, missed.Containers[0]) {
		t.Fatal("the container is adjusted by nobody")
	}

	check(t, shared.StartPlugin(ctx, "--audit", "report"))
	back = true
	for _, c := range []string{`"main"`, `"second"`} {
		pluginSays(t, "pod default/open-missed, container "+c, "runs without nvshare", firstGPU)
	}
	if running, err := missed.Running(ctx); err != nil || !running {
		t.Errorf("only reported, it runs: %v, %v", running, err)
	}

	restartPlugin(t)
	for _, c := range missed.Containers {
		must(missed.Ended(ctx, c))(t)
	}
	if running, err := spared.Running(ctx); err != nil || !running {
		t.Errorf("a pod that did not ask runs: %v, %v", running, err)
	}
	again := sleeper("main", nil)
	again.Attempt = 1
	if c := must(missed.Start(ctx, again))(t); !adjusted(t, c) {
		t.Error("started again, it is still without the shim")
	}
}

// described waits until the scheduler knows exactly these containers of a pod,
// by name, and their memory limits.
func described(t *testing.T, ctx context.Context, pod string, want map[string]uint64) {
	t.Helper()
	check(t, node.Until(ctx, "the scheduler's view of "+pod, func() error {
		got := map[string]uint64{}
		for _, c := range must(shared.Status(ctx))(t).Containers {
			if c.Pod == pod {
				got[c.Name] = c.MemoryLimitBytes
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("the scheduler has %v, want %v", got, want)
		}
		return nil
	}))
}

// A pod has several containers: an init container, two with limits of their own, one
// without a request, one that is added while the pod runs, and one that is killed and
// started again.
func TestContainersOfAPod(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	const mib = 1 << 20
	initial := busy("pod-init", "--seconds", "0.3")
	initial.Name = "init"
	pod := runPod(t, node.PodSpec{Name: "several", SharedPIDs: true, Annotations: map[string]string{
		"gpu.nvshare.com/container.init":               firstGPU,
		"gpu.nvshare.com/container.train":              firstGPU,
		"gpu-memory-limit.nvshare.com/container.train": "2Gi",
		"gpu.nvshare.com/container.eval":               firstGPU,
		"gpu-memory-limit.nvshare.com/container.eval":  "512",
		"gpu.nvshare.com/container.debug":              firstGPU,
	}}, initial)
	if status, err := pod.Ended(ctx, pod.Containers[0]); err != nil || status != 0 {
		t.Fatalf("the init container ended with %d, %v: %s", status, err, pod.Containers[0].Log())
	}
	described(t, ctx, "several", map[string]uint64{}) // the kubelet removes the init container later

	start := func(name string, attempt int) *node.Container {
		t.Helper()
		spec := busy("pod-" + name + strconv.Itoa(attempt))
		spec.Name, spec.Attempt = name, attempt
		return must(pod.Start(ctx, spec))(t)
	}
	train, eval := start("train", 0), start("eval", 0)
	plain := must(pod.Start(ctx, sleeper("sidecar", nil)))(t)
	if adjusted(t, plain) {
		t.Error("the container that asks for nothing is adjusted")
	}
	described(t, ctx, "several", map[string]uint64{"train": 2048 * mib, "eval": 512 * mib})
	for _, tenant := range []string{"pod-init", "pod-train0", "pod-eval0"} {
		awaitTurns(t, ctx, tenant, from, 1)
	}
	start("debug", 0) // as an ephemeral container
	awaitTurns(t, ctx, "pod-debug0", from, 1)
	limits := map[string]uint64{"train": 2048 * mib, "eval": 512 * mib, "debug": 0}
	described(t, ctx, "several", limits)

	check(t, unix.Kill(train.PID, unix.SIGKILL))
	must(pod.Ended(ctx, train))(t)
	again := start("train", 1)
	awaitTurns(t, ctx, "pod-train1", from, 1)
	described(t, ctx, "several", limits)
	awaitClient(t, ctx, "its name", again.PID, func(c *api.Client) bool {
		return c.Container.GetName() == "train" && c.Container.GetId() == again.ID
	})
	if c := client(t, ctx, eval.PID); c == nil || c.Container.GetName() != "eval" {
		t.Errorf("container eval is client %v", c)
	}
	observe(t, from).noOverlap(t)
}

// leaves counts the things that pods could leave behind on a node.
func leaves(t *testing.T) map[string]int {
	t.Helper()
	count := map[string]int{}
	for line := range strings.Lines(string(must(os.ReadFile("/proc/self/mountinfo"))(t))) {
		if strings.Contains(line, "nvshare") || strings.Contains(line, "containerd") {
			count["mounts"]++
		}
	}
	for name, pattern := range map[string]string{
		"cgroups":    cgroupRoot + "/*" + shared.CgroupParent() + "/*",
		"cgroups v2": cgroupRoot + shared.CgroupParent() + "/*",
		"files":      "/run/nvshare/*/*",
		"specs":      "/run/cdi/*",
		"host files": "/run/nvshare-host/*/*",
		"tasks":      "/run/containerd/io.containerd.runtime.v2.task/k8s.io/*",
		// Network namespaces.
		"networks": "/run/netns/*",
	} {
		count[name] = len(must(filepath.Glob(pattern))(t))
	}
	for name, p := range map[string]*node.Process{"plugin": shared.Plugin, "scheduler": shared.Scheduler} {
		count[name+"'s descriptors"] = len(must(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID())))(t))
	}
	return count
}

// Pods that come and go leave nothing behind: 10 pods here, on a real containerd; 500 in
// the plugin's own test, and a job's in TestCluster.
func TestChurn(t *testing.T) {
	ctx := within(t)
	churn := func(from, to int) {
		for i := from; i < to; i++ {
			name := fmt.Sprintf("churn-%d", i)
			pod := must(shared.RunPod(ctx, name, map[string]string{gpuAnnotation: firstGPU, "nvshare.com/gpu-core-request": "40"},
				sleeper("main", nil)))(t)
			if i%3 == 0 { // a refused container leaves nothing behind either
				if _, err := pod.Start(ctx, sleeper("main", map[string]string{"again": "1"})); err == nil {
					t.Error("two containers of one name")
				}
			}
			if i%2 == 0 {
				check(t, unix.Kill(pod.PID(), unix.SIGKILL)) // the process ends without the runtime
			}
			// When a container has just ended, containerd may fail with "ttrpc:
			// closed" (seen with 1.7). The kubelet tries again too.
			check(t, node.Until(ctx, name+" to be removed", func() error { return pod.Remove(ctx) }))
		}
	}
	churn(0, 4) // opens files that stay open
	before := leaves(t)
	churn(4, 10)
	check(t, node.Until(ctx, "nothing to be left", func() error {
		for _, c := range must(shared.Status(ctx))(t).Containers {
			if strings.HasPrefix(c.Pod, "churn-") {
				return fmt.Errorf("the scheduler knows %v", c)
			}
		}
		for name, n := range leaves(t) {
			if n > before[name] {
				return fmt.Errorf("%d %s, before there were %d", n, name, before[name])
			}
		}
		return nil
	}))
}
