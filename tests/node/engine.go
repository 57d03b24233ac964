// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// An Engine is a root file system in which container engines run with state of their
// own. Its processes see the node's /run, and so the node's CDI specs, sockets and
// simulated GPU.
type Engine struct {
	// Private is a directory on tmpfs, at the same path inside.
	Private string
	// Root is the root file system; empty: the machine's own.
	Root string

	node *Node
	env  []string
}

// NewEngine makes an Engine from a copy of root; what is written to the copy stays in
// memory. With an empty root, the Engine uses the machine's own root file system. show
// maps directories of the machine to the paths at which programs inside see them.
func (n *Node) NewEngine(name, root string, show map[string]string) (*Engine, error) {
	e := &Engine{Private: filepath.Join(n.private, "engine-"+name), node: n, env: n.env}
	if err := os.MkdirAll(e.Private, 0o755); err != nil {
		return nil, err
	}
	if root == "" {
		return e, nil
	}
	e.Root = filepath.Join(n.private, "root-"+name)
	e.Setenv("TMPDIR", "/tmp")
	e.Setenv("HOME", "/root")
	upper, work := e.Root+".upper", e.Root+".work"
	for _, d := range []string{e.Root, upper, work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return nil, err
		}
	}
	if err := unix.Mount("overlay", e.Root, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", root, upper, work)); err != nil {
		return nil, fmt.Errorf("a writable copy of %s: %w", root, err)
	}
	for _, dir := range []string{"/proc", "/sys", "/dev", "/run", n.tools, e.Private} {
		if err := e.bind(dir, dir); err != nil {
			return nil, err
		}
	}
	for host, inside := range show {
		if err := e.bind(host, inside); err != nil {
			return nil, err
		}
	}
	// Maintainer scripts make these files; none has run here.
	for name, text := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group":  "root:x:0:\nuser:x:1000:\n",
		"etc/hosts":  "127.0.0.1 localhost\n",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Join(e.Root, "etc"), 0o755), os.WriteFile(filepath.Join(e.Root, name), []byte(text), 0o644)); err != nil {
			return nil, err
		}
	}
	// Engines keep images below /var/lib.
	for _, dir := range []string{"var/lib", "var/tmp", "tmp", "root", "home/user"} {
		at := filepath.Join(e.Root, dir)
		if err := os.MkdirAll(at, 0o755); err != nil {
			return nil, err
		}
	}
	if err := unix.Mount("engine-var", filepath.Join(e.Root, "var/lib"), "tmpfs", 0, "mode=0755"); err != nil {
		return nil, fmt.Errorf("mount tmpfs on /var/lib of %s: %w", name, err)
	}
	link := filepath.Join(e.Root, "var/run")
	if err := os.Symlink("/run", link); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return e, errors.Join(os.Chmod(filepath.Join(e.Root, "tmp"), 0o1777|os.ModeSticky), os.Chown(filepath.Join(e.Root, "home/user"), 1000, 1000))
}

func (e *Engine) bind(host, inside string) error {
	at := filepath.Join(e.Root, inside)
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(host, at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("show %s at %s: %w", host, at, err)
	}
	return nil
}

// Setenv adds to the environment of programs that start from now on.
func (e *Engine) Setenv(key, value string) {
	e.env = append(e.env[:len(e.env):len(e.env)], key+"="+value)
}

// argv is the command line that runs argv in the root file system, as user uid.
func (e *Engine) argv(uid int, argv []string) []string {
	if e.Root == "" && uid == 0 {
		return append([]string{"/usr/bin/env"}, argv...) // env looks in e.env's PATH; exec would look in this program's
	}
	id := fmt.Sprint(uid)
	as := []string{"chroot", "--userspec=" + id + ":" + id, "--groups=", "/"}
	if e.Root == "" {
		return append(as, argv...)
	}
	// The directory becomes the root of a mount namespace; the former root stays at /old. A
	// chroot does not do: the kernel allows no user namespace there. And the mount namespace of a
	// container would have the machine's root, which a program of the engine's exec would see.
	pivot := []string{"unshare", "--mount", "sh", "-c", `cd "$0" && mkdir -p old && pivot_root . old && exec "$@"`, e.Root}
	return append(append(pivot, as...), argv...)
}

// Run runs a program in the Engine and returns its standard output.
func (e *Engine) Run(ctx context.Context, argv ...string) (string, error) {
	return output(ctx, e.env, e.argv(0, argv)...)
}

// Start starts a program in the Engine; its output goes to the log directory.
func (e *Engine) Start(name string, argv ...string) (*Process, error) {
	return e.StartAs(0, name, argv...)
}

// StartAs is Start as a user.
func (e *Engine) StartAs(uid int, name string, argv ...string) (*Process, error) {
	return start(name, e.node.logFile("engine-"+name), e.env, e.argv(uid, argv)...)
}

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.done }

// WriteWorkload writes the root file system of the workload image as a tar, for podman
// import and docker import. Call BuildImages first.
func (n *Node) WriteWorkload(to string) error {
	layer, err := n.images[WorkloadImage].layer()
	if err != nil {
		return err
	}
	return os.WriteFile(to, layer, 0o644)
}

// WriteWorkloadDir writes the same files to a new directory.
func (n *Node) WriteWorkloadDir(dir string) error { return n.images[WorkloadImage].writeDir(dir) }

// Cgroup is the parent of all containers' cgroups: a path below the root of each
// hierarchy.
func (n *Node) Cgroup() string { return "/" + n.cgroup }

// Tools is the directory of the pinned containerd, runc and crictl.
func (n *Node) Tools() string { return n.tools }
