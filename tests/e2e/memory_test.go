//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
)

const (
	limitAnnotation = "nvshare.com/gpu-memory-limit"
	outOfMemory     = "CUDA_ERROR_OUT_OF_MEMORY"

	hogDir = "/hog" // in containers
)

// hog is what memory-hog prints.
type hog struct {
	MiB   int    `json:"mib"`
	Error string `json:"error"`
	Free  int    `json:"free_mib"`
	Total int    `json:"total_mib"`
}

// hogs builds memory-hog and returns a container that has the program and holds the
// given amount of memory.
func hogs(t *testing.T, mib int) node.ContainerSpec {
	t.Helper()
	dir := t.TempDir()
	libcuda := filepath.Join(buildDir, "simgpu", "libcuda.so.1")
	cc := exec.Command("cc", "-std=c11", "-D_GNU_SOURCE", "-I../simgpu", "-o", filepath.Join(dir, "memory-hog"), "../workload/memory-hog.c", libcuda)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("build memory-hog: %v\n%s", err, out)
	}
	return node.ContainerSpec{
		Args:   []string{hogDir + "/memory-hog", "--hold", strconv.Itoa(mib), "50"},
		Mounts: []node.Mount{{Host: dir, Container: hogDir}},
	}
}

// hogPod starts a pod that holds memory, and returns the pod and the memory that it got.
func hogPod(t *testing.T, name string, annotations map[string]string, mib int) (*node.Pod, hog) {
	t.Helper()
	pod := startPod(t, name, annotations, hogs(t, mib))
	var h hog
	check(t, node.Until(within(t), "the report of "+name, func() error { return json.Unmarshal([]byte(pod.Log()), &h) }))
	return pod, h
}

// grab runs one more process in the pod's container. The process allocates up to the
// given amount of memory, and ends.
func grab(t *testing.T, ctx context.Context, pod *node.Pod, mib int) (h hog) {
	t.Helper()
	out, err := pod.Exec(ctx, hogDir+"/memory-hog", strconv.Itoa(mib), "50")
	if err == nil {
		err = json.Unmarshal([]byte(out), &h)
	}
	if err != nil {
		t.Fatalf("one more process in pod %s: %v\n%s", pod.Name, err, out)
	}
	return h
}

// used returns the pod's memory on the first GPU by the scheduler's account, in MiB.
func used(t *testing.T, ctx context.Context, pod *node.Pod) (limit, used int) {
	t.Helper()
	for _, m := range must(shared.Status(ctx))(t).Gpus[0].Memory {
		if m.Container.GetId() == pod.Containers[0].ID {
			return int(m.LimitBytes >> 20), int(m.UsedBytes >> 20)
		}
	}
	return 0, 0
}

// awaitUsed waits until the memory of processes that have ended is free again.
func awaitUsed(t *testing.T, ctx context.Context, pod *node.Pod, most int) {
	t.Helper()
	check(t, node.Until(ctx, "the memory of dead processes to be returned", func() error {
		if _, n := used(t, ctx, pod); n > most {
			return fmt.Errorf("%d MiB are in use, expected %d at most", n, most)
		}
		return nil
	}))
}

// A container's memory limit holds for all its processes together. They see the limit as
// the GPU's size; it can be changed while they run, and it outlives the scheduler.
func TestMemoryLimitIsShared(t *testing.T) {
	ctx := within(t)
	pod, first := hogPod(t, "hog-limited", map[string]string{gpuAnnotation: firstGPU, limitAnnotation: "1Gi"}, 600)
	if first.MiB != 600 || first.Error != "" || first.Total != 1024 || first.Free > 1024-600 {
		t.Fatalf("the first process: %+v", first)
	}
	limit, most := used(t, ctx, pod)
	if limit != 1024 || most < 600 || most > 1024 {
		t.Errorf("the scheduler has %d of %d MiB", most, limit)
	}
	over := func(id string, room int) {
		t.Helper()
		h := grab(t, ctx, pod, 2048)
		if h.Error != outOfMemory || h.MiB > room || h.MiB < room-200 || h.Free >= 50+64 {
			t.Errorf("%s: %+v, there is room for %d MiB", id, h, room)
		}
		awaitUsed(t, ctx, pod, most)
	}
	over("second", 1024-600)
	over("third", 1024-600) // the second process's memory is free again
	if h := grab(t, ctx, pod, 200); h.Error != "" || h.MiB != 200 {
		t.Errorf("within the limit: %+v", h)
	}
	awaitUsed(t, ctx, pod, most)

	neighbour, h := hogPod(t, "hog-free", map[string]string{gpuAnnotation: firstGPU}, 3000)
	if h.MiB != 3000 || h.Error != "" || h.Total < 16000 {
		t.Errorf("the pod without a limit: %+v", h)
	}
	if limit, _ := used(t, ctx, neighbour); limit != 0 {
		t.Errorf("its limit is %d MiB", limit)
	}

	name := "default/" + pod.Name + "/main"
	out := must(shared.Ctl(ctx, "set", "--container", name, "--memory-limit", "2Gi", "--gpu", "0"))(t)
	if want := name + ": memory limit 1Gi → 2Gi"; !strings.Contains(out, want) {
		t.Errorf("set prints %q, want %q", out, want)
	}
	over("raised", 2048-600)
	restartScheduler(t)
	awaitUsed(t, ctx, pod, most) // the first process has attached again when the scheduler knows its memory
	check(t, node.Until(ctx, "the first process to be back", func() error {
		if limit, n := used(t, ctx, pod); limit != 2048 || n < 600 {
			return fmt.Errorf("the scheduler has %d of %d MiB", n, limit)
		}
		return nil
	}))
	over("after-the-restart", 2048-600)

	// With a limit below the use, allocations fail and the status says so. The container
	// is named by ID, because a new scheduler does not know its name at once.
	id := pod.Containers[0].ID[:20]
	out = must(shared.Ctl(ctx, "set", "--container", id, "--memory-limit", "512Mi"))(t)
	if !strings.Contains(out, "2Gi → 512Mi; 6") {
		t.Errorf("set prints %q", out)
	}
	if h := grab(t, ctx, pod, 50); h.Error != outOfMemory || h.MiB != 0 {
		t.Errorf("over the limit: %+v", h)
	}
	problems := strings.Join(must(shared.Status(ctx))(t).Problems, "\n")
	if !strings.Contains(problems, "over its limit of 512 MiB") {
		t.Errorf("problems: %q", problems)
	}
	if running, err := pod.Running(ctx); err != nil || !running {
		t.Errorf("the first process runs: %v, %v", running, err)
	}
	must(shared.Ctl(ctx, "set", "--container", id, "--memory-limit", "none"))(t)
	if limit, _ := used(t, ctx, pod); limit != 1024 {
		t.Errorf("with the annotation alone the limit is %d MiB", limit)
	}
}
