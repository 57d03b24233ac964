// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

func TestKernelMessages(t *testing.T) {
	for text, want := range map[string]bool{
		"add@/module/nvidia\x00ACTION=add\x00DEVPATH=/module/nvidia\x00SUBSYSTEM=module\x00SEQNUM=1\x00":         true,
		"remove@/module/nvidia_uvm\x00ACTION=remove\x00DEVPATH=/module/nvidia_uvm\x00SUBSYSTEM=module\x00":       true,
		"add@/module/ext4\x00ACTION=add\x00DEVPATH=/module/ext4\x00SUBSYSTEM=module\x00":                         false,
		"bind@/devices/pci0000:00/0000:00:05.0\x00ACTION=bind\x00SUBSYSTEM=pci\x00DRIVER=nvidia\x00":             true,
		"unbind@/devices/pci0000:00/0000:00:05.0\x00ACTION=unbind\x00SUBSYSTEM=pci\x00":                          true,
		"bind@/devices/pci0000:00/0000:00:06.0\x00ACTION=bind\x00SUBSYSTEM=pci\x00DRIVER=virtio-pci\x00":         false,
		"add@/devices/virtual/net/veth1\x00ACTION=add\x00SUBSYSTEM=net\x00INTERFACE=nvidia\x00":                  false,
		"add@/devices/pci0000:00/0000:00:05.0/drm/card0\x00ACTION=add\x00SUBSYSTEM=drm\x00DEVNAME=dri/card0\x00": true,
		"":                       false,
		"\x00\x00=\x00SUBSYSTEM": false,
	} {
		if got := concernsGPUs([]byte(text)); got != want {
			t.Errorf("%q concerns GPUs: %v", text, got)
		}
	}
}

// The kernel is asked to announce a device again, as udevadm trigger does.
func TestKernelMessagesArrive(t *testing.T) {
	if ids, err := os.ReadFile("/proc/self/uid_map"); err != nil || !slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"}) {
		t.Skip("in a user namespace the kernel announces nothing")
	}
	const trigger = "/sys/devices/virtual/mem/null/uevent"
	if f, err := os.OpenFile(trigger, os.O_WRONLY, 0); err != nil {
		t.Skip("needs root and a writable /sys: ", err)
	} else {
		f.Close()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	events, messages := make(chan struct{}, 1), make(chan string, 100)
	if err := watchUevents(ctx, events, func(m []byte) bool {
		select {
		case messages <- string(m):
		default:
		}
		return true
	}); err != nil {
		t.Skip(err)
	}
	if err := os.WriteFile(trigger, []byte("change"), 0); err != nil {
		t.Skip(err)
	}
	select {
	case <-events:
		t.Logf("%q", <-messages)
	case <-time.After(patience):
		t.Error("nothing was heard")
	}
}
