// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A container's cgroup is found from a process in one below it, and the kernel is told its limit.
func TestTree(t *testing.T) {
	root := t.TempDir()
	id := strings.Repeat("c", 64)
	put(t, root+"/proc/self/mountinfo", "1 0 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n2 0 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	put(t, root+"/proc/7/cgroup", "1:cpu:/x\n0::/kubepods.slice/cri-containerd-"+id+".scope/inner\n")
	put(t, root+"/proc/8/cgroup", "0::/../../"+id+"\n")
	put(t, root+"/proc/10/cgroup", "0::/user.slice/user-1000.slice/session-1.scope\n")
	put(t, root+"/sys/fs/cgroup/dmem.capacity", "drm/0000:03:00.0/vram0 8589934592\nnvidia/0000:9B:00.0/fb 85899345920\n")
	is := root + "/sys/fs/cgroup/kubepods.slice/cri-containerd-" + id + ".scope"
	put(t, is+"/dmem.max", "nvidia/0000:9B:00.0/fb max")
	tree, err := Find(root)
	if err != nil {
		t.Fatal(err)
	}
	if dir, err := tree.Of(7, id); err != nil || dir != is {
		t.Errorf("%q, %v", dir, err)
	}
	for pid, part := range map[int]string{7: strings.Repeat("d", 64), 8: id, 9: id} {
		if dir, err := tree.Of(pid, part); err == nil {
			t.Errorf("process %d is in %q", pid, dir)
		}
	}
	for _, part := range []string{"user", "user-100", "1000.slice", "1"} {
		if dir, err := tree.Of(10, part); err == nil {
			t.Errorf("%s is in %q", part, dir)
		}
	}
	if dir, err := tree.Of(10, "user-1000.slice"); err != nil || dir != root+"/sys/fs/cgroup/user.slice/user-1000.slice" {
		t.Errorf("%q, %v", dir, err)
	}
	if dir, err := tree.Of(7, ""); err == nil {
		t.Errorf("every cgroup is one without a name: %q", dir)
	}
	region := tree.Region("0000:9b:00.0", "GPU-1")
	if region != "nvidia/0000:9B:00.0/fb" || tree.Region("0000:9c:00.0", "") != "" {
		t.Errorf("region %q", region)
	}
	if err := Limit(is, Max(region, 1<<30)); err != nil {
		t.Error(err)
	}
	if text, _ := os.ReadFile(is + "/dmem.max"); string(text) != "nvidia/0000:9B:00.0/fb 3221225472" {
		t.Errorf("dmem.max: %q", text)
	}
	if Max(region, 0) != region+" max" {
		t.Error(Max(region, 0))
	}
	if err := Limit(root, "x"); err == nil {
		t.Error("a file was made that the kernel does not have")
	}
}

// The host memory of a process is bounded by its cgroup and all above that: the least limit, and the least that is left.
func TestMemory(t *testing.T) {
	root := t.TempDir()
	put(t, root+"/proc/self/cgroup", "1:cpu:/x\n0::/a.slice/b.slice/c.scope\n")
	put(t, root+"/proc/8/cgroup", "1:memory:/x\n")
	put(t, root+"/proc/9/cgroup", "0::/\n")
	put(t, root+"/sys/fs/cgroup/a.slice/memory.max", "1000\n")
	put(t, root+"/sys/fs/cgroup/a.slice/memory.current", "950\n")
	put(t, root+"/sys/fs/cgroup/a.slice/memory.stat", "anon 7\ninactive_file 50\nactive_file 8\n")
	put(t, root+"/sys/fs/cgroup/a.slice/b.slice/memory.max", "800\n")
	put(t, root+"/sys/fs/cgroup/a.slice/b.slice/memory.current", "100\n")
	put(t, root+"/sys/fs/cgroup/a.slice/b.slice/c.scope/memory.max", "max\n")
	put(t, root+"/sys/fs/cgroup/a.slice/b.slice/c.scope/memory.current", "100\n")
	if limit, left, ok := Memory(root, "self"); !ok || limit != 800 || left != 100 {
		t.Errorf("limit %d, %d left, %v", limit, left, ok)
	}
	put(t, root+"/sys/fs/cgroup/a.slice/memory.current", "1100\n") // the limit was lowered
	if _, left, _ := Memory(root, "self"); left != 0 {
		t.Errorf("%d left of less than nothing", left)
	}
	for _, pid := range []string{"8", "9", "10"} {
		if limit, _, ok := Memory(root, pid); ok {
			t.Errorf("process %s has a limit of %d", pid, limit)
		}
	}
	put(t, root+"/proc/7/cgroup", "4:cpu,memory:/y/z\n0::/y\n")
	put(t, root+"/sys/fs/cgroup/memory/y/z/memory.limit_in_bytes", "9223372036854771712\n") // none, in a cgroup v1
	put(t, root+"/sys/fs/cgroup/memory/y/memory.limit_in_bytes", "600\n")
	put(t, root+"/sys/fs/cgroup/memory/y/memory.usage_in_bytes", "500\n")
	put(t, root+"/sys/fs/cgroup/memory/y/memory.stat", "inactive_file 1\ntotal_inactive_file 100\n")
	if limit, left, ok := Memory(root, "7"); !ok || limit != 600 || left != 200 {
		t.Errorf("cgroup v1: limit %d, %d left, %v", limit, left, ok)
	}
	put(t, root+"/sys/fs/cgroup/memory.max", "700\n") // as a container sees its own
	if limit, _, ok := Memory(root, "9"); !ok || limit != 700 {
		t.Errorf("limit %d, %v", limit, ok)
	}
}
