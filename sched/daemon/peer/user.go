// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"os/user"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// subuidFile says which numbers each user may give to processes of its own
// user namespaces. A file that such a namespace has given one of these numbers, and the
// set-user-ID bit, brings the number out of the namespace.
const subuidFile = "/etc/subuid"

// users finds out which user stands behind a number.
type users struct {
	uidMap string      // of the scheduler's own user namespace
	own    unix.Stat_t // the same: the namespace
	subuid string      // subuidFile, except in tests
}

func newUsers() (users, error) {
	u := users{subuid: subuidFile}
	text, err := os.ReadFile("/proc/self/uid_map")
	if errors.Is(err, fs.ErrNotExist) { // the kernel has no user namespaces
		return u, nil
	}
	if err == nil {
		err = unix.Stat("/proc/self/ns/user", &u.own)
	}
	u.uidMap = string(text)
	return u, err
}

// behind returns the user who has started a process as uid. Only root can become root or
// another user; but who has subordinate numbers can be each of them. session is the user of
// the session that the process is part of, nil: none; delegated: uid is the owner of a
// directory that some user has made. What the kernel says of the process's user namespace
// goes first. A scheduler without CAP_SYS_PTRACE cannot ask for that.
func (u *users) behind(pid int32, uid uint32, session *uint32, delegated bool) (uint32, error) {
	if uid == 0 || session != nil && *session == uid {
		return uid, nil
	}
	uidMap, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/uid_map") // all may read it
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	inside := string(uidMap) != u.uidMap
	if inside {
		if owner, ok := u.ownerOf(pid); ok && owner != 0 {
			return owner, nil
		} // else root made the namespace: perhaps for a user
	}
	if owner, ok := u.ownerOfSubuid(uid); ok && owner != 0 {
		return owner, nil
	}
	if session != nil && *session != 0 && (inside || delegated) {
		return *session, nil
	}
	return uid, nil
}

// ownerOf returns who made the outermost user namespace that a process is in, below the
// scheduler's own; false: the kernel does not say.
func (u *users) ownerOf(pid int32) (uid uint32, ok bool) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(int(pid))+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	for {
		parent, err := unix.IoctlRetInt(fd, unix.NS_GET_PARENT)
		if err != nil {
			unix.Close(fd)
			return 0, false
		}
		var st unix.Stat_t
		err = unix.Fstat(parent, &st)
		if err == nil && st.Dev == u.own.Dev && st.Ino == u.own.Ino {
			unix.Close(parent)
			uid, err = unix.IoctlGetUint32(fd, unix.NS_GET_OWNER_UID)
			unix.Close(fd)
			return uid, err == nil
		}
		unix.Close(fd)
		fd = parent
	}
}

// ownerOfSubuid returns whose subordinate number uid is; false: nobody's, or the file
// cannot be read, as in a container.
func (u *users) ownerOfSubuid(uid uint32) (owner uint32, ok bool) {
	f, err := os.Open(u.subuid)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, numbers, _ := strings.Cut(strings.TrimSpace(lines.Text()), ":")
		first, count, _ := strings.Cut(numbers, ":")
		from, err := strconv.ParseUint(first, 10, 32)
		if err != nil {
			continue
		}
		n, err := strconv.ParseUint(count, 10, 32)
		if err != nil || uint64(uid) < from || uint64(uid) >= from+n {
			continue
		}
		if found, err := user.Lookup(name); err == nil {
			name = found.Uid
		}
		if number, err := strconv.ParseUint(name, 10, 32); err == nil {
			return uint32(number), true
		}
	}
	return 0, false
}
