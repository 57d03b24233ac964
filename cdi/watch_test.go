// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

const patience = 5 * time.Minute

// Each change is reported by the kernel, in directories that were not there
// when watching began too. Only what this process does to its own directories
// makes events, so that none is waited for in vain.
func TestWatchReportsChanges(t *testing.T) {
	root := fakeHost(t)
	if err := os.RemoveAll(root + "/proc/driver"); err != nil { // nothing there can be watched
		t.Fatal(err)
	}
	o := Options{HostRoot: root}
	extra := filepath.Join(t.TempDir(), "specs")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	changed := Watch(ctx, o, extra)
	for _, step := range []struct {
		name   string
		change func()
		looks  bool // the fingerprint changes
	}{
		{"a device node appears", func() { write(t, root+"/dev/nvidia2", "") }, true},
		{"MIG devices appear", func() { write(t, root+capsDir+"/nvidia-cap1", "") }, true},
		{"another MIG device", func() { write(t, root+capsDir+"/nvidia-cap2", "") }, true},
		{"NVIDIA writes its first spec", func() { write(t, root+"/etc/cdi/nvidia.yaml", "a") }, true},
		{"and another", func() { write(t, root+"/etc/cdi/nvidia.yaml", "bc") }, true},
		{"it is replaced", func() {
			write(t, root+"/new", "def")
			if err := os.Rename(root+"/new", root+"/etc/cdi/nvidia.yaml"); err != nil {
				t.Fatal(err)
			}
		}, true},
		{"it goes, with its directory", func() { os.RemoveAll(root + "/etc/cdi") }, true},
		{"and comes back", func() { write(t, root+"/etc/cdi/nvidia.yaml", "a") }, true},
		{"the driver is updated", func() { write(t, root+"/usr/lib/x86_64-linux-gnu/libcuda.so.999.1", "") }, true},
		{"a driver container starts", func() { write(t, root+"/run/nvidia/driver/usr/lib64/libcuda.so.1.2", "") }, true},
		{"its driver changes", func() { write(t, root+"/run/nvidia/driver/usr/lib64/libcuda.so.1.3", "") }, true},
		{"our spec goes", func() { write(t, extra+"/ours.yaml", "") }, false},
	} {
		before := Fingerprint(o)
		step.change()
		limit := time.After(patience)
	await:
		for {
			select {
			case <-changed:
				if !step.looks || Fingerprint(o) != before {
					break await
				}
			case <-limit:
				t.Fatalf("%s: not reported", step.name)
			}
		}
	}
	cancel()
	for range changed { // ends when the channel is closed
	}
}
