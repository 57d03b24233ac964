//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/node"
)

// inMountsOf runs f in the mount namespace of a process, with all the rights of root: the
// most that a container without a user namespace can be given.
func inMountsOf(pid int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and ends with its thread, whose namespace is another one
		done <- func() error {
			fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(fd, unix.CLONE_NEWNS)); err != nil {
				return fmt.Errorf("enter the container's mounts: %w", err)
			}
			return f()
		}()
	}()
	return <-done
}

// A container with CAP_SYS_ADMIN makes its mounts writable as far as it can. The shim of
// the node stays what it is.
func TestShimCannotBeWrittenFromAPod(t *testing.T) {
	pod := startPod(t, "edge-writer", map[string]string{gpuAnnotation: firstGPU}, sleeper("main", nil))
	const inside = "/usr/lib/nvshare"
	err := inMountsOf(pod.PID(), func() error {
		_ = unix.Mount("", inside, "", unix.MS_REMOUNT|unix.MS_BIND, "")
		_ = unix.Mount("", inside, "", unix.MS_REMOUNT, "")
		if _, err := os.Stat(inside + "/libnvshare.so"); err != nil {
			return err
		}
		for name, try := range map[string]func() error{
			"written": func() error {
				f, err := os.OpenFile(inside+"/libnvshare.so", os.O_WRONLY, 0)
				if err == nil {
					f.Close()
				}
				return err
			},
			"made": func() error { return os.WriteFile(inside+"/libother.so", nil, 0o755) },
		} {
			if err := try(); !errors.Is(err, unix.EROFS) {
				return fmt.Errorf("a file was %s in the directory of the shim: %v", name, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// When the plugin has just died, containerd may not know yet: NRI asks which plugins are
// required before it finds that the plugin does not answer. So one container of a pod
// that requires the plugin starts without it. The next plugin ends the container.
func TestFailClosedAtThePluginsDeath(t *testing.T) {
	ctx := within(t)
	spec := node.PodSpec{Name: "edge-death", SharedPIDs: true, Annotations: map[string]string{gpuAnnotation: firstGPU, requires: `["nvshare"]`}}
	pod := must(shared.Run(ctx, spec))(t)
	t.Cleanup(func() { removePod(t, pod) })

	check(t, shared.Plugin.Stop())
	back := false
	defer func() {
		if !back {
			check(t, shared.StartPlugin(within(t)))
		}
	}()
	// One attempt after the other: at most the first gets through.
	var through []*node.Container
	for i := range 3 {
		c := sleeper(fmt.Sprint("c", i), nil)
		if started, err := pod.Start(ctx, c); err == nil {
			if otherContainerd == "" && adjusted(t, started) {
				t.Errorf("%s has the shim, without a plugin", c.Name)
			}
			through = append(through, started)
		}
	}
	if otherContainerd == "" && len(through) > 1 {
		t.Errorf("%d containers started without the plugin that they require", len(through))
	}
	t.Logf("%d containers started without the plugin that they require", len(through))
	check(t, shared.StartPlugin(ctx))
	back = true
	for _, c := range through {
		must(pod.Ended(ctx, c))(t)
	}
}

// Whatever happens to the shim on the host, the plugin puts it right, and the next pod
// has the true one.
func TestShimOfTheHostIsKeptRight(t *testing.T) {
	ctx := within(t)
	shim := filepath.Join(node.LibDir, "current", "libnvshare.so")
	want := must(os.ReadFile(shim))(t)
	check(t, os.Truncate(shim, 0))
	check(t, node.Until(ctx, "the shim to be put right", func() error {
		if got, err := os.ReadFile(shim); err != nil || len(got) != len(want) {
			return fmt.Errorf("%d bytes, want %d, %v", len(got), len(want), err)
		}
		return context.Cause(ctx)
	}))
	pod := busyPod(t, "edge-after")
	awaitClient(t, ctx, "the shim", pod.PID(), holding)
}

// A container that goes around the shim is seen: the driver knows who uses the GPU.
func TestBypassOfTheShimIsSeen(t *testing.T) {
	ctx := within(t)
	busyPod(t, "edge-honest")
	around := busy("edge-around")
	hides := filepath.Join(t.TempDir(), "nothing")
	check(t, os.WriteFile(hides, nil, 0o644))
	around.Mounts = []node.Mount{{Host: hides, Container: "/usr/lib/nvshare/libnvshare.so"}}
	pod := startPod(t, "edge-around", map[string]string{gpuAnnotation: firstGPU}, around)
	check(t, node.Until(ctx, "the process to be seen", func() error {
		r := must(shared.Status(ctx))(t)
		for _, u := range r.Unmanaged {
			if int(u.Pid) == pod.PID() && u.Container.GetPod() == "edge-around" && u.Index == 0 {
				for _, p := range r.Problems {
					if strings.Contains(p, "default/edge-around/main") && strings.Contains(p, "uses the GPU without nvshare") {
						return nil
					}
				}
			}
		}
		return fmt.Errorf("unmanaged: %v, problems: %q", r.Unmanaged, r.Problems)
	}))
	out := must(shared.Ctl(ctx, "events"))(t)
	if !strings.Contains(out, "unmanaged") || !strings.Contains(out, "edge-around") {
		t.Errorf("the events lack it:\n%s", out)
	}
	check(t, pod.Stop(ctx))
	check(t, node.Until(ctx, "the process to be gone", func() error {
		if r := must(shared.Status(ctx))(t); len(r.Unmanaged) != 0 {
			return fmt.Errorf("unmanaged: %v", r.Unmanaged)
		}
		return nil
	}))
}
