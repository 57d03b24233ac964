//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/kubeapi"
	"github.com/nvshare/nvshare/tests/node"
)

// Annotations that change in the API server reach running containers, also when they
// changed while plugin, scheduler or containerd were away. They also reach containers
// that are started again in a pod whose sandbox has the old annotations.
func TestAnnotationsChangeLive(t *testing.T) {
	ctx := within(t)
	api := kubeapi.New(t)
	config := filepath.Join(t.TempDir(), "kubeconfig")
	api.Kubeconfig(config)
	const name = "live"
	annotate := func(pairs ...string) {
		annotations := map[string]string{gpuAnnotation: firstGPU}
		for i := 0; i < len(pairs); i += 2 {
			annotations[pairs[i]] = pairs[i+1]
		}
		api.Set("uid-"+name, "default", name, annotations)
	}
	annotate(limitAnnotation, "1Gi")
	live := []string{"--kubeconfig", config, "--node-name", kubeapi.Node}
	restartPlugin(t, live...)
	t.Cleanup(func() { restartPlugin(t) })

	pod, first := hogPod(t, name, map[string]string{gpuAnnotation: firstGPU, limitAnnotation: "1Gi"}, 600)
	if first.MiB != 600 || first.Total != 1024 {
		t.Fatalf("the first process: %+v", first)
	}
	holds := func(when string, want int) {
		t.Helper()
		check(t, node.Until(ctx, fmt.Sprintf("a limit of %d MiB %s", want, when), func() error {
			if limit, _ := used(t, ctx, pod); limit != want {
				return fmt.Errorf("the limit is %d MiB", limit)
			}
			return nil
		}))
	}
	annotate(limitAnnotation, "3Gi")
	holds("after kubectl annotate", 3072)
	if h := grab(t, ctx, pod, 2000); h.MiB != 2000 || h.Error != "" || h.Total != 3072 {
		t.Errorf("within the new limit: %+v", h)
	}
	annotate("gpu-memory-limit.nvshare.com/container.main", "512Mi")
	holds("below what is in use", 512)
	if h := grab(t, ctx, pod, 50); h.Error != outOfMemory || h.MiB != 0 {
		t.Errorf("above the new limit: %+v", h)
	}

	// Each daemon is restarted in turn, and the annotation changes meanwhile.
	check(t, shared.Scheduler.Stop())
	annotate(limitAnnotation, "2Gi")
	check(t, shared.StartScheduler(ctx))
	holds("after the scheduler's restart", 2048)
	check(t, shared.Plugin.Stop())
	annotate(limitAnnotation, "4Gi")
	check(t, shared.StartPlugin(ctx, live...))
	holds("after the plugin's restart", 4096)

	// The runtime still has 1Gi for a container that is started again.
	old := pod.Containers[0]
	check(t, unix.Kill(pod.PID(), unix.SIGKILL))
	must(pod.Ended(ctx, old))(t)
	spec := hogs(t, 600)
	spec.Attempt = 1
	pod.Containers = []*node.Container{must(pod.Start(ctx, spec))(t), old}
	holds("in a container that was started again", 4096)

	annotate()
	holds("after the annotation was removed", 0)
	var notes []string
	for len(api.Events) > 0 {
		notes = append(notes, (<-api.Events).Note)
	}
	if all := strings.Join(notes, "\n"); !strings.Contains(all, "memory limit 3Gi (was 1Gi)") || !strings.Contains(all, "in use") {
		t.Errorf("the events are\n%s", all)
	}
}
