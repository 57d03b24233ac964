// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// joinLimit ends a hook that hangs. It is above the time for which the scheduler waits
	// for a group, and below the runtime's own limit.
	joinLimit = 20 * time.Second

	// defaultPipe is where the driver looks for MPS without api.MPSPipeEnv.
	defaultPipe = "/tmp/nvidia-mps"

	sharedMemory = "/dev/shm"
)

// runJoin returns the exit status, as run does.
func runJoin(args []string, stdin io.Reader, stderr io.Writer) int {
	return withRunDir(flag.NewFlagSet("join", flag.ContinueOnError), args, stderr, joinLimit, func(runDir string) error { return join(stdin, runDir) })
}

// join gives a container the directories of its overlap group, if it is in one.
func join(stdin io.Reader, runDir string) error {
	var s state
	var c config
	if err := s.read(stdin); err != nil {
		return err
	}
	value, ok := s.Annotations[api.OverlapAnnotation]
	if !ok {
		return nil
	}
	group, err := api.ParseOverlap(value)
	if err != nil || group == "" { // describe, or the plugin, has said so if it is wrong
		return err
	}
	if err := s.config(&c); err != nil {
		return err
	}
	rootfs, err := c.rootfs(s.Bundle)
	if err == nil {
		err = joinGroup(&s, &c, rootfs, runDir, group)
	}
	if err != nil {
		return fmt.Errorf("overlap group %q: %w", group, err)
	}
	return nil
}

func joinGroup(s *state, c *config, rootfs, runDir, group string) error {
	ctx, cancel := context.WithTimeout(context.Background(), joinLimit-time.Second)
	defer cancel()
	conn, err := api.Dial(ctx, runDir)
	if err != nil {
		return err
	}
	defer conn.Close()
	r, err := conn.JoinOverlap(ctx, &api.JoinOverlapRequest{Id: s.ID, Overlap: group})
	if st, ok := status.FromError(err); ok && err != nil {
		return errors.New(st.Message())
	} else if err != nil {
		return err
	}
	dir := filepath.Join(runDir, r.Dir)
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root file system: %w", &os.PathError{Op: "open", Path: rootfs, Err: err})
	}
	defer unix.Close(root)
	pipe := c.pipe()
	if isMounted(root, filepath.Join(dir, api.OverlapPipe), pipe) { // the device was injected twice
		return nil
	}
	if err := private(root, sharedMemory); err != nil {
		return fmt.Errorf("%s of the container is not a mount of its own: %w", sharedMemory, err)
	}
	if err := mountInside(root, filepath.Join(dir, api.OverlapShared), sharedMemory, inside&^unix.RESOLVE_NO_XDEV); err != nil {
		return err
	}
	// A mount on a file system that a volume shares with the host would be the host's too.
	if err := makeInside(root, pipe); err != nil {
		return fmt.Errorf("make %s in the container: %w (set %s to a directory on the container's own root file system)", pipe, err, api.MPSPipeEnv)
	}
	return mountInside(root, filepath.Join(dir, api.OverlapPipe), pipe, inside)
}

// isMounted tells whether a directory of the container is one of the host.
func isMounted(root int, host, dir string) bool {
	var there, here unix.Stat_t
	at, err := unix.Openat2(root, dir, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside &^ unix.RESOLVE_NO_XDEV})
	if err != nil {
		return false
	}
	defer unix.Close(at)
	return unix.Fstat(at, &there) == nil && unix.Stat(host, &here) == nil && there.Dev == here.Dev && there.Ino == here.Ino
}

// private keeps what is mounted on a mount of the container from the host.
func private(root int, dir string) error {
	at, err := unix.Openat2(root, dir, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside &^ unix.RESOLVE_NO_XDEV})
	if err != nil {
		return err
	}
	defer unix.Close(at)
	return unix.Mount("", fmt.Sprintf("/proc/self/fd/%d", at), "", unix.MS_PRIVATE, "")
}

// pipe returns where the container's programs look for MPS.
func (c *config) pipe() string {
	pipe, _ := c.env(api.MPSPipeEnv)
	return cmp.Or(pipe, defaultPipe)
}

// canOverlap says why a container of an engine cannot be in an overlap group.
func (c *config) canOverlap(t api.Terms) error {
	for _, n := range c.Linux.Namespaces {
		if n.Type == "user" {
			return errors.New("the container has a user namespace of its own, and MPS serves users of the host: run it without")
		}
	}
	if pipe := c.pipe(); !path.IsAbs(pipe) || path.Clean(pipe) != pipe {
		return fmt.Errorf("%s=%.*q is not an absolute, clean path", api.MPSPipeEnv, maxShown, pipe)
	}
	for key, value := range api.OverlapEnvironment(c.pipe(), t) {
		if is, set := c.env(key); key != api.MPSPipeEnv && (!set || is != value) {
			return fmt.Errorf("a core limit in a group holds by the environment: add --env %s=%s", key, value)
		}
	}
	return nil
}

// makeInside makes a directory in the container, and those above it.
func makeInside(root int, dir string) error {
	at, err := unix.Openat2(root, "/", &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside})
	if err != nil {
		return err
	}
	defer func() { unix.Close(at) }()
	below := ""
	for name := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		if err := unix.Mkdirat(at, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		below += "/" + name
		next, err := unix.Openat2(root, below, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside})
		if err != nil {
			return err
		}
		unix.Close(at)
		at = next
	}
	return nil
}

// mountInside mounts a directory of the host on one of the container.
func mountInside(root int, host, dir string, resolve uint64) error {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: resolve}
	for _, step := range []struct {
		resolve uint64
		source  string
		flags   uintptr
	}{
		{resolve, host, unix.MS_BIND},
		// A bind mount has no options before it is mounted again; what is there now is ours.
		{resolve &^ unix.RESOLVE_NO_XDEV, "", unix.MS_BIND | unix.MS_REMOUNT | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	} {
		how.Resolve = step.resolve
		at, err := unix.Openat2(root, dir, how)
		if err == nil {
			err = unix.Mount(step.source, fmt.Sprintf("/proc/self/fd/%d", at), "", step.flags, "")
			unix.Close(at)
		}
		if err != nil {
			return fmt.Errorf("mount %s on %s of the container: %w", host, dir, err)
		}
	}
	return nil
}
