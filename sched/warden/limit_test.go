// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/warden/order"
)

// The kernel is told the memory limit of a container, and of a user's sessions, and of nobody else.
func TestLimitMemory(t *testing.T) {
	root, id := t.TempDir(), strings.Repeat("c", idLength)
	put := func(path, text string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("proc/self/mountinfo", "2 0 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	put("proc/7/cgroup", "0::/machine.slice/docker-"+id+".scope\n")
	put("proc/8/cgroup", "0::/user.slice/user-1000.slice/session-3.scope\n")
	put("proc/9/cgroup", "0::/system.slice/train.service\n")
	o := order.Order{Op: order.Limit, PID: 7, Container: id, GPU: []string{"0000:9b:00.0", "GPU-1"}, Bytes: 1 << 30}
	if err := limitMemory(root, o); err == nil || err.Error() != order.NoRegion {
		t.Errorf("a kernel without the controller: %v", err)
	}
	put("sys/fs/cgroup/dmem.capacity", "nvidia/0000:9b:00.0/fb 85899345920\n")
	container, user := "sys/fs/cgroup/machine.slice/docker-"+id+".scope/dmem.max", "sys/fs/cgroup/user.slice/user-1000.slice/dmem.max"
	put(container, "")
	put(user, "")
	put("sys/fs/cgroup/system.slice/train.service/dmem.max", "")
	for _, o := range []order.Order{o, {Op: order.Limit, PID: 8, UID: 1000, GPU: o.GPU, Bytes: 2 << 30}} {
		if err := limitMemory(root, o); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
	}
	for file, want := range map[string]string{container: "nvidia/0000:9b:00.0/fb 3221225472", user: "nvidia/0000:9b:00.0/fb 4294967296"} {
		if text, _ := os.ReadFile(filepath.Join(root, file)); string(text) != want {
			t.Errorf("%s: %q, want %q", file, text, want)
		}
	}
	if err := limitMemory(root, order.Order{Op: order.Limit, PID: 9, UID: 1000, GPU: o.GPU, Bytes: 1 << 30}); err == nil {
		t.Error("a cgroup was limited in which other users' processes may be")
	}
}
