//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// The demo leaves the machine as it was, however the demo ends. Here the test's own node
// is the machine: everything that the demo could leave behind is visible there.
func TestDemoLeavesNothingBehind(t *testing.T) {
	program := filepath.Join(t.TempDir(), "demo")
	if out, err := exec.Command("go", "build", "-o", program, "../demo").CombinedOutput(); err != nil {
		t.Fatalf("build the demo: %v\n%s", err, out)
	}
	for _, tc := range []struct {
		name string
		end  func(t *testing.T, demo *exec.Cmd)
		want int // exit status
	}{
		{"interrupted", func(t *testing.T, demo *exec.Cmd) { check(t, demo.Process.Signal(unix.SIGINT)) }, 130},
		{"killed-inside", func(t *testing.T, demo *exec.Cmd) { check(t, unix.Kill(onlyChild(t, demo.Process.Pid), unix.SIGKILL)) }, 137},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := traces(t)
			demo, wait := startDemo(t, program)
			tc.end(t, demo)
			if got := wait(); got != tc.want {
				t.Errorf("the demo ended with status %d, want %d", got, tc.want)
			}
			compare(t, before, demo)
			if tc.want == 130 {
				noWorkDir(t)
			}
		})
	}
	// With SIGKILL the demo cannot clean up. Its processes end all the same, and the
	// next run removes the rest.
	t.Run("killed-outside", func(t *testing.T) {
		before := traces(t)
		demo, wait := startDemo(t, program)
		check(t, demo.Process.Kill())
		wait()
		next, wait := startDemo(t, program)
		check(t, next.Process.Signal(unix.SIGINT))
		wait()
		compare(t, before, demo, next)
		noWorkDir(t)
	})
}

// noWorkDir checks that the demo's directory is gone. Only after a crash it stays, with
// the logs, until the next run.
func noWorkDir(t *testing.T) {
	t.Helper()
	if left := must(filepath.Glob(filepath.Join(buildDir, "demo-*")))(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// startDemo starts the demo and returns when its tenants run. wait returns
// its exit status.
func startDemo(t *testing.T, program string) (*exec.Cmd, func() int) {
	t.Helper()
	ctx := within(t)
	demo := exec.CommandContext(ctx, program, "--build-dir", buildDir)
	demo.Env = append(os.Environ(), "SIM=1")
	out := must(demo.StdoutPipe())(t)
	demo.Stderr = os.Stderr
	check(t, demo.Start())
	lines := bufio.NewScanner(out)
	var said []string
	running := false
	for !running && lines.Scan() {
		said = append(said, lines.Text())
		running = strings.Contains(lines.Text(), " holds ")
	}
	if !running {
		t.Fatalf("the demo ended early (%v):\n%s", demo.Wait(), strings.Join(said, "\n"))
	}
	return demo, func() int {
		for lines.Scan() {
		}
		_ = demo.Wait()
		ws := demo.ProcessState.Sys().(syscall.WaitStatus)
		if ws.Signaled() {
			return 128 + int(ws.Signal())
		}
		return ws.ExitStatus()
	}
}

func onlyChild(t *testing.T, pid int) int {
	t.Helper()
	var child int
	files := must(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)))(t)
	for _, f := range files {
		_, _ = fmt.Sscan(string(must(os.ReadFile(f))(t)), &child)
	}
	if child == 0 {
		t.Fatalf("process %d has no child", pid)
	}
	return child
}

// traces lists everything that a run could leave behind: processes, namespaces, mounts,
// cgroups, files.
func traces(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	procs := must(filepath.Glob("/proc/[0-9]*"))(t)
	for _, p := range procs {
		comm, err := os.ReadFile(p + "/comm")
		if err != nil {
			continue // the process has ended
		}
		found["process "+filepath.Base(p)+" "+strings.TrimSpace(string(comm))] = true
		for _, ns := range []string{"mnt", "pid", "ipc", "uts", "net", "cgroup"} {
			if link, err := os.Readlink(p + "/ns/" + ns); err == nil {
				found["namespace "+link] = true
			}
		}
	}
	for line := range strings.Lines(string(must(os.ReadFile("/proc/self/mountinfo"))(t))) {
		found["mount "+strings.TrimSpace(line)] = true
	}
	list(found, cgroupRoot, 3)
	list(found, "/run", 6)
	list(found, "/dev/shm", 3)
	for _, dir := range []string{"/etc/cdi", "/etc/cni", "/etc/containers", "/var/lib/cni", "/var/lib/containers"} {
		list(found, dir, 3)
	}
	for _, dir := range []string{"/etc", "/opt", "/var/lib", "/var/tmp", "/root"} {
		list(found, dir, 1)
	}
	return found
}

func list(found map[string]bool, root string, depth int) {
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		rel, _ := filepath.Rel(root, path)
		if rel != "." {
			found["file "+path] = true
			if d.IsDir() && strings.Count(rel, "/")+1 >= depth {
				return fs.SkipDir
			}
		}
		return nil
	})
}

// compare fails the test on each trace that is there now and was not before. A trace
// must stay to count: the machine has other users, and what is killed takes a while to end.
func compare(t *testing.T, before map[string]bool, demos ...*exec.Cmd) {
	t.Helper()
	var extra []string
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		extra = nil
		for trace := range traces(t) {
			if !before[trace] && !ofAnotherNode(trace, demos) {
				extra = append(extra, trace)
			}
		}
		if extra == nil || time.Now().After(deadline) {
			break
		}
	}
	sort.Strings(extra)
	for _, trace := range extra {
		t.Errorf("left behind: %s", trace)
	}
}

// ofAnotherNode tells whether a trace is a cgroup of another demo or test that runs on
// the machine: all have their cgroups in the same hierarchies.
func ofAnotherNode(trace string, demos []*exec.Cmd) bool {
	if !strings.HasPrefix(trace, "file "+cgroupRoot+"/") || !strings.Contains(trace, "/nvshare-") {
		return false
	}
	for _, demo := range demos {
		if strings.Contains(trace+"/", fmt.Sprintf("/nvshare-demo-%d/", demo.Process.Pid)) {
			return false
		}
	}
	return true
}
