// SPDX-License-Identifier: Apache-2.0

// Package segments finds the host memory in which a process has what is away from its GPUs:
// the memfds that the scheduler has made for it (package arena), and that its shim has mapped.
//
// It opens them through the process's mappings, because neither side keeps the descriptors:
// the shim closes them, and those of an earlier scheduler are gone with it. That takes
// CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN, and of a process of another user CAP_DAC_READ_SEARCH and
// CAP_SYS_PTRACE too.
package segments

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Name is the name of the memfds.
const Name = "nvshare-arena"

// Seals are those of each memfd. No file that is not a memfd can have them.
const Seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// max is how many segments a process may have mapped: a shim maps 256 for each GPU.
const max = 2048

// Segment is a memfd that a process has mapped.
type Segment struct {
	*os.File
	Inode   uint64
	Size    uint64 // bytes
	Present uint64 // of these, those that the kernel has; the others are read as zeros
	Huge    bool   // of reserved huge pages
}

// Open opens all segments of a process, each once. The caller closes them.
func Open(pid int) (all []Segment, err error) {
	defer func() {
		if err != nil {
			Close(all)
			all = nil
		}
	}()
	dir := "/proc/" + strconv.Itoa(pid)
	maps, err := os.ReadFile(dir + "/maps")
	if err != nil {
		return nil, err
	}
	memfds, err := memfdSystems()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{} // inodes of all files of that name, which are of one file system
	for line := range strings.Lines(string(maps)) {
		// 7f00-7f40 rw-s 00000000 00:01 1049   /memfd:nvshare-arena (deleted)
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[5] != "/memfd:"+Name || seen[fields[4]] {
			continue
		}
		if len(all) == max {
			return all, fmt.Errorf("process %d has mapped more than %d segments", pid, max)
		}
		seen[fields[4]] = true
		f, err := openMemfd(dir+"/map_files/"+fields[0], memfds)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errOther) {
			continue // it is not mapped any more, or something else that has the name
		}
		if err != nil {
			return all, fmt.Errorf("open the memory of process %d (that takes root, or CAP_CHECKPOINT_RESTORE, and of another user CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE too): %w", pid, err)
		}
		s, ok := describe(f)
		if !ok {
			f.Close() // something else that has the name
			continue
		}
		all = append(all, s)
	}
	return all, nil
}

var errOther = errors.New("not a memfd of the scheduler")

// openMemfd opens what a link leads to if it is a memfd. A process can map a file of that name from any file
// system, whose open may never end, or take a lease on a memfd of its own, for whose end an open waits.
func openMemfd(link string, memfds []uint64) (*os.File, error) {
	fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0) // opens nothing yet
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st); err != nil {
		return nil, fmt.Errorf("statx: %w", err)
	}
	if !slices.Contains(memfds, unix.Mkdev(st.Dev_major, st.Dev_minor)) {
		return nil, errOther
	}
	f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(fd), os.O_RDWR|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errOther
	}
	return f, err
}

// memfdSystems returns the file systems of memfds, which nobody can mount: of normal and of huge pages.
func memfdSystems() (devices []uint64, err error) {
	for _, flags := range []int{0, unix.MFD_HUGETLB | unix.MFD_HUGE_2MB} {
		fd, err := unix.MemfdCreate("nvshare-test", unix.MFD_CLOEXEC|flags)
		if err != nil && flags != 0 {
			break // there are no huge pages
		}
		if err != nil {
			return nil, fmt.Errorf("memfd_create: %w", err)
		}
		var st unix.Stat_t
		err = unix.Fstat(fd, &st)
		unix.Close(fd)
		if err != nil {
			return nil, fmt.Errorf("fstat: %w", err)
		}
		devices = append(devices, st.Dev)
	}
	return devices, nil
}

func describe(f *os.File) (s Segment, ok bool) {
	fd := int(f.Fd())
	var st unix.Stat_t
	var system unix.Statfs_t
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals != Seals || unix.Fstat(fd, &st) != nil || unix.Fstatfs(fd, &system) != nil {
		return s, false
	}
	return Segment{f, st.Ino, uint64(st.Size), uint64(st.Blocks) * 512, uint32(system.Type) == unix.HUGETLBFS_MAGIC}, true
}

// Close closes segments.
func Close(all []Segment) {
	for _, s := range all {
		s.File.Close()
	}
}

// Missing returns how many bytes of these the kernel does not have.
func Missing(all []Segment) (sum uint64) {
	for _, s := range all {
		sum += s.Size - min(s.Present, s.Size)
	}
	return sum
}

// CanOpen says why segments of other processes cannot be opened, whatever the process.
func CanOpen() error {
	const dir = "/proc/self/map_files/"
	files, err := os.ReadDir(dir) // the program's own file is always there
	if err == nil {
		_, err = os.Stat(dir + files[0].Name())
	}
	if err != nil {
		return fmt.Errorf("memory of other processes cannot be opened (run the scheduler as root, or with CAP_CHECKPOINT_RESTORE, CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE): %w", err)
	}
	return nil
}
