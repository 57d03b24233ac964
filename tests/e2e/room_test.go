//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// Half of each GPU is promised, and a pod asks for more than half: a container that may
// move goes to the other GPU, and the pod is admitted when it is created again, as the
// kubelet does. The container that moves works on.
func TestMoveMakesRoom(t *testing.T) {
	ctx := within(t)
	check(t, shared.Scheduler.Stop())
	check(t, shared.StartScheduler(ctx, "--swap-memory", "1Gi"))
	t.Cleanup(func() {
		check(t, shared.Scheduler.Stop())
		check(t, shared.StartScheduler(within(t)))
	})
	runPod(t, node.PodSpec{Name: "moves", HostPID: true, Annotations: map[string]string{
		gpuAnnotation: firstGPU, "nvshare.com/gpu-migratable": "true", coreRequestAnnotation: "50",
	}}, busy("moves"))
	startPod(t, "stays", map[string]string{gpuAnnotation: "nvshare.com/gpu=1", coreRequestAnnotation: "50"}, busy("stays"))
	start := judge.Now()
	awaitTurns(t, ctx, "moves", start, 1)
	awaitTurns(t, ctx, "stays", start, 1)

	half := map[string]string{gpuAnnotation: "1", coreRequestAnnotation: "60"}
	_, err := shared.RunPod(ctx, "big", half, busy("big"))
	if want := fmt.Sprintf("default/moves/main moves from GPU 0 (%s) to GPU 1 (%s) to make room: try again", judge.UUID(0), judge.UUID(1)); err == nil || !strings.Contains(unescaped(err.Error()), want) {
		t.Fatalf("the error lacks %q: %v", want, err)
	}
	var big *node.Pod
	for end := time.Now().Add(patience); big == nil; time.Sleep(100 * time.Millisecond) {
		if big, err = shared.RunPod(ctx, "big", half, busy("big")); err != nil && time.Now().After(end) {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { removePod(t, big) })
	if got := given(t, big.Containers[0]); got != "0" {
		t.Errorf("big is on GPU %q", got)
	}
	start = judge.Now()
	for name, turns := range map[string]int{"big": 1, "stays": 2, "moves": 2} { // big is alone
		awaitTurns(t, ctx, name, start, turns)
	}
	r := must(shared.Status(ctx))(t)
	on := map[string]uint32{}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			on[c.Container.GetPod()] = g.Index
		}
	}
	if on["moves"] != 1 || on["stays"] != 1 || on["big"] != 0 {
		t.Errorf("%v: %q", on, r.Problems)
	}
	check(t, big.Stop(ctx))
}
