// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

const (
	// fillStep is what is filled between two looks at whether it is still wanted.
	fillStep = 64 << 20
	// maxFillers: what zeroes memory is soon limited by that, not by threads.
	maxFillers = 8
	// fillNice: tenants' threads go before.
	fillNice = 10

	hugePage = 2 << 20
)

// fillers is how many segments are made at a time, each by a thread of its own: two
// threads in one file wait for each other.
func fillers() int { return min(max(runtime.NumCPU()/2, 1), maxFillers) }

// nicely does something on a thread that lets others go before, and takes memory from a
// NUMA node first; an error: that it may not.
func nicely(node int, do func()) error {
	runtime.LockOSThread()
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), fillNice)
	restore, err := prefer(node)
	do()
	if restore() == nil && unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 0) == nil {
		runtime.UnlockOSThread()
	} // else the thread ends with its goroutine
	return err
}

// newSegment makes and fills one; it gives up when step, which hears how far it is,
// returns an error.
func newSegment(size uint64, step func(filled uint64) error) (segment, error) {
	if freeHugePages()*hugePage >= size {
		if fd, err := newMemfd(size, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB, step); err == nil {
			return segment{fd, size, true}, nil
		}
	}
	fd, err := newMemfd(size, 0, step)
	if err != nil {
		return segment{}, fmt.Errorf("a segment of %d MiB: %w", size>>20, err)
	}
	return segment{fd, size, false}, nil
}

// newMemfd makes a memfd of which every page is there, and which nobody can make
// larger or smaller.
func newMemfd(size uint64, flags int, step func(uint64) error) (*os.File, error) {
	fd, err := unix.MemfdCreate("nvshare-arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "nvshare-arena")
	if err := fill(f, size, flags, step); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func fill(f *os.File, size uint64, flags int, step func(uint64) error) error {
	fd := int(f.Fd())
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return fmt.Errorf("ftruncate: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	some := populate
	switch {
	case flags&unix.MFD_HUGETLB != 0:
		some = allocate
	case !hugeIfAdvised():
		some = write
	}
	for from := uint64(0); from < size; from += fillStep {
		if err := step(from); err != nil {
			return err
		}
		if err := some(fd, int64(from), int(min(fillStep, size-from))); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	return nil
}

var zeros = make([]byte, 256<<10)

// write has pages be there by writing zeros to them: without mapping each that is 1.6
// times faster than populate.
func write(fd int, at int64, n int) error {
	for n > 0 {
		done, err := unix.Pwrite(fd, zeros[:min(n, len(zeros))], at)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case done == 0:
			return io.ErrShortWrite
		}
		at, n = at+int64(max(done, 0)), n-max(done, 0)
	}
	return nil
}

// allocate is for huge pages: they are zeroed as they are allocated.
func allocate(fd int, at int64, n int) error {
	for {
		if err := unix.Fallocate(fd, 0, at, int64(n)); err != unix.EINTR {
			return err
		}
	}
}

// populate is for a kernel that uses huge pages where that is advised.
func populate(fd int, at int64, n int) error {
	mem, err := unix.Mmap(fd, at, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(mem)
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	err = unix.Madvise(mem, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.14
		return write(fd, at, n)
	}
	return err
}

// hugeIfAdvised says whether memfds get huge pages by advice.
func hugeIfAdvised() bool {
	text, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	return err == nil && bytes.Contains(text, []byte("[advise]"))
}
