// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// Where the kernel names a container's GPUs, it is told the memory limit, and nowhere else.
func TestKernelHoldsMemoryLimits(t *testing.T) {
	root := t.TempDir()
	put := func(path, text string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	gpus := []cdi.GPU{{UUID: "GPU-a", PCIBusID: "0000:17:00.0"}, {UUID: "GPU-b", PCIBusID: "0000:9b:00.0"}, {UUID: "GPU-c", PCIBusID: "0000:9c:00.0"}}
	limit := func(c Container) string {
		p := New(quiet(), NewContainers(quiet()))
		p.root = root
		inv := NewInventory(nil, gpus)
		p.SetInventory(inv)
		return limitByKernel(nil, inv, c).GetLinux().GetResources().GetUnified()["dmem.max"]
	}
	c := Container{GPUs: []string{"GPU-a", "GPU-b"}, Terms: sched.Terms{MemoryLimit: 1 << 30}}
	if got := limit(c); got != "" {
		t.Errorf("without cgroups of version 2: %q", got)
	}
	put("proc/self/mountinfo", "2 0 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	if got := limit(c); got != "" {
		t.Errorf("a kernel without the controller: %q", got)
	}
	put("sys/fs/cgroup/dmem.capacity", "nvidia/0000:17:00.0/fb 85899345920\nnvidia/0000:9b:00.0/fb 85899345920\nnvidia/0000:9c:00.0/fb 85899345920\n")
	if got := limit(c); got != "nvidia/0000:17:00.0/fb 3221225472\nnvidia/0000:9b:00.0/fb 3221225472" {
		t.Errorf("dmem.max: %q", got)
	}
	if got := limit(Container{GPUs: []string{"GPU-a"}}); got != "" {
		t.Errorf("without a limit: %q", got)
	}
}
