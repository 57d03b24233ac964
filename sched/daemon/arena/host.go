// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

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
type Kernel struct{}

// Make is the Host's.
func (Kernel) Make(size uint64, step func(filled uint64) error) (Segment, error) {
	return newSegment(size, step)
}

// Free is the Host's: what the host has, and what the process's cgroup leaves of
// that.
func (Kernel) Free() (pages, huge uint64, ok bool) { return hostMemory() }

func freeHugePages() uint64 {
	text, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// hostMemory returns how much memory the scheduler can get, bytes, of the host and
// within its cgroup: of common pages, and in addition of huge ones.
func hostMemory() (pages, huge uint64, ok bool) {
	if pages, ok = meminfo("MemAvailable:"); !ok {
		return 0, 0, false
	}
	huge = freeHugePages() * hugePage
	if limit, used, has := cgroupMemory(); has {
		pages = min(pages, less(limit, used))
		huge = min(huge, less(limit, used)-pages)
	}
	return pages, huge, ok
}

// Total returns how much memory the host has for the scheduler's cgroup and everybody else
// in it, bytes; 0: unknown.
func Total() uint64 {
	total, _ := meminfo("MemTotal:")
	if limit, _, has := cgroupMemory(); has {
		total = min(total, limit)
	}
	return total
}

// meminfo returns a line of /proc/meminfo, bytes.
func meminfo(key string) (uint64, bool) {
	text, err := os.ReadFile("/proc/meminfo")
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

// cgroupMemory returns what the process's cgroup may have and has, bytes; false: it has no
// limit.
func cgroupMemory() (limit, used uint64, has bool) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return 0, 0, false
	}
	path, found := strings.CutPrefix(strings.TrimSpace(string(text)), "0::")
	if !found {
		return 0, 0, false
	}
	dir := filepath.Join("/sys/fs/cgroup", path)
	limit, limited := readNumber(filepath.Join(dir, "memory.max"))
	used, known := readNumber(filepath.Join(dir, "memory.current"))
	return limit, used, limited && known
}

func readNumber(path string) (uint64, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}
