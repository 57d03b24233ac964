// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/checkpoint"
)

// withMemory has a tenant allocate that much.
func withMemory(mib int) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) { cmd.Args = append(cmd.Args, "--mem-mib", fmt.Sprint(mib)) }
}

// awaitCuts waits until n more drains were cut.
func (s *site) awaitCuts(n int) {
	s.t.Helper()
	start := time.Now()
	s.until(fmt.Sprintf("%d drains were cut", n), func() error {
		if cut, _ := s.drains(start); len(cut) < n {
			return fmt.Errorf("%d were", len(cut))
		}
		return nil
	})
}

// newSwapping is a site whose scheduler swaps, with some headroom.
func newSwapping(t *testing.T, gpus int, more ...string) *site {
	t.Helper()
	s := newSite(t)
	s.configure(fmt.Sprintf("gpus=%d\nmemory_mib=%d\n", gpus, gpuMiB))
	s.put(checkpoint.Name)
	s.buildTenant("swap-tenant")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.log())
		}
	})
	s.startScheduler(append([]string{"--swap-memory", "1Gi", "--swap-share", "50"}, more...)...)
	s.until("the scheduler swaps", func() error {
		if s.swap() == nil {
			return errors.New("not yet")
		}
		return nil
	})
	return s
}

// With swapping on, drains are cut as without it while all memory fits. A third tenant has more than is left:
// it waits until kernels that were cut before have ended, and then all get on, each with all its memory. When
// all fits again drains are cut again.
func TestCutsWhileAllFits(t *testing.T) {
	t.Parallel()
	s := newSwapping(t, 1)
	long := s.startTenant("long", longKernels(time.Second), withMemory(90))
	short := s.startTenant("short", withMemory(50))
	s.awaitAttached(2)
	s.awaitCuts(5)
	a := s.startSwapTenant("a", tenantMiB, 1000)
	s.awaitSwaps(3)
	s.expectTurns(3, long, short)
	a.finish(s)
	s.tenants = []*tenant{long, short}
	s.awaitCuts(5)
	s.expectAlive()
	s.expectKernelsAlone()
}

// A tenant whose kernels are cut all the time leaves its GPU all the same: for host memory, and for another GPU.
func TestCutWorkLeaves(t *testing.T) {
	t.Parallel()
	s := newSwapping(t, 2)
	a := s.startSwapTenant("a", tenantMiB, 1000, "SWAP_TENANT_WORK_MS=1000")
	s.startTenant("short", withMemory(50))
	s.awaitAttached(2)
	s.awaitCuts(5)
	s.suspend()
	s.until("its memory leaves", func() error { // and comes back with its next grant, for which it asks at once
		c, err := s.client(a.tenant)
		if err == nil && c.SwappedOutBytes == 0 {
			err = errors.New("nothing has")
		}
		return err
	})
	for _, gpu := range []int{1, 0} {
		s.awaitCuts(5)
		if r, err := s.migrates(gpu); err != nil || r.Processes != 2 {
			t.Errorf("to GPU %d: %v, %v", gpu, r, err)
		}
		s.awaitOn(gpu, a)
	}
	a.finish(s)
	s.expectKernelsAlone()
}

// hog is what memory-hog prints.
type hog struct {
	MiB   int
	Error string
}

// memoryHog allocates all that it gets, up to so much.
func (s *site) memoryHog(env []string, args ...string) (h hog) {
	s.t.Helper()
	cmd := exec.Command(filepath.Join(s.dir, "memory-hog"), args...)
	cmd.Env = env
	out, err := cmd.Output()
	s.check(err)
	s.check(json.Unmarshal(out, &h))
	return h
}

// What fits natively fits with swapping on, to the last piece, and what does not fit beside that is refused as natively.
// Managed memory may be more than the GPU has, as natively.
func TestFitsAsNatively(t *testing.T) {
	t.Parallel()
	s := newSwapping(t, 1)
	s.buildTenant("memory-hog")
	native := s.memoryHog(s.env(), "400", "2")
	env := s.env("LD_PRELOAD=" + filepath.Join(s.build, "lib", "libnvshare.so"))
	if ours := s.memoryHog(env, "400", "2"); ours != native || native.MiB < gpuMiB*97/100 {
		t.Errorf("%+v, natively %+v", ours, native)
	}
	held := s.startTalker("held", env, nil, "memory-hog", "--hold", strconv.Itoa(native.MiB), "2")
	if _, err := held.out.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if h := s.memoryHog(env, "100", "2"); h.MiB != 0 || h.Error != native.Error {
		t.Errorf("beside one that has %d MiB: %+v", native.MiB, h)
	}
	for _, e := range [][]string{s.env(), env} {
		if h := s.memoryHog(e, "--managed", "1000", "500"); h.MiB != 1000 || h.Error != "" {
			t.Errorf("managed: %+v", h)
		}
	}
}
