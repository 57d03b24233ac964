// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/cgroup"
	"github.com/nvshare/nvshare/sched/daemon/loop"
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
	back, _ := loop.Yield(func(nice int) int { return max(nice, fillNice) })
	defer back()
	runtime.LockOSThread()
	restore, err := prefer(node)
	do()
	if restore() == nil {
		runtime.UnlockOSThread()
	} // else the thread ends with its goroutine
	return err
}

// Nicely runs do on a thread that lets others run first.
func Nicely(do func()) { _ = nicely(NoNode, do) }

// newSegment makes and fills a segment. It gives up when step, which hears how many
// bytes are filled, returns an error.
func newSegment(size uint64, step func(filled uint64) error) (Segment, error) {
	if (Kernel{}).freeHugePages()*hugePage >= size {
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

// collapse makes transparent huge pages, whatever shmem_enabled says (MADV_COLLAPSE, Linux 6.1),
// which are made in half the time and pinned in a fifth, or else makes pages as write does. One
// written byte in each is enough for the kernel. again: it is worth trying with more.
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

// HostReserve is what is left of the host's memory to others, bytes.
const HostReserve = 256 << 20

// Host is where memory comes from.
type Host interface {
	// Make makes a segment. It gives up when step, which hears how many bytes are
	// filled, returns an error.
	Make(size uint64, step func(filled uint64) error) (Segment, error)
	// Free returns how much memory there is to be had, bytes: of common pages, and
	// in addition of huge ones; false: unknown.
	Free() (pages, huge uint64, ok bool)
}

// Kernel is the Host that this process runs on.
type Kernel struct {
	root string // of its file system; "": of this process's
}

// Make is the Host's.
func (Kernel) Make(size uint64, step func(filled uint64) error) (Segment, error) {
	return newSegment(size, step)
}

// Free is the Host's: what the host has, and what the process's cgroup and those above it
// leave of that.
func (k Kernel) Free() (pages, huge uint64, ok bool) {
	if pages, ok = k.meminfo("MemAvailable:"); !ok {
		return 0, 0, false
	}
	huge = k.freeHugePages() * hugePage
	if _, left, limited := cgroup.Memory(k.at("/"), "self"); limited {
		pages = min(pages, left)
		huge = min(huge, left-pages)
	}
	return pages, huge, ok
}

// Total returns how much memory the host has for the scheduler's cgroup and everybody else
// in it, bytes; 0: unknown.
func Total() uint64 { return Kernel{}.total() }

func (k Kernel) total() uint64 {
	total, _ := k.meminfo("MemTotal:")
	if limit, _, limited := cgroup.Memory(k.at("/"), "self"); limited {
		total = min(total, limit)
	}
	return total
}

func (k Kernel) at(path string) string { return filepath.Join("/", k.root, path) }

func (k Kernel) freeHugePages() uint64 {
	text, err := os.ReadFile(k.at("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// meminfo returns a line of /proc/meminfo, bytes.
func (k Kernel) meminfo(key string) (uint64, bool) {
	text, err := os.ReadFile(k.at("/proc/meminfo"))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, key); found {
			n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return n << 10, err == nil
		}
	}
	return 0, false
}

// Where a host has several NUMA nodes, memory of the GPU's own is nearer to it.

// NoNode is the node of a GPU of which the kernel tells none.
const NoNode = -1

// NUMANode returns the node of a PCI device as the kernel tells it below sysfs: NoNode
// where a host has one node only and says so that way, or the device is not there.
func NUMANode(sysfs, busID string) int {
	if busID == "" || !filepath.IsLocal(busID) {
		return NoNode
	}
	text, err := os.ReadFile(filepath.Join(sysfs, "bus/pci/devices", busID, "numa_node"))
	if err != nil {
		return NoNode
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || n < 0 {
		return NoNode
	}
	return n
}

// prefer has this thread take memory from a node as long as the node has any, until restore.
// NoNode: nothing changes. A policy of the file would not work for hugetlbfs, which keeps none.
func prefer(node int) (restore func() error, err error) {
	nothing := func() error { return nil }
	if node == NoNode {
		return nothing, nil
	}
	var mode int32
	var before, nodes unix.CPUSet // the same kind of mask
	if _, _, e := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), uintptr(unsafe.Pointer(&before)), 8*unsafe.Sizeof(before), 0, 0, 0); e != 0 {
		return nothing, os.NewSyscallError("get_mempolicy", e)
	}
	nodes.Set(node)
	if err := unix.SetMemPolicy(unix.MPOL_PREFERRED, &nodes); err != nil {
		return nothing, os.NewSyscallError("set_mempolicy", err)
	}
	return func() error { return unix.SetMemPolicy(int(mode), &before) }, nil
}
