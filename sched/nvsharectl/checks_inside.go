// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// nobody is the user as which doctor connects from inside a container.
const nobody = 65534

// errNotTried means that this process cannot make a container of its own.
var errNotTried = errors.New("it needs root that may make namespaces and mounts")

// setUp begins what reachFromInside says where it cannot make the container.
const setUp = "set up: "

// checkInside connects to the tenant socket as a program in a container would.
func checkInside(p *patient) []finding {
	dir := p.at(filepath.Join(p.runDir, "tenant"))
	if _, err := os.Stat(filepath.Join(dir, "scheduler.sock")); err != nil {
		return nil // said already
	}
	switch err := p.inside(dir); {
	case errors.Is(err, errNotTried):
		return found(warn, p.sudo("doctor"), "the socket was not tried from inside a container: %v", err)
	case err != nil:
		return found(fail, p.scheduler("restart")+", which makes "+filepath.Join(p.runDir, "tenant")+" anew; then start the container again", "a program inside a container does not reach the scheduler: %v", err)
	}
	return found(pass, "", "a program inside a container, with no rights, reaches the scheduler")
}

// connectInside runs doctor inside in namespaces of its own.
func connectInside(dir string) error {
	if os.Getuid() != 0 {
		return errNotTried
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*callTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "doctor", "inside", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS}
	text, err := cmd.CombinedOutput()
	switch said := strings.TrimSpace(string(text)); {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission), strings.Contains(said, setUp):
		return fmt.Errorf("%w: %w %s", errNotTried, err, said)
	default:
		return fmt.Errorf("%w: %s", err, said)
	}
}

// insideCommand is the part of checkInside that runs in the namespaces.
func insideCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "inside DIRECTORY",
		Short:  "What doctor runs as a container",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return onOneThread(func() error { return reachFromInside(args[0]) })
		},
	}
}

// reachFromInside makes a root file system that has only the tenant directory, becomes
// nobody, and connects. Mounts are those of the process's own namespace.
func reachFromInside(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf(setUp+"make mounts private: %w", err)
	}
	root := "/proc" // any directory that is there on each host: the mount covers it
	source, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf(setUp+"open %s: %w", dir, err)
	}
	tree, err := unix.OpenTree(source, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf(setUp+"mount %s: %w", dir, err)
	}
	err = unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=64k")
	if err == nil {
		err = os.Mkdir(root+"/tenant", 0o755)
	}
	if err == nil {
		err = unix.MoveMount(tree, "", unix.AT_FDCWD, root+"/tenant", unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err == nil {
		err = errors.Join(unix.Chroot(root), unix.Chdir("/"))
	}
	if err != nil {
		return fmt.Errorf(setUp+"make a root file system: %w", err)
	}
	if err := errors.Join(unix.Setgroups(nil), unix.Setresgid(nobody, nobody, nobody), unix.Setresuid(nobody, nobody, nobody)); err != nil {
		return fmt.Errorf(setUp+"become nobody: %w", err)
	}
	conn, err := net.DialTimeout("unixpacket", "/tenant/scheduler.sock", 10*time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
}
