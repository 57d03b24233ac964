// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/segments"
)

const (
	// fillStep is how many bytes are filled before the maker asks whether to go on.
	fillStep = 64 << 20
	// maxFillers: with more threads the memory is the limit.
	maxFillers = 8
	// fillNice is the nice value of threads that fill: tenants' threads run first.
	fillNice = 10

	hugePage = 2 << 20
)

// fillers is how many segments are made at a time, each by a thread of its own: two
// threads in one file wait for each other.
func fillers() int { return min(max(runtime.NumCPU()/2, 1), maxFillers) }

// nicely runs do on a thread that lets others run first, and that takes memory from a
// NUMA node as long as the node has any. The error says why the node is not preferred;
// do has run in any case.
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

// Nicely runs do on a thread that lets others run first.
func Nicely(do func()) { _ = nicely(NoNode, do) }

// newSegment makes and fills a segment. It gives up when step, which hears how many
// bytes are filled, returns an error.
func newSegment(size uint64, step func(filled uint64) error) (Segment, error) {
	if freeHugePages()*hugePage >= size {
		if fd, err := newMemfd(size, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB, step); err == nil {
			return Segment{fd, size, true}, nil
		}
	}
	fd, err := newMemfd(size, 0, step)
	if err != nil {
		return Segment{}, fmt.Errorf("a segment of %d MiB: %w", size>>20, err)
	}
	return Segment{fd, size, false}, nil
}

// free gives the memory back to the kernel, whoever else has a descriptor of the
// segment. Memory that others make by writing there later counts to them.
func (s Segment) free() {
	for unix.Fallocate(int(s.File.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(s.Size)) == unix.EINTR {
	}
	s.File.Close()
}

// newMemfd makes a memfd with every page in memory, whose size nobody can change.
func newMemfd(size uint64, flags int, step func(uint64) error) (*os.File, error) {
	fd, err := unix.MemfdCreate(segments.Name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), segments.Name)
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
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, segments.Seals); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	return populate(fd, size, flags, step)
}

// Refill makes all pages of a segment, not of reserved huge pages, that was emptied. They
// have any content.
func Refill(f *os.File, size uint64, step func(filled uint64) error) error {
	return populate(int(f.Fd()), size, 0, step)
}

func populate(fd int, size uint64, flags int, step func(uint64) error) error {
	collapses := flags&unix.MFD_HUGETLB == 0
	for from := uint64(0); from < size; from += fillStep {
		if err := step(from); err != nil {
			return err
		}
		var err error
		switch at, n := int64(from), int(min(fillStep, size-from)); {
		case flags&unix.MFD_HUGETLB != 0:
			err = allocate(fd, at, n)
		case collapses:
			collapses, err = collapse(fd, at, n)
		default:
			err = write(fd, at, n)
		}
		if err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	return nil
}

var zeros = make([]byte, 256<<10)

// write makes pages by writing zeros to them. That maps none of them, and is 1.6 times
// as fast as MADV_POPULATE_WRITE.
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

// allocate makes huge pages. The kernel zeroes them as it allocates them.
func allocate(fd int, at int64, n int) error {
	for {
		if err := unix.Fallocate(fd, 0, at, int64(n)); err != unix.EINTR {
			return err
		}
	}
}

// collapse makes transparent huge pages, whatever shmem_enabled says (madvise(2),
// MADV_COLLAPSE, Linux 6.1), or else makes pages as write does. With huge pages 4 GiB
// are made in 0.2 s instead of 0.4, pinned in 0.08 s instead of 0.4, and given up by a
// client that ends in 0.1 s instead of 0.8 (H200). One written byte in each is enough
// for the kernel. again: it is worth trying with more. It is not where the kernel does
// not support that, or where memory is too scattered, for which the kernel has searched
// a while.
func collapse(fd int, at int64, n int) (again bool, err error) {
	for done := 0; done < n; done += hugePage {
		if err := write(fd, at+int64(done), 1); err != nil {
			return false, err
		}
	}
	err = collapsed(fd, at, n)
	if err == nil {
		return true, nil
	}
	return errors.Is(err, unix.EAGAIN), write(fd, at, n)
}

// collapsed fails if not all pages could be made huge ones.
func collapsed(fd int, at int64, n int) error {
	mem, unmap, err := mapAligned(fd, at, n)
	if err != nil {
		return err
	}
	defer unmap()
	return unix.Madvise(mem, unix.MADV_COLLAPSE)
}

// mapAligned maps a part of a file for reading, at a multiple of a huge page.
func mapAligned(fd int, at int64, n int) (mem []byte, unmap func(), err error) {
	size := uintptr(n + hugePage)
	room, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, fmt.Errorf("mmap: %w", err)
	}
	unmap = func() { _ = unix.MunmapPtr(room, size) }
	start := unsafe.Add(room, -uintptr(room)&(hugePage-1))
	if _, err := unix.MmapPtr(fd, at, start, uintptr(n), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		unmap()
		return nil, nil, fmt.Errorf("mmap: %w", err)
	}
	return unsafe.Slice((*byte)(start), n), unmap, nil
}
