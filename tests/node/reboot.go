// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Reboot does to the node what a reset does, and starts containerd and the kubelet again: no process of a
// container is left, and nothing of containerd and nvshare below /run. The control plane and the
// simulated GPU are elsewhere.
func (k *Kubernetes) Reboot(ctx context.Context) error {
	n := k.node
	if err := k.StopKubelet(); err != nil {
		return err
	}
	n.Containerd.Kill()
	if err := Until(ctx, "the end of all containers", n.killContainers); err != nil {
		return err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var below []string
	for line := range strings.Lines(string(mounts)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, n.state()+"/") || strings.HasPrefix(at, "/run/netns/") || strings.HasPrefix(at, "/run/nvshare/") {
			below = append(below, at)
		}
	}
	for i := len(below) - 1; i >= 0; i-- {
		if err := unix.Unmount(below[i], unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", below[i], err)
		}
	}
	for _, dir := range []string{n.state(), filepath.Dir(n.NRISocket()), "/run/netns", "/run/nvshare", "/run/cdi"} {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	err = errors.Join(err, removeCgroups(filepath.Base(n.dir)), makeCgroups(n.cgroup))
	if err != nil {
		return err
	}
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	return k.StartKubelet(ctx)
}

// killContainers kills the processes of all containers, and containerd's shims, and returns an error as
// long as there are any.
func (n *Node) killContainers() error {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	left := 0
	for _, dir := range dirs {
		cgroup, _ := os.ReadFile(dir + "/cgroup") // empty: it has ended
		comm, _ := os.ReadFile(dir + "/comm")
		if !strings.Contains(string(cgroup), "/"+n.cgroup+"/") && !strings.HasPrefix(string(comm), "containerd-shim") {
			continue
		}
		left++
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	if left > 0 {
		return fmt.Errorf("%d processes are left", left)
	}
	return nil
}
