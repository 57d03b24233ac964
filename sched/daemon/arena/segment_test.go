// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Every page of a segment is there, holds zeros, and is a huge one where the kernel lets
// memfds have those by MADV_COLLAPSE.
func TestSegmentIsThere(t *testing.T) {
	const size = fillStep + 6*mib
	seg, err := newSegment(size, func(uint64) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer seg.File.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(seg.File.Fd()), &stat); err != nil || stat.Size != size || stat.Blocks*512 != size {
		t.Errorf("%d bytes, %d there, %v; want %d", stat.Size, stat.Blocks*512, err, size)
	}
	content := make([]byte, size)
	if _, err := seg.File.ReadAt(content, 0); err != nil || bytes.Count(content, []byte{0}) != size {
		t.Errorf("not all zeros: %v", err)
	}
	if seg.Huge {
		t.Skip("of reserved huge pages")
	}
	if err := tryCollapse(t); err != nil {
		t.Skipf("no huge pages for memfds here: %v", err)
	}
	if hugeBytes(t, seg.File, size) == 0 { // a page that is busy just then stays small
		t.Error("no page is a huge one")
	}
}

func tryCollapse(t *testing.T) error {
	fd, err := unix.MemfdCreate("try", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, hugePage); err != nil {
		t.Fatal(err)
	}
	if err := write(fd, 0, 1); err != nil {
		t.Fatal(err)
	}
	return collapsed(fd, 0, hugePage)
}

// hugeBytes returns how much of the file the kernel maps as huge pages.
func hugeBytes(t *testing.T, f *os.File, size int) int {
	mem, unmap, err := mapAligned(int(f.Fd()), 0, size)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	bytes.Count(mem, []byte{1}) // touches all
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(smaps), fmt.Sprintf("\n%x-", uintptr(unsafe.Pointer(&mem[0]))))
	if !found {
		t.Fatal("the mapping is not in smaps")
	}
	for line := range strings.Lines(rest) {
		var kib int
		if n, _ := fmt.Sscanf(line, "ShmemPmdMapped: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	t.Fatal("no ShmemPmdMapped in smaps")
	return 0
}

// What the host has is bounded by the limits of all cgroups in which this process is.
func TestHostMemoryIsBoundedAbove(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{
		"proc/meminfo":     "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
		"proc/self/cgroup": "0::/pods.slice/pod.slice/c.scope\n",
		"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1\n",
		"sys/fs/cgroup/pods.slice/memory.max":                     "512000\n",
		"sys/fs/cgroup/pods.slice/memory.current":                 "409600\n",
		"sys/fs/cgroup/pods.slice/pod.slice/c.scope/memory.max":   "max\n",
	} {
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	host := Kernel{root}
	if pages, huge, ok := host.Free(); !ok || pages != 102400 || huge != 0 {
		t.Errorf("%d bytes are free, %d of huge pages, %v", pages, huge, ok)
	}
	if total := host.total(); total != 512000 {
		t.Errorf("%d bytes in all", total)
	}
}

// A thread that has filled memory runs again as its process does, whatever nice value that has.
func TestNicelyGoesBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may become less nice")
	}
	const self = 0
	nice := func() int {
		raw, err := unix.Getpriority(unix.PRIO_PROCESS, self)
		if err != nil {
			t.Error(err)
		}
		return 20 - raw
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // it ends with this goroutine
		was := nice() + 3
		if err := unix.Setpriority(unix.PRIO_PROCESS, self, was); err != nil {
			t.Error(err)
		}
		var filling int
		_ = nicely(NoNode, func() { filling = nice() })
		if filling < fillNice || nice() != was {
			t.Errorf("nice %d, %d while it filled, %d afterwards", was, filling, nice())
		}
	}()
	<-done
}
