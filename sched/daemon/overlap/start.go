// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// Start is what a process that a Manager has started does: it records itself, becomes the
// members' user and runs the daemon. The arguments are those that the Manager gives. It
// returns only an error.
func Start(args []string) error {
	if len(args) < 4 {
		return errors.New("needs a directory, a user, whether /dev/shm is the group's, and a program")
	}
	dir, program := args[0], args[3:]
	uid, err := strconv.ParseUint(args[1], 10, 31)
	if err != nil {
		return fmt.Errorf("user %.64q: %w", args[1], err)
	}
	if args[2] == "true" {
		if err := ownShared(filepath.Join(dir, api.OverlapShared)); err != nil {
			return err
		}
	}
	peers, err := peer.NewFinder()
	if err != nil {
		return err
	}
	self, err := peers.Look(int32(os.Getpid()))
	if err != nil {
		return err
	}
	if err := writeProcess(filepath.Join(dir, recordName), self.Process); err != nil {
		return err
	}
	if int(uid) != os.Geteuid() {
		if err := become(int(uid)); err != nil {
			return fmt.Errorf("become user %d: %w (overlap groups need a scheduler that runs as root, or as the members' user)", uid, err)
		}
	}
	unix.Umask(0o077)
	return fmt.Errorf("run %s: %w", program[0], unix.Exec(program[0], program, os.Environ()))
}

// ownShared makes a directory the /dev/shm of this process, which has a mount namespace of
// its own.
func ownShared(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount(dir, "/dev/shm", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s on /dev/shm: %w", dir, err)
	}
	return nil
}

// nogroup is the group of what runs as the members' user. MPS goes by users; a group with the
// user's number may be another one's, docker's for example. The members' own groups differ, and
// are not known before they run.
const nogroup = 65534

// become changes the user of all threads.
func become(uid int) error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setresgid(nogroup, nogroup, nogroup); err != nil {
		return err
	}
	return syscall.Setresuid(uid, uid, uid)
}
