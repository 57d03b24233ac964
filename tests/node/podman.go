// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// podman refuses a runroot longer than 50 characters; /run is private anyway.
const (
	podmanRun = "/run/podman-node/run"
	podmanTmp = "/run/podman-node/tmp"
)

// rootfsOf is a podman container's root file system. It replaces an image, because podman
// load writes to /var/lib/containers, whatever --root says.
func (n *Node) rootfsOf(name string) string { return filepath.Join(n.private, "podman-"+name) }

// HavePodman reports whether the machine has podman.
func HavePodman() bool {
	_, err := exec.LookPath("podman")
	return err == nil
}

// podman runs the machine's podman with the node's storage and state. It uses runc,
// because crun refuses hybrid cgroup hierarchies. No container gets a network, but podman
// locks the directory of the network's settings.
func (n *Node) podman(ctx context.Context, args ...string) (string, error) {
	return output(ctx, n.env, append([]string{"podman",
		"--root", filepath.Join(n.private, "podman"), "--runroot", podmanRun, "--tmpdir", podmanTmp,
		"--network-config-dir", filepath.Join(n.private, "podman-networks"),
		"--cgroup-manager", "cgroupfs", "--events-backend", "file", "--runtime", filepath.Join(n.tools, "runc"),
	}, args...)...)
}

// RunPodman starts a container with podman run; devices are CDI names. BuildImages, or
// AddImage for another image, must have been called.
func (n *Node) RunPodman(ctx context.Context, name string, devices []string, spec ContainerSpec) (*Container, error) {
	root := n.rootfsOf(name)
	image := cmp.Or(spec.Image, WorkloadImage)
	if n.images[image] == nil {
		return nil, fmt.Errorf("podman container %s: nobody has made the image %s", name, image)
	}
	if err := n.images[image].writeDir(root); err != nil {
		return nil, err
	}
	// podman would raise these limits to its own defaults, which fails without
	// CAP_SYS_RESOURCE. So they stay as they are.
	var nofile, nproc unix.Rlimit
	if err := errors.Join(unix.Getrlimit(unix.RLIMIT_NOFILE, &nofile), unix.Getrlimit(unix.RLIMIT_NPROC, &nproc)); err != nil {
		return nil, fmt.Errorf("read limits: %w", err)
	}
	log := filepath.Join(n.dir, "log", "podman-"+name+".log")
	args := []string{"run", "--detach", "--name", name,
		"--network", "host", "--no-hosts", "--security-opt", "apparmor=unconfined",
		"--cgroup-parent", "/" + n.cgroup,
		"--ulimit", ulimit("nofile", nofile.Max), "--ulimit", ulimit("nproc", nproc.Max),
		"--log-driver", "k8s-file", "--log-opt", "path=" + log,
		"--volume", n.Records + ":/record",
	}
	for _, m := range spec.Mounts {
		args = append(args, "--volume", m.Host+":"+m.Container)
	}
	for _, d := range devices {
		args = append(args, "--device", d)
	}
	for flag, values := range map[string]map[string]string{"--env": spec.Env, "--annotation": spec.Annotations} {
		for _, k := range slices.Sorted(maps.Keys(values)) {
			args = append(args, flag, k+"="+values[k])
		}
	}
	id, err := n.podman(ctx, append(append(args, "--rootfs", root), spec.Args...)...)
	if err != nil {
		return nil, err
	}
	pid, err := n.podman(ctx, "inspect", "--format", "{{.State.Pid}}", name)
	if err != nil {
		return nil, err
	}
	c := &Container{Name: name, ID: strings.TrimSpace(id), log: log, criLog: true}
	if c.PID, err = strconv.Atoi(strings.TrimSpace(pid)); err != nil || c.PID == 0 {
		return nil, fmt.Errorf("podman container %s ended at once: %s", name, c.Log())
	}
	return c, nil
}

// RemovePodman kills and removes a container.
func (n *Node) RemovePodman(ctx context.Context, name string) error {
	_, err := n.podman(ctx, "rm", "--force", "--time", "0", name)
	return errors.Join(err, os.RemoveAll(n.rootfsOf(name)))
}

func ulimit(name string, max uint64) string {
	// Greater limits mean "unlimited", which podman's option cannot say.
	v := strconv.FormatUint(min(max, 1<<20), 10)
	return name + "=" + v + ":" + v
}

// PodmanImage builds an image with podman, whose stage "files" is replaced by files, and
// imports the image into containerd, which must run.
func (n *Node) PodmanImage(ctx context.Context, name, containerfile, files string, args ...string) error {
	for _, d := range []string{podmanRun, podmanTmp} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if _, err := n.podman(ctx, append([]string{"build", "--file", containerfile, "--build-context", "files=" + files, "--tag", name}, append(args, files)...)...); err != nil {
		return err
	}
	tar := filepath.Join(n.private, "podman-image.tar")
	defer os.Remove(tar)
	if _, err := n.podman(ctx, "save", "--format", "oci-archive", "--output", tar, name); err != nil {
		return err
	}
	if out, err := n.Ctr(ctx, "images", "import", "--local", tar); err != nil {
		return fmt.Errorf("import image: %w%s", err, out)
	}
	return nil
}
