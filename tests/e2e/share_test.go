//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// turnsEach is how many turns each tenant must get in a test of sharing.
const turnsEach = 5

func TestPodsAndPodmanTakeTurns(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	tenants := []string{"share-a", "share-b"}
	podA, podB := busyPod(t, "share-a"), busyPod(t, "share-b")
	if node.HavePodman() {
		tenants = append(tenants, "share-podman")
		startPodman(t, "share-podman")
	} else {
		t.Log("there is no podman on this machine: pods only")
	}
	for _, tenant := range tenants {
		awaitTurns(t, ctx, tenant, from, 1)
	}
	// How even turns are also depends on the CPU. Package sim measures evenness.
	together := judge.Now()
	for _, tenant := range tenants {
		awaitTurns(t, ctx, tenant, together, turnsEach)
	}
	observe(t, from).noOverlap(t)

	// The plugin tells a scheduler that has just started in its own time.
	for _, pod := range []*node.Pod{podA, podB} {
		awaitClient(t, ctx, "the name of "+pod.Name, pod.PID(), func(c *api.Client) bool {
			return c.Container.GetPod() == pod.Name && c.Container.GetNamespace() == "default" && c.Container.GetName() == "main"
		})
	}
	table := must(shared.Ctl(ctx))(t)
	for _, want := range []string{"share-a", "share-b"} {
		if !strings.Contains(table, want) {
			t.Errorf("nvsharectl does not show %q:\n%s", want, table)
		}
	}
}

// Each GPU is granted by itself: tenants of different GPUs do not wait for each other,
// and each sees its own GPU only.
func TestGPUsAreIndependent(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	for i, name := range []string{"gpu-0", "gpu-1"} {
		startPod(t, name, map[string]string{gpuAnnotation: fmt.Sprintf("nvshare.com/gpu=%d", i)}, busy(name))
	}
	together := judge.Now()
	awaitEvidence(t, ctx, "work on both GPUs", together, func(e *evidence) error {
		return errors.Join(e.hasTurns("gpu-0", 1), e.hasTurns("gpu-1", 1))
	})
	for i, gpu := range observe(t, from).report.GPUs {
		want := fmt.Sprintf("gpu-%d", i)
		if gpu.GPU != judge.UUID(i) || len(gpu.Tenants) != 1 || gpu.Tenants[0].Tenant != want || gpu.Tenants[0].Turns != 1 {
			t.Errorf("%s was used by %+v, want one unbroken turn of %s", gpu.GPU, gpu.Tenants, want)
		}
	}
}

// A program waits for its turn with every kind of work: kernels, graphs and copies in turn.
func TestEveryKindOfWorkTakesTurns(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	names := []string{"mix-a", "mix-b"}
	for _, name := range names {
		startPod(t, name, map[string]string{gpuAnnotation: firstGPU}, busy(name, "--depth", "64", "--mode", "mix"))
	}
	for _, name := range names {
		awaitTurns(t, ctx, name, from, turnsEach)
	}
	observe(t, from).noOverlap(t)
}

func TestAntiThrashOffLetsAllRun(t *testing.T) {
	ctx := within(t)
	busyPod(t, "conc-a")
	busyPod(t, "conc-b")
	must(shared.Ctl(ctx, "-S", "off"))(t)
	from := judge.Now()
	awaitEvidence(t, ctx, "work at the same time", from, func(e *evidence) error {
		if e.report.Overlaps() == 0 {
			return errors.New("none yet")
		}
		return nil
	})
	must(shared.Ctl(ctx, "-S", "on"))(t)
	// From the first turn on, tenants take turns: earlier work has drained by then.
	from = judge.Now()
	awaitTurns(t, ctx, "conc-a", from, 2)
	awaitTurns(t, ctx, "conc-b", from, 2)
	from = judge.Now()
	awaitTurns(t, ctx, "conc-a", from, turnsEach)
	observe(t, from).noOverlap(t)
}

func startPodman(t *testing.T, name string) *node.Container {
	t.Helper()
	return runPodman(t, name, busy(name))
}

// runPodman starts a container of podman on the first GPU, and removes it at the end of the test.
func runPodman(t *testing.T, name string, spec node.ContainerSpec) *node.Container {
	t.Helper()
	ctx := within(t)
	c := must(shared.RunPodman(ctx, name, []string{firstGPU}, spec))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("podman container %s printed:\n%s", name, c.Log())
		}
		if err := shared.RemovePodman(within(t), name); err != nil {
			t.Error(err)
		}
	})
	return c
}

// Programs of an unprivileged user share a GPU through a scheduler of the same user,
// without containers.
func TestUnprivilegedLocalUse(t *testing.T) {
	ctx := within(t)
	local := must(shared.NewLocal("nobody-node"))(t)
	t.Cleanup(func() { check(t, local.Stop()) })
	check(t, local.StartScheduler(ctx))
	from := judge.Now()
	for _, name := range []string{"local-a", "local-b"} {
		must(local.StartProgram(name, "cuda-busy", "--kernel-us", "500"))(t)
	}
	observeLocal := func() *evidence { return observeIn(t, local.SimGPU, from) }
	for _, name := range []string{"local-a", "local-b"} {
		check(t, node.UntilEvery(ctx, readEvery, name+" to take turns", func() error { return observeLocal().hasTurns(name, turnsEach) }))
	}
	observeLocal().noOverlap(t)

	if info := must(os.Stat(filepath.Join(local.RunDir, "control.sock")))(t); info.Mode().Perm() != 0o600 {
		t.Errorf("control.sock has mode %v", info.Mode().Perm())
	}
	out := must(local.Ctl(ctx, "-T", "1"))(t)
	if !strings.Contains(out, "1s") && !strings.Contains(out, "1000") {
		t.Errorf("nvsharectl -T 1 printed %q", out)
	}
}
