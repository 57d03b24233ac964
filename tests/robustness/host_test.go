// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/cgroup"
)

// memoryGroup is a cgroup with so much memory, and of the version that has the controller here.
type memoryGroup struct {
	dir, limit, kills string // kills: the file that counts processes killed when memory was short
}

// newMemoryGroup comes before the site, whose processes are in it until the site ends.
func newMemoryGroup(t *testing.T, bytes int64) *memoryGroup {
	t.Helper()
	g := &memoryGroup{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"}
	if _, err := os.Stat(g.dir); err != nil {
		g = &memoryGroup{"/sys/fs/cgroup", "memory.max", "memory.events"}
	}
	g.dir = filepath.Join(g.dir, fmt.Sprintf("nvshare-robustness-%d", os.Getpid()))
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		t.Skipf("no cgroup can be made: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Rmdir(g.dir); err != nil {
			t.Errorf("the cgroup is not empty: %v", err)
		}
	})
	if err := os.WriteFile(filepath.Join(g.dir, g.limit), []byte(fmt.Sprint(bytes)), 0); err != nil {
		t.Skipf("no cgroup can have a memory limit: %v", err)
	}
	return g
}

// run has a command run in the cgroup from its beginning.
func (g *memoryGroup) run(cmd *exec.Cmd) {
	cmd.Args = append([]string{"sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(g.dir, "cgroup.procs"), cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
}

// expectNoKills fails if the kernel has killed somebody in the cgroup.
func (g *memoryGroup) expectNoKills(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(g.dir, g.kills))
	if err != nil || !strings.Contains("\n"+string(text), "\noom_kill 0\n") {
		t.Errorf("the kernel has killed somebody, as memory was short: %s, %v", text, err)
	}
}

// hog takes memory of the cgroup until so much of the limit is left.
func (s *site) hog(g *memoryGroup, left uint64) {
	s.t.Helper()
	_, has, limited := cgroup.Memory("/", strconv.Itoa(s.scheduler.Process.Pid))
	if !limited || has < left {
		s.t.Fatalf("%d bytes are left to the scheduler's cgroup", has)
	}
	fd, err := unix.MemfdCreate("hog", unix.MFD_CLOEXEC)
	s.check(err)
	memory := os.NewFile(uintptr(fd), "hog")
	s.t.Cleanup(func() { memory.Close() })
	cmd := exec.Command("head", "-c", fmt.Sprint(has-left), "/dev/zero") // who writes it, its cgroup has it
	cmd.Stdout = memory
	g.run(cmd)
	s.check(cmd.Run())
}

// On the defaults, in a cgroup of 2 GiB, the scheduler takes no host memory before it is needed, and then leaves
// some: with a memory hog beside it more is refused as without swapping, tenants go on, and the kernel kills nobody.
func TestMemoryHogBeside(t *testing.T) {
	t.Parallel()
	g := newMemoryGroup(t, 2<<30)
	s := newSite(t)
	s.configure(fmt.Sprintf("gpus=1\nmemory_mib=%d\n", gpuMiB))
	s.buildTenant("swap-tenant")
	s.buildTenant("memory-hog")
	s.cgroup = g
	s.startScheduler("--swap-share", "50")
	s.until("the scheduler swaps", func() error {
		r, err := s.status()
		if err == nil && (r.Gpus[0].Swap == nil || r.Gpus[0].Swap.ArenaLimitBytes > 1<<30 || r.Gpus[0].Swap.ArenaUsedBytes != 0 || len(r.Problems) != 0) {
			err = fmt.Errorf("%v, problems %v", r.Gpus[0].Swap, r.Problems)
		}
		return err
	})
	a, b := s.startSwapTenant("a", tenantMiB, 1000), s.startSwapTenant("b", tenantMiB, 2000)
	s.until("both have all their memory, some of it on the host", func() error {
		if u := s.swap(); u == nil || u.PromisedBytes < 2*tenantMiB<<20 || u.ArenaUsedBytes < (2*tenantMiB-gpuMiB)<<20 {
			return fmt.Errorf("%v", u)
		}
		return nil
	})
	s.awaitSwaps(2)
	s.hog(g, 600<<20)
	if h := s.memoryHog(s.env("LD_PRELOAD="+filepath.Join(s.build, "lib", "libnvshare.so")), "300", "2"); h.MiB > 100 || h.Error != "CUDA_ERROR_OUT_OF_MEMORY" {
		t.Errorf("beside the hog: %+v", h)
	}
	s.hog(g, 50<<20)
	s.awaitSwaps(2)
	a.finish(s)
	b.finish(s)
	g.expectNoKills(t)
	s.expectKernelsAlone()
}
