// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// errOtherPIDNamespace: without a pid there is no identity, and no proof of death.
var errOtherPIDNamespace = errors.New("the process is not in the scheduler's PID namespace: run nvshare-scheduler in the host's (hostPID: true in Kubernetes, --pid=host in podman and docker)")

// soPeerPidfd is SO_PEERPIDFD, Linux 6.5.
const soPeerPidfd = 77

// process names a process for the time since boot: a pid is reused, but not
// with the same start time.
type process struct {
	pid   int32
	start uint64 // clock ticks since boot, field 22 of /proc/<pid>/stat
}

// peer is what the kernel says of the process behind a connection.
type peer struct {
	process
	uid       uint32
	container string // id, empty outside containers
	podUID    string
	account   string // what its connections, clients and memory are counted by
	command   string
	pidfd     *os.File // readable when the process is dead
}

// How accounts begin; an id or a user's number follows.
const (
	containerAccount = "container "
	userAccount      = "user "
)

// identify asks the kernel who connected. The caller closes the pidfd.
func identify(conn *net.UnixConn) (*peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	pidfd := -1
	var credErr, fdErr error
	if err := raw.Control(func(fd uintptr) {
		if cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); credErr != nil {
			return
		}
		pidfd, fdErr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPidfd)
	}); err != nil {
		return nil, err
	}
	if credErr != nil {
		return nil, fmt.Errorf("SO_PEERCRED: %w", credErr)
	}
	if cred.Pid <= 0 {
		if pidfd >= 0 {
			unix.Close(pidfd)
		}
		return nil, errOtherPIDNamespace
	}
	if errors.Is(fdErr, unix.ENOPROTOOPT) {
		// Before Linux 6.5. If the peer died and its pid was given to another
		// process since it connected, that one is taken for it. It then holds
		// a GPU until the dead one's connection has been lost for the grace
		// period, at worst.
		pidfd, fdErr = unix.PidfdOpen(int(cred.Pid), 0)
	}
	if fdErr != nil {
		return nil, fmt.Errorf("pidfd of process %d: %w", cred.Pid, fdErr)
	}
	return describe(cred.Pid, cred.Uid, pidfd)
}

// findProcess opens a process that was recorded before, and fails if it is
// dead or its pid names another one now.
func findProcess(want process) (*peer, error) {
	pidfd, err := unix.PidfdOpen(int(want.pid), 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd of process %d: %w", want.pid, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", want.pid), &st); err != nil {
		unix.Close(pidfd)
		return nil, err
	}
	p, err := describe(want.pid, st.Uid, pidfd)
	if err != nil {
		return nil, err
	}
	if p.process != want {
		p.pidfd.Close()
		return nil, fmt.Errorf("process %d is another one now", want.pid)
	}
	return p, nil
}

// describe reads what /proc has of a process and owns the pidfd.
func describe(pid int32, uid uint32, pidfd int) (*peer, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil { // makes Go's poller take it
		unix.Close(pidfd)
		return nil, fmt.Errorf("pidfd of process %d: %w", pid, err)
	}
	p := &peer{process: process{pid: pid}, uid: uid, pidfd: os.NewFile(uintptr(pidfd), "pidfd")}
	dir := "/proc/" + strconv.Itoa(int(pid)) + "/"
	stat, err := os.ReadFile(dir + "stat")
	if err == nil {
		p.start, p.command, err = parseStat(string(stat))
	}
	var cgroup []byte
	if err == nil {
		cgroup, err = os.ReadFile(dir + "cgroup")
	}
	if err == nil && dead(pidfd) {
		err = errors.New("it has ended") // what we read may be of the pid's next owner
	}
	if err != nil {
		p.pidfd.Close()
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	p.container, p.podUID = containerOf(string(cgroup))
	p.account = containerAccount + p.container
	if p.container == "" {
		p.account = userAccount + strconv.FormatUint(uint64(uid), 10)
	}
	return p, nil
}

// parseStat finds start time and command in the text of /proc/<pid>/stat. The
// command may contain anything, so the fields are counted from its end.
func parseStat(stat string) (start uint64, command string, err error) {
	open, end := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return 0, "", fmt.Errorf("stat has no command: %q", stat)
	}
	fields := strings.Fields(stat[end+1:])
	const startTime = 22 - 3 // field 3 is the first after the command
	if len(fields) <= startTime {
		return 0, "", fmt.Errorf("stat is too short: %q", stat)
	}
	start, err = strconv.ParseUint(fields[startTime], 10, 64)
	return start, stat[open+1 : end], err
}

func dead(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// awaitDeath returns nil when the process behind the pidfd is dead, all its
// threads included, and an error when the pidfd is closed first.
func awaitDeath(pidfd *os.File) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool { return dead(int(fd)) })
}
