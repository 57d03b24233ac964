// SPDX-License-Identifier: Apache-2.0

// Package peer says which process is at the other end of a connection, and proves when it is dead.
//
// What it guarantees:
//
//   - Every answer comes from the kernel: SO_PEERCRED, a pidfd, /proc and the cgroup file system.
//   - A process whose files in /proc the scheduler may not read is ErrHidden, and not taken for dead.
//     A pid alone names nobody; only the pidfd proves death.
//   - A process belongs to a container only if the cgroup directory that names the container belongs
//     to root. One below a directory of a user counts to that user, whatever its own user is.
//   - A user is one account as each of the numbers that it can make itself (/etc/subuid). A process in a
//     user namespace counts to who made the outermost one. Where the kernel does not say who that is, as
//     without CAP_SYS_PTRACE, a subordinate number counts to its user, and another process there to the
//     user of its session (user-<uid>.slice). Without all three, subordinate numbers are users.
//   - Where the scheduler cannot see the host's cgroup directories, only those below systemd's
//     user@<uid>.service are known to be a user's.
package peer

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrOtherPIDNamespace: without a pid there is no identity, and no proof of death.
var ErrOtherPIDNamespace = errors.New("the process is not in the scheduler's PID namespace: run nvshare-scheduler in the host's (hostPID: true in Kubernetes, --pid=host in podman and docker)")

// ErrHidden: who a process is cannot be read, though it lives.
var ErrHidden = fmt.Errorf("/proc hides the processes of other users from the scheduler (hidepid): mount -o remount,hidepid=2,gid=%d /proc, and the same options in /etc/fstab", os.Getegid())

// soPeerPidfd is SO_PEERPIDFD, Linux 6.5.
const soPeerPidfd = 77

// Process names a process for the time since boot: a pid is reused, but not
// with the same start time.
type Process struct {
	PID   int32
	Start uint64 // clock ticks since boot, field 22 of /proc/<pid>/stat
}

// Peer is what the kernel says of a process.
type Peer struct {
	Process
	UID       uint32 // outside containers, of the user that Account names
	Container string // id, empty outside containers
	PodUID    string
	// Account is what the process's connections, clients and memory are counted
	// by: ContainerAccount and the container's id, or UserAccount and a user's
	// number.
	Account string
	Command string // chosen by the process: any bytes
	pidfd   *os.File
}

// How accounts begin.
const (
	ContainerAccount = "container "
	UserAccount      = "user "
)

// AccountOfUser returns the account of a user outside containers.
func AccountOfUser(uid uint32) string { return UserAccount + strconv.FormatUint(uint64(uid), 10) }

// Finder identifies processes on a host whose cgroups it has found.
type Finder struct {
	cgroups hierarchies
	users   users
}

// NewFinder looks for the host's cgroup file systems, once: a later mount is
// not seen.
func NewFinder() (*Finder, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find the cgroup file systems: %w", err)
	}
	users, err := newUsers()
	if err != nil {
		return nil, fmt.Errorf("find the user namespace of this process: %w", err)
	}
	return &Finder{readHierarchies(string(text)), users}, nil
}

// Knocks returns the pid of the process that connected, and whether the process has hung
// up already. That costs little; Identify costs 0.1 ms.
func Knocks(conn *net.UnixConn) (pid int32, gone bool) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, true
	}
	err = raw.Control(func(fd uintptr) {
		if cred, credErr := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); credErr == nil {
			pid = cred.Pid
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, pollErr := unix.Poll(fds, 0)
		gone = pollErr == nil && n == 1
	})
	return pid, gone || err != nil
}

// Identify asks the kernel who connected. The caller closes the Peer.
func (f *Finder) Identify(conn *net.UnixConn) (*Peer, error) {
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
		return nil, ErrOtherPIDNamespace
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
	return f.describe(cred.Pid, cred.Uid, pidfd)
}

// FindPID opens the process that has a pid now. The caller vouches that this is the
// process meant, and closes the Peer.
func (f *Finder) FindPID(pid int32) (*Peer, error) {
	pidfd, err := unix.PidfdOpen(int(pid), 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd of process %d: %w", pid, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &st); err != nil {
		err = whyUnread(pidfd, err)
		unix.Close(pidfd)
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	return f.describe(pid, st.Uid, pidfd)
}

// Find opens a process that was recorded before. It fails if the process is
// dead or its pid names another process now. The caller closes the Peer.
func (f *Finder) Find(want Process) (*Peer, error) {
	p, err := f.FindPID(want.PID)
	if err != nil {
		return nil, err
	}
	if p.Process != want {
		p.pidfd.Close()
		return nil, fmt.Errorf("process %d is another process now: %w", want.PID, errEnded)
	}
	return p, nil
}

var errEnded = errors.New("the process has ended")

// Ended tells whether an error of Find says that the process has ended. With another one, as
// where descriptors are short, the process may live.
func Ended(err error) bool {
	return slices.ContainsFunc([]error{
		errEnded, unix.ESRCH, fs.ErrNotExist,
		unix.EINVAL, // of pidfd_open: its pid is that of a thread now
	}, func(e error) bool { return errors.Is(err, e) })
}

// Look says who a process is, for display: the Peer is closed, so the process may end
// at any time.
func (f *Finder) Look(pid int32) (*Peer, error) {
	p, err := f.FindPID(pid)
	if err == nil {
		p.Close()
	}
	return p, err
}

// describe reads what /proc has of a process, and owns the pidfd.
func (f *Finder) describe(pid int32, uid uint32, pidfd int) (*Peer, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil { // makes Go's poller take it
		unix.Close(pidfd)
		return nil, fmt.Errorf("pidfd of process %d: %w", pid, err)
	}
	p := &Peer{Process: Process{PID: pid}, UID: uid, pidfd: os.NewFile(uintptr(pidfd), "pidfd")}
	if err := whyUnread(pidfd, f.read(p)); err != nil {
		p.Close()
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	return p, nil
}

// whyUnread tells an error of reading what /proc has of a process from the process's end. What
// was read after its end may be of the pid's next owner.
func whyUnread(pidfd int, err error) error {
	switch {
	case dead(pidfd):
		return errEnded
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return ErrHidden
	}
	return err
}

// read fills in what the files below /proc/<pid> say.
func (f *Finder) read(p *Peer) error {
	dir := "/proc/" + strconv.Itoa(int(p.PID)) + "/"
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return err
	}
	if p.Start, p.Command, err = parseStat(string(stat)); err != nil {
		return err
	}
	cgroup, err := os.ReadFile(dir + "cgroup")
	if err != nil {
		return err
	}
	var delegated *uint32
	p.Container, p.PodUID, delegated = f.cgroups.containerOf(string(cgroup))
	if p.Container != "" {
		p.Account = ContainerAccount + p.Container
		return nil
	}
	if delegated != nil {
		p.UID = *delegated
	}
	if p.UID, err = f.users.behind(p.PID, p.UID, f.cgroups.sessionOf(string(cgroup)), delegated != nil); err != nil {
		return err
	}
	p.Account = AccountOfUser(p.UID)
	return nil
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

// AwaitDeath returns nil when the process is dead, all its threads included,
// and an error when the Peer is closed first.
func (p *Peer) AwaitDeath() error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool { return dead(int(fd)) })
}

// Kill sends the process SIGKILL. It cannot hit another process with the same
// number.
func (p *Peer) Kill() error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); ctlErr != nil {
		return ctlErr
	}
	return err
}

// Close gives the pidfd back. What the Peer says stays.
func (p *Peer) Close() { p.pidfd.Close() }
